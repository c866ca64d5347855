"""Which queries and keys a kernel computes at once, where it computes in blocks: few shapes, and few keys in vain.

In: a band and sizes. Out: blocks of queries, the parts of the keys that they reach, and what the band excludes there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import gcd

import torch

from attnserve_server.kernels.band import Band

BLOCK_ROWS = 256
"""The rows of a block: queries of all heads that share a key head. The scores of more would not fit into the cache."""
ROW_GRID = 32
"""Blocks have a multiple of so many rows."""
PART_KEYS = 1024
"""The most keys that a block is computed over at once."""
KEY_GRID = 64
"""Parts begin and end at multiples of so many keys: the last one may end beyond all keys."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Keys of a part of which a band excludes some: `added` [R, keys] is -inf for those, else 0.

    Added to a score that is not finite it may give NaN.
    """

    keys: slice
    added: torch.Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Keys that a block is computed over at once, and those among them of which the band excludes some."""

    keys: slice
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Queries from `start` to `stop`, and all keys that any of them reaches."""

    start: int
    stop: int
    parts: tuple[Part, ...]


@lru_cache(maxsize=32)
def plan(band: Band, group: int) -> tuple[int, tuple[Block, ...]]:
    """R, and the blocks of all queries that reach any key; a block has at most R of them, of each of `group` heads."""
    first, last = band.reaching()
    if first >= last:
        return 0, ()
    step = ROW_GRID // gcd(ROW_GRID, group)
    most = max(step, BLOCK_ROWS // group // step * step)
    count = -(-(last - first) // most)
    rows = -(-(last - first) // (count * step)) * step
    starts = range(first, last, rows)
    return rows, tuple(_block(band, start, min(start + rows, last), rows) for start in starts)


def _block(band: Band, start: int, stop: int, rows: int) -> Block:
    first, last = band.queries(start, stop).reach()
    begin, end = first // KEY_GRID, -(-last // KEY_GRID)
    count = -(-(end - begin) * KEY_GRID // PART_KEYS)
    bounds = [(begin + (end - begin) * place // count) * KEY_GRID for place in range(count + 1)]
    # Between these two, no query of the block excludes any key.
    inner_begin = -(-band.begin(stop - 1) // KEY_GRID) * KEY_GRID
    inner_end = band.end(start) // KEY_GRID * KEY_GRID
    parts = []
    for begin, end in pairwise(bounds):
        edges = [(begin, min(end, inner_begin)), (max(begin, inner_end), end)]
        if edges[0][1] > edges[1][0]:
            edges = [(begin, end)]
        added = tuple(_edge(band, start, rows, begin, *edge) for edge in edges if edge[0] < edge[1])
        parts.append(Part(slice(begin, end), added))
    return Block(start, stop, tuple(parts))


def _edge(band: Band, start: int, rows: int, part: int, begin: int, end: int) -> Edge:
    """What the band of queries from `start` on excludes among the keys from `begin` to `end`, in a part."""
    keys, ahead = end - begin, band.offset + start - begin
    left = max(ahead - band.left, -rows) if band.left >= 0 else -rows
    right = min(ahead + band.right, keys) if band.right >= 0 else keys
    return Edge(slice(begin - part, end - part), _added(rows, keys, left, right, min(band.kv_length - begin, keys)))


@lru_cache(maxsize=64)
def _added(rows: int, keys: int, left: int, right: int, length: int) -> torch.Tensor:
    """[rows, keys] of 0 where query y reaches key x, y + left <= x <= y + right and x < length; -inf elsewhere."""
    query, key = torch.arange(rows).unsqueeze(1), torch.arange(keys)
    reached = (key >= query + left) & (key <= query + right) & (key < length)
    return torch.zeros(rows, keys).masked_fill(~reached, -torch.inf)
