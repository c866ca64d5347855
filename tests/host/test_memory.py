"""How much memory the process holds, read from a file like the kernel's."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from attnserve_server.host.memory import resident_bytes


def test_resident_memory_is_the_second_number_in_pages(tmp_path: Path) -> None:
    (tmp_path / "statm").write_text("5000 700 300 1 0 200 0\n")
    assert resident_bytes(tmp_path / "statm") == 700 * os.sysconf("SC_PAGE_SIZE")


def test_where_the_kernel_does_not_say_it_is_0(tmp_path: Path) -> None:
    assert resident_bytes(tmp_path / "absent") == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system has no /proc")
def test_what_this_process_writes_to_is_counted() -> None:
    """In memory of its own: what the allocator has free already, however much, is resident before."""
    held = resident_bytes()
    assert held > 20 << 20, "this one has NumPy"
    size = 64 << 20
    with mmap.mmap(-1, size) as memory:
        assert resident_bytes() < held + size // 2
        memory.write(b"1" * size)
        assert resident_bytes() > held + size // 2
