"""The C library's allocator, tuned to how a server uses memory.

In: nothing. Out: one heap for all threads of the process, which keeps freed memory. glibc gives each thread that
allocates a heap of its own; gRPC receives messages on several threads, so that memory that is free in one heap is of no
use to another, and waiting requests take up to twice their size. And it returns free memory at the end of a heap, soon
to ask for it again: each page then faults, and is filled with zeros, before it is written. `make bench` measures the
memory of waiting requests, and what large ones cost.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

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


def keep_one_heap() -> None:
    """Has all threads that have not allocated yet use one heap, which keeps freed memory; on glibc only.

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
        variables = f"MALLOC_{name.upper()}", f"MALLOC_{name.upper()}_"
        tunables = os.environ.get("GLIBC_TUNABLES", "")
        if f"glibc.malloc.{name}" not in tunables and not any(variable in os.environ for variable in variables):
            library.mallopt(parameter, value)
