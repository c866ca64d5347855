"""Servers that are told to stop before they serve, or once more as they end: whenever that is, they end well."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import calls
import pytest
from conftest import POOL
from environment import ENVIRONMENT

from attnserve_server.errors import Draining
from attnserve_server.server import Server, configured_device
from attnserve_server.settings.config import Config

LOADING = """
import runpy, signal, sys
from importlib.abc import MetaPathFinder

module = sys.argv.pop(1)


class Halt(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == module:
            print("loading", flush=True)
            sys.stdin.read()


signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.meta_path.insert(0, Halt())
runpy.run_module("attnserve_server", run_name="__main__", alter_sys=True)
"""
"""Runs the server, and stops where it loads a module until standard input ends. SIGHUP is not ignored, as it is where
the tests run under nohup.
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("module", ["starting", "settings.command_line", "serving"])
def test_told_to_stop_while_anything_is_loaded_it_ends_well(module: str, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOADING, f"attnserve_server.{module}", *POOL],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert "loading\n" in process.stdout
            process.send_signal(number)
            assert "Traceback" not in process.communicate(timeout=60)[1]
            assert process.returncode == 0
        finally:
            process.kill()


def test_nothing_is_loaded_before_signals_are_expected() -> None:
    program = "import sys, attnserve_server.__main__; print(*sys.modules)"
    command = [sys.executable, "-S", "-c", program]
    loaded = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=True).stdout
    ours = {name for name in loaded.split() if name.partition(".")[0] not in sys.stdlib_module_names}
    assert ours == {"__main__", *(f"attnserve_server{name}" for name in ("", ".__main__", ".stop_signals"))}


@contextmanager
def first_process(*flags: str) -> Iterator[subprocess.Popen[str]]:
    """A server started like a container's first process: SIGTERM has no handler and is ignored."""
    code = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code += "; from attnserve_server.__main__ import main; sys.exit(main(sys.argv[1:]))"
    addresses = ("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
    command = [sys.executable, "-c", code, *addresses, "--device", "cpu", "--cache-bytes", "1MiB", *flags]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_told_to_stop_while_torch_is_loaded_it_ends_well() -> None:
    with first_process() as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("attnserve: ")  # torch is still to be loaded, which takes a second
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_told_to_stop_while_layers_are_loaded_it_ends_well(tmp_path: Path) -> None:
    """Their file never ends."""
    endless = tmp_path / "layers.toml"
    os.mkfifo(endless)
    ends: list[int] = []

    def is_read() -> bool:
        try:
            ends.append(os.open(endless, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # nobody reads it yet
            return False
        return True

    with first_process("--layers", str(endless)) as process:
        calls.until(is_read, "it loads")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    os.close(ends[0])


LOADS_FOR_EVER = """
EPOLL = "232", "281", "22"  # epoll_wait and epoll_pwait on x86-64, epoll_pwait on ARM
import os, pathlib, signal, sys, threading
from attnserve_server.__main__ import main
from attnserve_server.layers.registry import Registry

def read(*_):
    call = pathlib.Path(f"/proc/self/task/{os.getpid()}/syscall")
    while call.read_text().split()[0] not in EPOLL:
        pass
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    threading.Event().wait()

Registry._read = read
sys.exit(main(sys.argv[1:]))
"""
"""A server that is told to stop while it loads, in a thread other than that of the event loop, which sleeps on."""


@pytest.mark.skipif(not os.path.exists("/proc/self/syscall"), reason="the kernel does not say what a thread waits for")
def test_a_signal_that_interrupts_no_waiting_loop_is_not_lost() -> None:
    flags = ("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--device", "cpu", "--layers", "any", *POOL)
    command = [sys.executable, "-c", LOADS_FOR_EVER, *flags]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


TOLD_AGAIN = """
import atexit, os, sys
from attnserve_server.__main__ import main
from attnserve_server.stop_signals import STOP_SIGNALS

atexit.register(lambda: [os.kill(os.getpid(), number) for number in STOP_SIGNALS])
sys.exit(main(sys.argv[1:]))
"""
"""A server that is told to stop once more after it has ended, while its process still does."""


def test_told_again_as_the_process_ends_it_ends_well() -> None:
    flags = ("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--device", "cpu", *POOL)
    command = [sys.executable, "-c", TOLD_AGAIN, *flags]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert any(line.startswith("ready: ") for line in process.stdout)
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
            assert (process.returncode, said.endswith(" ended\n")) == (0, True), said
        finally:
            process.kill()


async def test_a_draining_that_is_cut_short_still_refuses_what_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """When gRPC stops it would cancel that, and stock clients retry only what is refused."""
    for name in ("LAST_CALLS_S", "MOST_LAST_CALLS_S"):
        monkeypatch.setattr(f"attnserve_server.server.{name}", calls.PATIENCE_S)
    config = Config(listen="127.0.0.1:0", http_listen="127.0.0.1:0", device="cpu", cache_bytes=1 << 20)
    server = Server(config, configured_device)
    await server.start()
    ending = asyncio.create_task(server.cut_draining_short())
    assert not (await asyncio.wait([ending], timeout=0.2))[0]
    with pytest.raises(Draining):
        server.engine.check_open()
    assert not server.health.accepts
    ending.cancel()
    await server.stop()
