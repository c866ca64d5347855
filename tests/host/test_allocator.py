"""Memory placement: all threads of a process allocate from one heap, which keeps freed memory, once told to."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Each thread requests less than glibc would mmap, while the others hold theirs, and reports its address.
PROGRAM = """
import ctypes, sys, threading
from attnserve_server.host.allocator import keep_one_heap

if sys.argv[1] == "share":
    keep_one_heap()
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


# Memory for messages is written and freed, twice: prints the number of page faults of the second time.
MESSAGES = """
import ctypes, resource, sys
from attnserve_server.host.allocator import keep_one_heap

if sys.argv[1] == "keep":
    keep_one_heap()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes = (ctypes.c_size_t,)
library.free.argtypes = (ctypes.c_void_p,)

def receive():
    messages = [library.malloc(size) for size in (1 << 20, 6 << 20, 16 << 20)]
    for message, size in zip(messages, (1 << 20, 6 << 20, 16 << 20)):
        ctypes.memset(message, 1, size)
    for message in messages:
        library.free(message)

receive()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
receive()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

of_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or sys.platform != "linux", reason="of glibc on Linux alone"
)


def run(program: str, how: str, variables: dict[str, str]) -> int:
    """The number that a program prints, run with argument `how` and only these variables for the allocator."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"
    }
    done = subprocess.run(
        [sys.executable, "-c", program, how],
        env={**environment, **variables, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return int(done.stdout)


@of_glibc
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
    assert (run(PROGRAM, how, variables) == 4) == shared


@of_glibc
@pytest.mark.parametrize(
    ("how", "variables", "kept"),
    [
        ("keep", {}, True),
        ("leave", {}, False),
        ("keep", {"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        ("keep", {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}, False),
    ],
)
def test_memory_for_messages_is_kept_unless_the_operator_has_decided(
    how: str, variables: dict[str, str], kept: bool
) -> None:
    pages = (23 << 20) // os.sysconf("SC_PAGE_SIZE")
    missing = run(MESSAGES, how, variables)
    assert missing < pages / 20 if kept else missing > pages / 2
