"""Memory in huge pages, for what is large, stays, and is read through again and again.

In: a size. Out: an array, for which Linux is asked for pages of 2 MiB instead of 4 KiB. The address of each page that
is read has to be translated, twice on a virtual machine. A processor remembers the translations of a few thousand
pages: in small pages, these are a few MiB. `python -m benchmarks --workloads D64` reads 512 MiB in each step.
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
    """Zeros, written once so that the memory is committed, in huge pages if the system has them. Raises MemoryError."""
    try:
        memory = mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error.strerror}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    begin = -array.ctypes.data % HUGE_PAGE
    array = array[begin : begin + size]
    array.fill(0)
    return array
