"""The native kernel reads nothing but its inputs, writes nothing but its results, and has no undefined behaviour.

`attend` of `binding` looks at what lies around results in all other tests; here, what is read beside inputs kills.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from binding import needs_native

from attnserve_server.native import library, sources

SCRIPT = Path(__file__).with_name("guarded.py")


def run(built: Path, calls: int, **environment: str) -> None:
    paths = [*(str(path) for path in (SCRIPT.parent, SCRIPT.parent.parent)), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(built), str(calls)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "sound\n"), f"{done.returncode}\n{done.stderr[-4000:]}"


@needs_native
def test_what_lies_beside_inputs_is_never_read() -> None:
    run(library.PATH, 300)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library with what finds bad addresses, and all else that C leaves undefined."""
    built = tmp_path_factory.mktemp("sanitized") / "attention.so"
    flags = ("-std=gnu11", "-O0", "-fPIC", "-shared", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    subprocess.run(["gcc", *sources.command(Path(library.__file__).parent, built, flags)], check=True)
    return built


def runtime(name: str) -> str | None:
    """Where a library of gcc is, if there is a gcc that has it."""
    try:
        said = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    found = said.stdout.strip()
    return found if os.path.isabs(found) else None


@needs_native
@pytest.mark.skipif(
    not (runtime("libasan.so") and runtime("libubsan.so")) and "REQUIRE_NATIVE" not in os.environ,
    reason="gcc is not here, or has no sanitizers",
)
def test_sanitizers_find_nothing(sanitized: Path) -> None:
    preloaded = f"{runtime('libasan.so')} {runtime('libubsan.so')}"
    run(sanitized, 150, LD_PRELOAD=preloaded, ASAN_OPTIONS="detect_leaks=0")
