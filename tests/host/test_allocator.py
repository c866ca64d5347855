"""Memory placement: all threads of a process allocate from one heap, which keeps freed memory, once told to; and
much that is unused is given back.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading

import pytest
from clock import Clock, clock

from attnserve_server.host import allocator
from attnserve_server.host.allocator import QUIET_S, UnusedMemory
from attnserve_server.rpc.unread import FAREWELL_S

__all__ = ["clock"]  # a fixture

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


# What the others begin with: C's own functions.
LIBRARY = """
import ctypes

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes = (ctypes.c_size_t,)
library.free.argtypes = (ctypes.c_void_p,)
"""

# Memory for messages is written and freed, twice: prints the number of page faults of the second time.
MESSAGES = f"""
{LIBRARY}
import resource, sys
from attnserve_server.host.allocator import keep_one_heap

if sys.argv[1] == "keep":
    keep_one_heap()

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

# Memory is freed below some that is not: prints how many bytes of it the system gets back.
UNUSED = f"""
{LIBRARY}
import resource, sys
from pathlib import Path
from attnserve_server.host.allocator import give_back, keep_one_heap

keep_one_heap()

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

messages = [library.malloc(4 << 20) for _ in range(int(sys.argv[1]))]
for message in messages:
    ctypes.memset(message, 1, 4 << 20)
for message in messages[:-1]:
    library.free(message)
before = resident()
give_back()
print(before - resident())
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


@of_glibc
@pytest.mark.parametrize(
    ("mebibytes", "variables", "given"),
    [(320, {}, True), (200, {}, False), (320, {"MALLOC_TRIM_THRESHOLD_": str(1 << 30)}, False)],
)
def test_much_that_is_unused_is_given_back_unless_the_operator_has_decided(
    mebibytes: int, variables: dict[str, str], given: bool
) -> None:
    back = run(UNUSED, str(mebibytes // 4), variables)
    assert back > (mebibytes - 16) << 20 if given else back < 16 << 20


def test_what_nobody_reads_is_gone_when_unused_memory_is_given_back() -> None:
    """Their connections have been cut by then: while these are open, gRPC keeps the replies."""
    assert QUIET_S > FAREWELL_S


def test_unused_memory_is_given_back_once_nothing_large_is_let_go(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back = threading.Event()
    monkeypatch.setattr(allocator, "give_back", given_back.set)
    unused = UnusedMemory()
    for second in range(20):
        unused.let_go()
        clock.until(100 + second)
    assert not given_back.is_set()
    clock.until(119 + QUIET_S)
    assert given_back.wait(60)
    assert not clock.timers
    unused.let_go()
    assert len(clock.timers) == 1
