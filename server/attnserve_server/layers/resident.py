"""Self-attention of sequences that continue resident caches: a block's keys and values are appended to one layer of
each sequence's cache, and its queries attend to everything in it after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnserve_server.caches.attend import attend_cache
from attnserve_server.caches.layer import PageTable, Placement, Write
from attnserve_server.caches.pages import PagePool, sent
from attnserve_server.caches.query import CacheQuery
from attnserve_server.caches.shape import CacheShape
from attnserve_server.devices.compute import Compute
from attnserve_server.layers.attend import Scoring
from attnserve_server.layers.rows import Batch
from attnserve_server.requests.options import causal_window


@dataclass(frozen=True, slots=True)
class Resident:
    """The cache of a sequence, whose `length` includes what is appended: for each block, its pages, and where keys and
    values go. mask, bool, broadcasts to [1, Hq, L, length].
    """

    shape: CacheShape
    length: int
    tables: Sequence[PageTable]
    placements: Sequence[Placement]
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Residents:
    """The memory of all caches, and the cache of each sequence of each request."""

    pool: PagePool
    of_requests: Sequence[Sequence[Resident]]


class ResidentAttention:
    """Causal attention of the rows of a batch, block after block. Sequences without rows take no part."""

    def __init__(
        self, compute: Compute, batch: Batch, residents: Residents, scoring: Scoring, window: tuple[int, int]
    ) -> None:
        self._compute, self._pool = compute, residents.pool
        self._scoring, self._window = scoring, causal_window(True, window)
        packing = batch.inputs
        found = zip(packing.starts, packing.lengths, batch.in_order(residents.of_requests), strict=True)
        self._sequences = [(start, length, resident) for start, length, resident in found if length]
        self._total = packing.total

    # The pool keeps views of its memory, which others write to: that would fail if they were made in inference mode.
    @torch.inference_mode(False)
    def attend(self, block: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """What query [n, Hq, D] gets from the layer `block` of the caches, [n, Hq Dv], after key [n, Hk, D] and value
        [n, Hk, Dv] have been appended to it. Rows are in the order of `batch.inputs`; those after the last sequence
        are 0.
        """
        self._append(block, key, value)
        rows = query.new_empty(len(query), query.shape[1], value.shape[2])
        rows[self._total :] = 0
        queries = [self._query(block, query, *each) for each in self._sequences]
        results = attend_cache(queries, self._pool, self._compute)
        for (start, length, _), result in zip(self._sequences, results, strict=True):
            rows[start : start + length] = result.output[0].transpose(0, 1)
        return rows.flatten(1)

    def _append(self, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Appends keys and values to the caches: single tokens all at once."""
        pool = self._pool
        steps: dict[CacheShape, tuple[list[int], list[Write]]] = {}
        for start, length, resident in self._sequences:
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
            first, last = rows[0], rows[-1] + 1
            if len(rows) == last - first:
                pool.write_tokens(shape, places, key[first:last], value[first:last])
            else:
                index = sent(rows, key.device)
                pool.write_tokens(shape, places, key[index], value[index])

    def _query(self, block: int, query: torch.Tensor, start: int, length: int, resident: Resident) -> CacheQuery:
        """One sequence's query."""
        return CacheQuery(
            query=query[start : start + length].transpose(0, 1).unsqueeze(0),
            shape=resident.shape,
            pages=resident.tables[block].numbers,
            length=resident.length,
            scale=self._scoring.scale,
            score=self._scoring.score,
            softcap=self._scoring.softcap,
            offset=resident.length - length,
            window=self._window,
            mask=resident.mask,
            alibi_slopes=self._scoring.alibi_slopes,
        )
