"""`python no_memory.py LIBRARY COUNT`: products by a library that gets no memory for the rows that it arranges, and
passages that get none for their hidden units or for such a product.

In: the path of a library, and the number of attempts in each dtype. Out: `sound` if all of them raise MemoryError, and
small ones are right afterwards.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
from binding import unaided

from attnserve_server.native import library
from attnserve_server.native.passages import Forward, Passage, Passages
from attnserve_server.native.products import PackedWeight, Products

INPUTS = 1 << 21
"""As floats, arranged for vectors of 8 or 16, these take 64 or 128 MiB."""
HIDDEN = 1 << 20
"""Of so many units, 56 rows, which a thread computes together, take 112 or 224 MiB."""
ROOM = 32 << 20
"""The memory that there still is."""


def refuse(dtype: torch.dtype, count: int) -> None:
    """Raises if anything is wrong in a dtype."""
    weight, rows = PackedWeight.of(torch.zeros(16, INPUTS, dtype=dtype), None), torch.zeros(1, INPUTS, dtype=dtype)
    small, one = PackedWeight.of(torch.ones(16, 300, dtype=dtype), None), torch.ones(1, 300, dtype=dtype)
    narrow = Passage(width=16, dtype=dtype, output=weight)
    up, down = (PackedWeight.of(torch.zeros(shape, dtype=dtype), None) for shape in ((HIDDEN, 16), (16, HIDDEN)))
    wide = Passage(width=16, dtype=dtype, forward=Forward(None, up, "relu", False, down, None))
    many = torch.zeros(56, 16, dtype=dtype)
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + ROOM, unlimited[1]))
    for instructions in library.available():
        products, passages = Products(instructions, unaided), Passages(instructions, unaided)
        attempts: list[Callable[[], object]] = [
            partial(products.multiply, weight, rows),
            partial(passages.run, narrow, many[:1], rows, None),
            partial(passages.run, wide, many, many, None),
        ]
        for attempt in attempts * count:
            try:
                attempt()
            except MemoryError:
                continue
            raise AssertionError(f"it had the memory: {attempt}")
        assert (products.multiply(small, one) == 300).all()
        behind, _ = passages.run(Passage(width=16, dtype=dtype, output=small), many[:1], one, None)
        assert (behind == 300).all()
    resource.setrlimit(resource.RLIMIT_AS, unlimited)


def main() -> None:
    """Raises if anything is wrong."""
    library.PATH = Path(sys.argv[1])  # type: ignore[misc]
    library._found.cache_clear()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        refuse(dtype, int(sys.argv[2]))
    print("sound")


if __name__ == "__main__":
    main()
