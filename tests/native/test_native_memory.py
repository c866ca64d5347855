"""The native kernel reads nothing but its inputs, writes nothing but its results, and has no undefined behaviour.

In all other tests, `binding.attend` checks the memory around results; here, reading outside an input kills the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from binding import needs_native

from attnserve_server.native import library, sources

HERE = Path(__file__).parent


def run(script: str, built: Path, count: int, **environment: str) -> None:
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(HERE / script), str(built), str(count)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "sound\n"), f"{done.returncode}\n{done.stderr[-4000:]}"


@needs_native
def test_what_lies_beside_inputs_is_never_read() -> None:
    run("guarded.py", library.PATH, 300)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library built with the sanitizers for addresses and for undefined behaviour."""
    built = tmp_path_factory.mktemp("sanitized") / "attention.so"
    flags = ("-std=gnu11", "-O0", "-fPIC", "-shared", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    subprocess.run(["gcc", *sources.command(Path(library.__file__).parent, built, flags)], check=True)
    return built


def runtime(name: str) -> str | None:
    """The path of one of gcc's libraries, if there is a gcc that has it."""
    try:
        said = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    found = said.stdout.strip()
    return found if os.path.isabs(found) else None


needs_sanitizers = pytest.mark.skipif(
    not (runtime("libasan.so") and runtime("libubsan.so")) and "REQUIRE_NATIVE" not in os.environ,
    reason="gcc is not here, or has no sanitizers",
)


@needs_native
@needs_sanitizers
@pytest.mark.parametrize(("script", "count"), [("guarded.py", 150), ("dismissed.py", 40)])
def test_sanitizers_find_nothing(sanitized: Path, script: str, count: int) -> None:
    preloaded = f"{runtime('libasan.so')} {runtime('libubsan.so')}"
    run(script, sanitized, count, LD_PRELOAD=preloaded, ASAN_OPTIONS="detect_leaks=0", PYTHONMALLOC="malloc")
