"""How work is divided among the threads of a CPU, and its results are joined, so that no bit of a result depends on it.

In: what items cost, numbers of rows, or calls. Out: shares, ranges of rows, and calls for parts of calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from attnserve_server.devices.compute import MAX_ROWS, ROWS, Rows
from attnserve_server.kernels import AttentionCall, kernel_for

UNEVEN = 1.15
"""Items are shared out among threads if the busiest gets at most this many times the average load: each thread then
computes its items from end to end, instead of waiting for the slowest at every step and joining the parts.
"""


def even_shares(costs: Sequence[int], threads: int) -> tuple[list[list[int]], list[int]]:
    """The places of each thread's items; and those of the items that are better split among all threads: none or one,
    if the others divide evenly, or else all.
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
    """Places of items of these costs, divided greedily: the next largest goes to the least loaded thread. Ascending."""
    parts: list[list[int]] = [[] for _ in range(threads)]
    loads = [0] * threads
    for place in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        least = loads.index(min(loads))
        parts[least].append(place)
        loads[least] += costs[place]
    return [sorted(part) for part in parts if part]


def chunks(rows: int, threads: int) -> Iterator[slice]:
    """Ranges of rows, all but the last of multiples of ROWS and none above MAX_ROWS, in a number that keeps all threads
    equally busy.
    """
    blocks, count = -(-rows // ROWS), -(-rows // MAX_ROWS)
    count = min(-(-count // threads) * threads, blocks)
    for place in range(count):
        yield slice(blocks * place // count * ROWS, min(rows, blocks * (place + 1) // count * ROWS))


def end_to_end(parts: list[Rows]) -> Rows:
    """Concatenates tensors, or tuples of tensors, by rows."""
    if isinstance(parts[0], torch.Tensor):
        return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])
    return tuple(torch.cat(of_parts) for of_parts in zip(*parts, strict=True))


def divided(call: AttentionCall, count: int) -> tuple[list[AttentionCall], int]:
    """A call as calls for some of its sequences (axis 0), or of its heads (axis 1) where that changes no bits."""
    sequences, kv_heads = call.query.shape[0], call.key.shape[1]
    # What does not divide evenly by sequences may do so by heads.
    if sequences % count and kv_heads >= count and kernel_for(call).heads_apart:
        return [call.kv_heads(start, stop) for start, stop in _ranges(kv_heads, count)], 1
    if sequences >= count:
        return [call.sequences(start, stop) for start, stop in _ranges(sequences, count)], 0
    return [call], 0


def _ranges(length: int, count: int) -> list[tuple[int, int]]:
    edges = [length * place // count for place in range(count + 1)]
    return list(itertools.pairwise(edges))
