"""The native kernel reads nothing but its inputs, writes nothing but its results, and has no undefined behaviour.

In all other tests, `binding.attend` checks the memory around results; here, reading outside an input kills the process.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from binding import needs_native
from sanitized import HERE, build, run, runtime

from attnserve_server.native import library


@needs_native
def test_what_lies_beside_inputs_is_never_read() -> None:
    run("guarded.py", library.PATH, 300)


@needs_native
def test_without_memory_a_product_is_refused() -> None:
    """Again and again: were anything kept of what it did get, there would soon be no room for a small one."""
    run("no_memory.py", library.PATH, 1000)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library built with the sanitizers for addresses and for undefined behaviour, and with allocations that can be
    made to fail.
    """
    flags = "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
    failing = str(HERE / "allocations.c"), "-Wl,--wrap=malloc,--wrap=aligned_alloc,--wrap=free"
    return build(tmp_path_factory.mktemp("sanitized"), *flags, *failing)


needs_sanitizers = pytest.mark.skipif(
    not (runtime("libasan.so") and runtime("libubsan.so")) and "REQUIRE_NATIVE" not in os.environ,
    reason="gcc is not here, or has no sanitizers",
)


@needs_native
@needs_sanitizers
@pytest.mark.parametrize(
    ("script", "count"),
    [("guarded.py", 150), ("dismissed.py", 40), ("stepping_decoders.py", 20), ("failing_allocations.py", 2)],
)
def test_sanitizers_find_nothing(sanitized: Path, script: str, count: int) -> None:
    preloaded = f"{runtime('libasan.so')} {runtime('libubsan.so')}"
    run(script, sanitized, count, LD_PRELOAD=preloaded, ASAN_OPTIONS="detect_leaks=0", PYTHONMALLOC="malloc")
