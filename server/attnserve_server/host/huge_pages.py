"""Memory in huge pages, for what is large, stays, and is read through again and again.

In: a size. Out: an array, for which Linux is asked for pages of 2 MiB instead of 4 KiB. The address of each page that
is read has to be translated, twice on a virtual machine. A processor remembers the translations of a few thousand
pages: in small pages, these are a few MiB. `python -m benchmarks --workloads D64` reads 512 MiB in each step. And
small pages take many times as long to give back to the system, with Python's lock held, so that nobody is served.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE: Final = 2 << 20
"""The size of a huge page of x86-64, and of 64-bit Arm with small pages of 4 KiB, in bytes."""


def zeros(size: int) -> NDArray[np.uint8]:
    """Zeros, as `empty`, written once so that the memory is committed."""
    array = empty(size)
    array.fill(0)
    return array


def empty(size: int) -> NDArray[np.uint8]:
    """Memory that is to be written. All but its last bytes are in huge pages, if the system has them. Raises
    MemoryError.
    """
    try:
        memory = mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error.strerror}") from None
    array = np.frombuffer(memory, np.uint8)
    begin, whole = -array.ctypes.data % HUGE_PAGE, size // HUGE_PAGE * HUGE_PAGE
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    return array[begin : begin + size]
