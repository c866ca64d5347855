"""Scripts in processes of their own, by libraries built with gcc's sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from attnserve_server.native import library, sources

HERE = Path(__file__).parent


def build(directory: Path, *flags: str) -> Path:
    """The library, built with these flags of gcc's."""
    built = directory / "attention.so"
    command = sources.command(Path(library.__file__).parent, built, ("-std=gnu11", "-fPIC", "-shared", *flags))
    subprocess.run(["gcc", *command], check=True)
    return built


def run(script: str, built: Path, count: int, *, before: tuple[str, ...] = (), **environment: str) -> None:
    """Asserts that `python script built count`, after the command `before`, ends with `sound`."""
    paths = [str(HERE), str(HERE.parent), str(HERE.parent / "layers"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [*before, sys.executable, str(HERE / script), str(built), str(count)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "sound\n"), f"{done.returncode}\n{done.stderr[-4000:]}"


def runtime(name: str) -> str | None:
    """The path of one of gcc's libraries, if there is a gcc that has it."""
    try:
        said = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    found = said.stdout.strip()
    return found if os.path.isabs(found) else None
