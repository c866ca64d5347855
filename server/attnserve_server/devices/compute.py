"""What layers need of a device: row-wise functions and attention, on tensors that are there already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias, TypeVar

import torch

from attnserve_server.kernels import AttentionCall, AttentionResult
from attnserve_server.native.products import Products

Item = TypeVar("Item")
Result = TypeVar("Result")
Rows = TypeVar("Rows", torch.Tensor, tuple[torch.Tensor, ...])
RowFunction: TypeAlias = Callable[..., Rows]
"""Tensors of n rows in, tensors of n rows out; each row of these follows from the same row of those alone."""

ROWS = 16
"""Rows come in multiples of this many, the last ones of no meaning.

On a CPU, torch multiplies matrices in another order for some numbers of rows, and computes what is left of an array
behind its last whole vector by other instructions than the vectors. With multiples of 16 rows, at most MAX_ROWS of them
and packed, a row's bits depend neither on its place nor on the other rows; but matrices have to be multiplied, and
functions like exp and tanh applied, at widths that are multiples of 16 too. Products of some dtypes divide them further
(`layers/product.py`).
"""
MAX_ROWS = 512

ALONE_FLOPS = 4_000_000
"""Work below this is done by the native library before another thread could have taken the interpreter, and given it
back.
"""

UNEVEN = 1.15
"""Items are shared out among threads if the busiest has no more than so many times its part: then each computes its own
from end to end, where step by step all would wait for the last, and join what they made.
"""


AttendPacked: TypeAlias = Callable[[bytearray, int], list[int]]
"""Computes packed calls of the native kernel, which cost so many FLOPs: the places of those whose results are not
finite, and have no meaning.
"""

ApplyPacked: TypeAlias = Callable[[bytes, bytearray, int], list[int]]
"""Computes packed sequences by a packed multi-head layer of the native library: likewise."""


class Compute(Protocol):
    """A device, as layers see it; used by as many threads at a time as it takes batches."""

    torch_device: torch.device
    """Where tensors are."""

    attend_packed: AttendPacked | None
    """None where there is no native kernel."""

    apply_packed: ApplyPacked | None
    """Likewise."""

    products: Products | None
    """Of weights of float32, if they are compiled: none where there is no native kernel."""

    def share(
        self, compute: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item], flops: Sequence[int]
    ) -> Sequence[Result]:
        """`compute(items)`, or what calls for some of the items each give, each on a thread. What `compute` makes of an
        item must not depend on the others; `flops` is what each costs.
        """

    def rows(self, function: RowFunction[Rows], *tensors: torch.Tensor, flops: int) -> Rows:
        """`function(*tensors)`; the tensors have equally many rows, a multiple of ROWS. `flops` is what it costs."""

    def attend(self, calls: list[AttentionCall], flops: int) -> list[AttentionResult]:
        """The results of calls, in their order. `flops` is what they cost together."""

    def run_each(self, computations: Sequence[Callable[[], AttentionResult]], flops: int) -> list[AttentionResult]:
        """The results of computations, in their order. `flops` is what they cost together."""


def even_shares(costs: Sequence[int], threads: int) -> tuple[list[list[int]], list[int]]:
    """The places of items for each thread, if that is even, and those that are better divided among all: none, one, or
    all of them.
    """
    places = list(range(len(costs)))
    rest: list[int] = []
    for _ in range(2):
        parts = [[places[place] for place in part] for part in shares([costs[place] for place in places], threads)]
        loads = [sum(costs[place] for place in part) for part in parts]
        if len(parts) == threads and max(loads) * threads <= UNEVEN * sum(loads):
            return parts, rest
        if len(places) < 2:
            break
        busiest = parts[loads.index(max(loads))]
        rest = [min(busiest, key=costs.__getitem__)]
        places.remove(rest[0])
    return [], list(range(len(costs)))


def shares(costs: Sequence[int], threads: int) -> list[list[int]]:
    """The places of items of these costs, divided among threads: the next largest to who has least, each in order."""
    parts: list[list[int]] = [[] for _ in range(threads)]
    loads = [0] * threads
    for place in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        least = loads.index(min(loads))
        parts[least].append(place)
        loads[least] += costs[place]
    return [sorted(part) for part in parts if part]


def chunks(rows: int, threads: int) -> Iterator[slice]:
    """Ranges of whole multiples of ROWS rows, none above MAX_ROWS, in numbers that busy all threads alike."""
    blocks, count = rows // ROWS, -(-rows // MAX_ROWS)
    count = min(-(-count // threads) * threads, blocks)
    for place in range(count):
        yield slice(blocks * place // count * ROWS, blocks * (place + 1) // count * ROWS)
