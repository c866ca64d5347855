"""The C library's memory, told how a server uses it.

In: nothing. Out: one heap for all threads of the process, which keeps what is freed. glibc gives each thread that
allocates a heap of its own; gRPC receives messages on several, so that what is free in one heap is of no use to those
who need it in another, and requests that wait take up to twice their size. And it returns what is free at the end of a
heap, soon to ask for it again: each page is then found missing, and filled with zeros, before it is written.
`make bench` measures the memory of requests that wait, and what large ones cost.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

M_ARENA_MAX: Final = -8
"""From glibc's malloc.h: the most heaps."""
M_TRIM_THRESHOLD: Final = -1
"""How much may be free at the end of a heap."""
M_MMAP_THRESHOLD: Final = -3
"""From which size on memory is not taken from a heap."""

KEPT: Final = 256 << 20
"""The most bytes that are kept where nobody needs them: messages in flight, and what is computed of them."""
LARGEST_OF_A_HEAP: Final = 32 << 20
"""The most that glibc accepts; larger messages are rare, and what they took is given back."""


def keep_one_heap() -> None:
    """Has all threads that have not allocated yet use one heap, which keeps what is freed: where there is glibc.

    Where a variable of the environment sets something of it, the operator has decided.
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
