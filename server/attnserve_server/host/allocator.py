"""The C library's allocator, tuned to how a server uses memory.

In: nothing. Out: one heap for all threads of the process, which keeps freed memory, but little of it when no large
reply has been sent for a while.

By itself, glibc gives each thread that allocates a heap of its own. gRPC receives messages on several threads. So
memory that is free in one heap would be of no use to another, and waiting requests would take up to twice their size.
glibc would also return free memory at the end of a heap, soon to ask for it again: then each page faults, and is filled
with zeros, before it is written. `make bench` measures the memory of waiting requests, and what large ones cost.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from contextlib import suppress
from typing import ClassVar, Final

M_ARENA_MAX: Final = -8
"""From glibc's malloc.h: the most heaps that there may be."""
M_TRIM_THRESHOLD: Final = -1
"""How much may be free at the end of a heap."""
M_MMAP_THRESHOLD: Final = -3
"""The size from which on memory is not taken from a heap."""

KEPT: Final = 256 << 20
"""The most unused bytes that are kept: room for messages in flight, and what is computed from them."""
LARGEST_OF_A_HEAP: Final = 32 << 20
"""The most that glibc accepts; larger messages are rare, and their memory is returned."""
QUIET_S: Final = 10.0
"""How long nothing large must have been let go before unused memory is given back: that is longer than callers who read
no replies have until their connection is cut, and gRPC lets go of the replies.
"""


def keep_one_heap() -> None:
    """Makes all threads that have not allocated yet use one heap, which keeps freed memory; on glibc only.

    What an environment variable sets is left as the operator has decided.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return
    for name, parameter, value in (
        ("arena_max", M_ARENA_MAX, 1),
        ("mmap_threshold", M_MMAP_THRESHOLD, LARGEST_OF_A_HEAP),
        ("trim_threshold", M_TRIM_THRESHOLD, KEPT),
    ):
        if not _is_decided(name):
            library.mallopt(parameter, value)


def give_back() -> None:
    """Gives the system all memory of the heap that is unused, if that is more than `KEPT`. Some of it lies between what
    is in use, where no threshold bounds it. On glibc only, and unless the operator has decided how much is kept. Other
    threads that allocate wait meanwhile: up to 0.25 ms for each MiB.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2") or _is_decided("trim_threshold"):
        return
    library.mallinfo2.restype = _HeapUse
    if library.mallinfo2().fordblks > KEPT:
        library.malloc_trim(0)


class UnusedMemory:
    """Gives unused memory back when large things have been let go, and no others for `QUIET_S`: until then the next
    ones take their place. On the event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._last = 0.0
        self._next_look: asyncio.TimerHandle | None = None

    def let_go(self) -> None:
        """Something large is no longer in use."""
        self._last = self._loop.time()
        if self._next_look is None:
            self._next_look = self._loop.call_later(QUIET_S, self._look)

    def _look(self) -> None:
        quiet_from = self._last + QUIET_S
        if quiet_from > self._loop.time():
            self._next_look = self._loop.call_at(quiet_from, self._look)
            return
        self._next_look = None
        with suppress(RuntimeError):  # no thread can be started: the memory stays
            threading.Thread(target=give_back, name="give-back", daemon=True).start()


class _HeapUse(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _is_decided(name: str) -> bool:
    """Whether an environment variable sets a parameter of malloc."""
    variables = f"MALLOC_{name.upper()}", f"MALLOC_{name.upper()}_"
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return f"glibc.malloc.{name}" in tunables or any(variable in os.environ for variable in variables)
