"""Self-attention of sequences that continue resident caches: a block's keys and values are appended to one layer of
each sequence's cache, and its queries attend to everything in it after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnserve_server.caches.attend import CacheQuery, attend_cache
from attnserve_server.caches.layer import Placement, Write
from attnserve_server.caches.pages import PagePool, sent
from attnserve_server.caches.shape import CacheShape
from attnserve_server.devices.compute import Compute
from attnserve_server.layers.attend import Scoring
from attnserve_server.layers.rows import Batch, Packing


@dataclass(frozen=True, slots=True)
class Resident:
    """The cache of a sequence, whose `length` includes what is appended: for each block, its pages, and where keys and
    values go. mask, bool, broadcasts to [1, Hq, L, length].
    """

    shape: CacheShape
    length: int
    pages: Sequence[Sequence[int]]
    placements: Sequence[Placement]
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Residents:
    """The memory of all caches, and the cache of each sequence of each request."""

    pool: PagePool
    of_requests: Sequence[Sequence[Resident]]


# The pool keeps views of its memory, which others write to: that would fail if they were made in inference mode.
@torch.inference_mode(False)
def attend_residents(
    compute: Compute,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: Batch,
    residents: Residents,
    block: int,
    scoring: Scoring,
    window: tuple[int, int],
) -> torch.Tensor:
    """Causal attention [n, Hq Dv] of query [n, Hq, D], after appending key [n, Hk, D] and value [n, Hk, Dv] to the
    layer `block` of the caches. Rows are in the order of `batch.inputs`; those after the last sequence are 0.
    """
    packing, sequences = batch.inputs, batch.in_order(residents.of_requests)
    _write(residents.pool, key, value, packing, sequences, block)
    ranges, queries = [], []
    for start, length, resident in zip(packing.starts, packing.lengths, sequences, strict=True):
        if not length:
            continue
        own = slice(start, start + length)
        ranges.append(own)
        queries.append(
            CacheQuery(
                query=query[own].transpose(0, 1).unsqueeze(0),
                shape=resident.shape,
                pages=resident.pages[block],
                length=resident.length,
                scale=scoring.scale,
                score=scoring.score,
                softcap=scoring.softcap,
                offset=resident.length - length,
                causal=True,
                window=window,
                mask=resident.mask,
                alibi_slopes=scoring.alibi_slopes,
            )
        )
    rows = query.new_empty(len(query), query.shape[1], value.shape[2])
    for own, result in zip(ranges, attend_cache(queries, residents.pool, compute), strict=True):
        rows[own] = result.output[0].transpose(0, 1)
    rows[packing.total :] = 0
    return rows.flatten(1)


def _write(
    pool: PagePool,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    sequences: Sequence[Resident],
    block: int,
) -> None:
    """Appends key [n, Hk, D] and value [n, Hk, Dv] to the layer `block` of the caches; single tokens all at once."""
    steps: dict[CacheShape, tuple[list[int], list[Write]]] = {}
    for start, length, resident in zip(packing.starts, packing.lengths, sequences, strict=True):
        if not length:
            continue
        placement = resident.placements[block]
        if length > 1:
            own = slice(start, start + length)
            pool.write(resident.shape, placement, key[own].transpose(0, 1), value[own].transpose(0, 1))
            continue
        pool.copy(placement.copies)
        rows, places = steps.setdefault(resident.shape, ([], []))
        rows.append(start)
        places.append(placement.writes[0])
    for shape, (rows, places) in steps.items():
        index = sent(rows, key.device)
        pool.write_tokens(shape, places, key[index], value[index])
