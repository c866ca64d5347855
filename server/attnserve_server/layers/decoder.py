"""Steps of a decoder whose sequences continue resident caches, by the native library: all of its blocks in one call.

In: the rows of a batch, and where each block's keys and values go. Out: rows, with everything appended. Requests that
take longer to describe than to compute, or need more than the library has, are computed block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Final, TypeAlias

import torch

from attnserve_server.caches.page_memory import STORAGE
from attnserve_server.caches.paged import Own, PagedCall, PagedShape, keys_of, packed_calls
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.query import CacheQuery
from attnserve_server.caches.shape import CacheShape
from attnserve_server.devices.compute import Compute
from attnserve_server.devices.native_compute import NativeCompute
from attnserve_server.layers.layer import LayerInput
from attnserve_server.layers.multi_head import MultiHead
from attnserve_server.layers.passage import Passage, packed_passages
from attnserve_server.layers.resident import Resident, Residents
from attnserve_server.layers.rows import Batch
from attnserve_server.native.calls import shape_of
from attnserve_server.native.decoders import Decoder, Step
from attnserve_server.native.library import CALL_BYTES, CALL_FINITE, not_finite, supports
from attnserve_server.native.tokens import FINITE, TOKEN, TOKEN_FIELDS
from attnserve_server.requests.options import causal_window

Stepped: TypeAlias = tuple[int, int, Resident]
"""A sequence: where its rows begin, how many there are (at least one), and its cache."""

MOST_TOKENS: Final = 16
"""The most tokens of a sequence: to describe where each of more tokens goes would take longer than it saves."""
REMEMBERED_SHAPES: Final = 64


class DecoderSteps:
    """Steps of one decoder."""

    def __init__(
        self,
        compute: NativeCompute,
        decoder: Decoder,
        attention: MultiHead,
        window: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        """`attention` is that of any block: they differ in their weights only."""
        self._compute, self._decoder, self._attention = compute, decoder, attention
        self._window, self._dtype = causal_window(True, window), dtype
        projection, _ = attention.entrance(crossed=False)
        itemsize = dtype.itemsize
        rows = torch.empty(MOST_TOKENS, projection.width, dtype=dtype, device="meta")
        # The cache is of no method: in a reference cycle, weights would outlive their layer until the garbage collector
        # comes.
        self._shape = lru_cache(REMEMBERED_SHAPES)(partial(_shape_of, attention, self._window, rows))
        self._columns = [columns.start * itemsize for columns in projection.columns]
        self._across = projection.width * itemsize
        self._attended = attention.value_width * itemsize

    @staticmethod
    def of(
        passages: Sequence[Passage],
        attentions: Sequence[MultiHead],
        window: tuple[int, int],
        dtype: torch.dtype,
        compute: Compute,
    ) -> DecoderSteps | None:
        """The steps of a stack with these passages and self-attentions; None if the library does not compute them."""
        packed = packed_passages(passages)
        if compute.native is None or packed is None or not attentions or len(packed) != len(attentions) + 1:
            return None
        scoring = attentions[0].scoring
        if not supports(scoring, attentions[0].widest, hides=False, alibi=scoring.alibi_slopes is not None):
            return None
        return DecoderSteps(compute.native, Decoder(packed), attentions[0], window, dtype)

    def takes(self, request: LayerInput, residents: Sequence[Resident]) -> bool:
        """Whether the library steps the sequences of a request: by few rows each, without masks, over caches that store
        keys and values as they are.
        """
        return max(request.lengths, default=0) <= MOST_TOKENS and all(
            resident.mask is None and STORAGE[resident.shape.dtype] == self._dtype for resident in residents
        )

    def run(
        self, batch: Batch, rows: torch.Tensor, rotations: torch.Tensor | None, residents: Residents
    ) -> torch.Tensor | list[int]:
        """Rows [n, width] of requests that it `takes`, after all blocks. Or, if it met NaN or infinities, the places of
        the requests in which it did: then all must be computed again, which overwrites what has been appended. Raises
        MemoryError.
        """
        packing, pool = batch.inputs, residents.pool
        found = zip(packing.starts, packing.lengths, batch.in_order(residents.of_requests), strict=True)
        places = [place for place, length in enumerate(packing.lengths) if length]
        sequences = [each for each in found if each[1]]
        if not sequences:
            return rows
        self._prepare(sequences, pool)
        tokens, slots = self._tokens(sequences, pool)
        calls, orders, effort = self._calls(sequences, pool)
        effort += self._decoder.effort(len(rows), self._dtype.itemsize)
        page, output = pool.memory.packed_layout(sequences[0][2].shape), None
        try:
            output = self._compute.step(Step(self._decoder, page, rows, rotations, tokens, calls), effort)
        finally:
            if output is None:
                for number, _ in slots:
                    pool.finite.know(number, 0, finite=False)
        if output is None:
            requests = batch.requests
            broken = not_finite(calls, CALL_FINITE, CALL_BYTES)
            return sorted({requests[places[orders[call]]] for call in broken})
        flags = memoryview(tokens).cast("q")[FINITE::TOKEN_FIELDS].tolist()
        for (number, slot), finite in zip(slots, flags, strict=True):
            pool.finite.know(number, slot, finite=bool(finite))
        return output

    def _prepare(self, sequences: Sequence[Stepped], pool: PagePool) -> None:
        """Makes pages ready for what each block appends."""
        for _, _, resident in sequences:
            for placement in resident.placements:
                pool.copy(placement.copies)
                for write in placement.writes:
                    if not write.first_slot:
                        pool.clean(resident.shape, write.page)

    def _tokens(self, sequences: Sequence[Stepped], pool: PagePool) -> tuple[bytearray, list[tuple[int, int]]]:
        """What each block appends, packed for the library; and the page and slot of each token."""
        (_, key_at, value_at), packed, slots = self._columns, bytearray(), []
        for block in range(self._decoder.blocks):
            for start, _, resident in sequences:
                row = start * self._across
                for write in resident.placements[block].writes:
                    page = pool.memory.page(write.page)
                    for slot in range(write.first_slot, write.first_slot + write.tokens):
                        packed += TOKEN.pack(row + key_at, row + value_at, *page, slot, 1)
                        slots.append((write.page, slot))
                        row += self._across
        return packed, slots

    def _calls(self, sequences: Sequence[Stepped], pool: PagePool) -> tuple[bytearray, list[int], int]:
        """The attention of each block, packed for the library; the sequence of each call, by its place; and what all of
        it costs.
        """
        slopes, (query_at, _, _) = self._attention.scoring.alibi_slopes, self._columns
        slopes_at, (left, _) = 0 if slopes is None else slopes.data_ptr(), self._window
        owns, shapes, effort = [], [], 0
        for start, length, resident in sequences:
            owns.append(Own(query_at + start * self._across, start * self._attended, alibi_slopes=slopes_at))
            shapes.append(self._shape(resident.shape, length, pool))
            pairs = length * self._attention.scoring.pair_flops
            keys = resident.length if left < 0 else min(resident.length, length + left)
            effort += self._decoder.blocks * keys * max(pairs, resident.shape.token_bytes)
        packed, orders = bytearray(), []
        for block in range(self._decoder.blocks):
            calls = [
                PagedCall(own, shape, resident.tables[block], resident.length, resident.length - length)
                for own, shape, (_, length, resident) in zip(owns, shapes, sequences, strict=True)
            ]
            of_block, order = packed_calls(calls, pool)
            packed += of_block
            orders += order
        return packed, orders, effort


def _shape_of(
    attention: MultiHead, window: tuple[int, int], rows: torch.Tensor, shape: CacheShape, length: int, pool: PagePool
) -> PagedShape:
    """The shape of the calls of sequences with the first `length` of such projected rows."""
    query, _, value = attention.heads(rows[:length])
    output = rows.new_empty(length, query.shape[1], value.shape[2])
    layout = pool.memory.layout(shape)
    of_sequence = CacheQuery(
        query=query.transpose(0, 1).unsqueeze(0),
        shape=shape,
        pages=(),
        length=0,
        scale=attention.scoring.scale,
        softcap=attention.scoring.softcap,
        window=window,
    )
    packed = shape_of(
        of_sequence, shape.num_kv_heads, output.transpose(0, 1).unsqueeze(0), None, None, keys_of(shape, layout)
    )
    rows_per_key = length * (query.shape[1] // shape.num_kv_heads)
    return PagedShape(packed, layout.tokens_per_page, rows_per_key)
