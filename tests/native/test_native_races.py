"""No two threads of the native library touch the same memory in no certain order."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from binding import needs_native
from sanitized import build, run, runtime

AT_FIXED_ADDRESSES = ("setarch", "-R") if shutil.which("setarch") else ()
"""Older sanitizers for threads do not start where addresses are drawn from more than 28 bits."""


def environment() -> dict[str, str]:
    # NumPy's library for products waits for its threads in ways that the sanitizer does not see.
    return {"LD_PRELOAD": runtime("libtsan.so") or "", "TSAN_OPTIONS": "halt_on_error=1", "OPENBLAS_NUM_THREADS": "1"}


def starts() -> bool:
    """Whether gcc's sanitizer for threads is here, and starts on this machine."""
    if not runtime("libtsan.so"):
        return False
    command = [*AT_FIXED_ADDRESSES, sys.executable, "-c", ""]
    return not subprocess.run(command, env=os.environ | environment(), capture_output=True, check=False).returncode


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library built with the sanitizer for threads; at -O0, since compiling it at -O1 took most of a minute."""
    if not starts():
        pytest.skip("gcc is not here, or its sanitizer for threads does not start")
    return build(tmp_path_factory.mktemp("sanitized"), "-O0", "-g", "-fsanitize=thread")


@needs_native
@pytest.mark.parametrize(("script", "count"), [("racing.py", 4), ("dismissed.py", 10), ("stepping_decoders.py", 6)])
def test_the_sanitizer_for_threads_finds_nothing(sanitized: Path, script: str, count: int) -> None:
    run(script, sanitized, count, before=AT_FIXED_ADDRESSES, **environment())
