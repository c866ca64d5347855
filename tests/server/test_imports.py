"""What the server imports, and what that does to the process, in separate processes."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from environment import ENVIRONMENT, run_without_the_extra


def test_modules_are_not_looked_through_for_garbage() -> None:
    """That would stall the event loop; objects made later are collected."""
    code = "import gc, sys; from attnserve_server.__main__ import main; main(sys.argv[1:])"
    code += "; print(gc.isenabled(), gc.get_freeze_count(), len(gc.get_objects()))"
    with socket.create_server(("127.0.0.1", 0)) as taken:  # so that it exits at once
        addresses = ("--listen", f"127.0.0.1:{taken.getsockname()[1]}", "--http-listen", "127.0.0.1:0")
        command = [sys.executable, "-c", code, *addresses, "--device", "cpu", "--cache-bytes", "1MiB"]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    enabled, frozen, others = done.stdout.split()[-3:]
    assert enabled == "True", done.stderr
    assert int(frozen) > 10 * int(others)


@pytest.mark.parametrize("argv", [("--help",), ("token", "ranker")], ids=" ".join)
def test_what_serves_nothing_needs_nothing_that_serving_does(argv: tuple[str, ...]) -> None:
    assert run_without_the_extra(*argv).returncode == 0


@pytest.mark.parametrize(("argv", "missing"), [((), "torch"), (("layers", "check", "layers.toml"), "safetensors")])
def test_what_is_not_installed_is_one_line(argv: tuple[str, ...], missing: str) -> None:
    done = run_without_the_extra(*argv)
    line = f"attnserve-server: {missing} is not installed: pip install 'attnserve[server]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)


def test_the_command_line_stays_without_torch() -> None:
    """Neither help nor tokens import torch."""
    program = "import sys, attnserve_server.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, timeout=60, check=False).returncode == 0


def test_torch_compiles_no_operators() -> None:
    """That would take a compiler, which images do not have. torch says itself whether it has been told."""
    pytest.importorskip("torch._native", reason="this torch compiles none anyway")
    program = (
        "import attnserve_server.devices; from torch._native.common_utils import check_native_jit_disabled as told\n"
        "assert told()"
    )
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "TORCH_DISABLE_NATIVE_JIT"}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=60, check=False).returncode == 0
