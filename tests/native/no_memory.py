"""`python no_memory.py LIBRARY COUNT`: products by a library that gets no memory for the rows that it arranges.

In: the path of a library, and the number of attempts in each dtype. Out: `sound` if all of them raise MemoryError, and
a small product is right afterwards.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from attnserve_server.native import library
from attnserve_server.native.products import PackedWeight, Products

INPUTS = 1 << 21
"""As floats, arranged for vectors of 8 or 16, these take 64 or 128 MiB."""
ROOM = 32 << 20
"""The memory that there still is."""


def main() -> None:
    """Raises if anything is wrong."""
    library.PATH = Path(sys.argv[1])  # type: ignore[misc]
    library._found.cache_clear()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        weight, rows = PackedWeight.of(torch.zeros(16, INPUTS, dtype=dtype), None), torch.zeros(1, INPUTS, dtype=dtype)
        small, one = PackedWeight.of(torch.ones(16, 300, dtype=dtype), None), torch.ones(1, 300, dtype=dtype)
        unlimited = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + ROOM, unlimited[1]))
        for instructions in library.available():
            products = Products(instructions)
            for _ in range(int(sys.argv[2])):
                try:
                    products.multiply(weight, rows)
                except MemoryError:
                    continue
                raise AssertionError("it had the memory")
            assert (products.multiply(small, one) == 300).all()
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
    print("sound")


if __name__ == "__main__":
    main()
