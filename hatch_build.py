"""Builds the native kernel with the package, where there is a C compiler; without it the package is pure Python.

`python hatch_build.py` builds it in place, for work on the sources. HATCH_BUILD_NO_HOOKS=true leaves it out.
"""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from platform import machine
from sysconfig import get_platform
from types import SimpleNamespace
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
NATIVE = ROOT / "server" / "attnserve_server" / "native"
LIBRARY = NATIVE / "attention.so"
sources = SimpleNamespace(**runpy.run_path(str(NATIVE / "sources.py")))


def build() -> str | None:
    """Builds the library beside its sources, unless it was made of them. Returns what hindered it, if any did."""
    if sys.platform != "linux" or machine() not in ("x86_64", "AMD64"):
        return f"it is for Linux on x86-64, and this is {sys.platform} on {machine()}"
    if LIBRARY.exists() and sources.made(LIBRARY):
        return None
    compiler = (
        shlex.split(os.environ.get("CC", ""))
        or [found for found in map(shutil.which, ("cc", "gcc", "clang")) if found][:1]
    )
    if not compiler:
        return "there is no C compiler"
    # Processes may have the old one loaded, and others may look for it meanwhile.
    made = LIBRARY.with_name(f"{LIBRARY.name}.{os.getpid()}")
    command = [*compiler, *sources.command(NATIVE, made)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.replace(LIBRARY)
    except OSError as error:
        return f"{compiler[0]} does not run: {error}"
    except subprocess.CalledProcessError as error:
        return f"{shlex.join(command)} failed: {error.stderr}"
    finally:
        made.unlink(missing_ok=True)
    return None


class NativeKernel(BuildHookInterface[Any]):
    """What hatchling runs before it builds a wheel, be it for an editable installation."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the library to the wheel, which is then one for this platform, whatever the Python."""
        if self.target_name != "wheel":
            return
        hindrance = build()
        if hindrance is not None:
            self.app.display_warning(f"attnserve: without its native kernel, since {hindrance}")
            return
        build_data["artifacts"].append(f"/{LIBRARY.relative_to(ROOT).as_posix()}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    sys.exit(build())
