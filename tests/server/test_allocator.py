"""Whose memory is where: all threads of a process allocate from one heap, once it has been told."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Each thread asks for less than glibc would map by itself, while the others hold theirs, and says where it lies.
PROGRAM = """
import ctypes, sys, threading
from attnserve_server.allocator import share_one_heap

if sys.argv[1] == "share":
    share_one_heap()
malloc = ctypes.CDLL(None).malloc
malloc.restype = ctypes.c_void_p
malloc.argtypes = (ctypes.c_size_t,)
everybody = threading.Barrier(4)
found = []

def allocate():
    everybody.wait()
    found.append(malloc(50_000))
    everybody.wait()

threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
(heap,) = (line.split()[0].split("-") for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]"))
begin, end = (int(address, 16) for address in heap)
print(sum(begin <= address < end for address in found))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or sys.platform != "linux", reason="of glibc on Linux alone")
@pytest.mark.parametrize(
    ("how", "variables", "shared"),
    [
        ("share", {}, True),
        ("leave", {}, False),
        ("share", {"MALLOC_ARENA_MAX": "8"}, False),
        ("share", {"GLIBC_TUNABLES": "glibc.malloc.arena_max=8"}, False),
    ],
)
def test_threads_share_one_heap_unless_the_operator_has_decided(
    how: str, variables: dict[str, str], shared: bool
) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        env={**environment, **variables, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert (int(done.stdout) == 4) == shared
