"""Sequences of different lengths and callers, packed end to end in rows; and which of them one kernel call can compute.

A batch is a list of `LayerInput`, each with any number of sequences. Here they are put into one order, in which
sequences that can share a kernel call are adjacent. They are packed without padding, except for the last rows, which
fill up the number of rows to what `multiple_of` asks for. Afterwards each request gets its own rows back.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import numpy as np
import torch

from attnserve_server.devices.compute import ROWS
from attnserve_server.layers.layer import LayerInput, LayerOutput
from attnserve_server.requests.options import ScoreStage

Piece = TypeVar("Piece")


class SequenceKind(NamedTuple):
    """What sequences that share a kernel call have in common. Offsets are those of masks, and 0 where none needs them.

    For mask and bias it is how they broadcast: the number of heads, and whether one row serves all queries, and one
    column all keys.
    """

    query_length: int
    kv_length: int
    offset: int
    window: tuple[int, int]
    return_lse: bool
    return_scores: ScoreStage | None
    mask: tuple[int, bool, bool] | None
    bias: tuple[int, bool, bool] | None


WHOLE: Final = 64
"""torch's elementwise functions take at most this many elements at a time: two of the longest vectors, in half
precision. Rows whose widths are multiples of it leave none over, to be computed by other instructions. (Half the width
of a rotation passes through sine and cosine, in float64; all else in a rotation is rounded exactly either way.)
"""


def multiple_of(native: bool, widths: Iterable[int]) -> int:
    """What a batch's number of rows must be a multiple of, so that a row's bits depend on that row alone: 1 if products
    are native and elementwise functions compute rows of these `widths`, multiples of WHOLE; else ROWS.
    """
    return 1 if native and all(width % WHOLE == 0 for width in widths) else ROWS


class Packing:
    """Where sequences of these lengths lie, end to end, in a multiple of some number of rows."""

    def __init__(self, lengths: Sequence[int], multiple: int) -> None:
        self.lengths = list(lengths)
        self.starts = list(itertools.accumulate(self.lengths, initial=0))
        self.total = self.starts.pop()
        self.rows = -(-self.total // multiple) * multiple

    def positions(self, offsets: Sequence[int], device: torch.device) -> torch.Tensor:
        """int64 [rows]: the position of each row, if the first row of a sequence is at its offset."""
        shifts = np.array(offsets, np.int64) - np.array(self.starts, np.int64)
        # If it were not pinned and copied asynchronously, the caller would wait for all work in flight on the device.
        positions = torch.zeros(self.rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        positions.numpy()[: self.total] = np.arange(self.total) + np.repeat(shifts, self.lengths)
        return positions.to(device, non_blocking=True)


def padding_of(outputs: Iterable[LayerOutput]) -> float:
    """The share of padding among all rows in which outputs were computed."""
    packings = {packing for output in outputs for packing in output.packings}
    rows = sum(packing.rows for packing in packings)
    return (rows - sum(packing.total for packing in packings)) / rows if rows else 0.0


@dataclass(frozen=True, slots=True)
class Stack:
    """Adjacent sequences, from `first` on in the order of the batch, and where their rows begin.

    mask and bias have rank 4; their first axis is that of the sequences.
    """

    kind: SequenceKind
    first: int
    count: int
    query_start: int
    kv_start: int
    mask: torch.Tensor | None
    bias: torch.Tensor | None

    @property
    def pairs(self) -> int:
        """Queries times keys."""
        return self.count * self.kind.query_length * self.kind.kv_length


class Batch:
    """Requests that a layer computes together.

    Their rows are padded to a `multiple` (`multiple_of`). `kinds` has a list for each of the layer's attentions with
    different keys (self-attention, cross-attention): the kind of each sequence, in the order of the requests. Sequences
    of equal first kind are adjacent, and among these, those of equal second kind.
    """

    def __init__(self, inputs: Sequence[LayerInput], *kinds: list[SequenceKind], multiple: int) -> None:
        self._requests = inputs
        sequences = [(request, n) for request, each in enumerate(inputs) for n in range(len(each.lengths))]
        self._order = _order(kinds, len(sequences))
        self._is_ordered = self._order == list(range(len(sequences)))
        self._places = [sequences[place] for place in self._order]
        self._kinds = [[of_one[place] for place in self._order] for of_one in kinds]
        self.inputs = Packing([inputs[request].lengths[n] for request, n in self._places], multiple)
        self.contexts: Packing | None = None
        if inputs and inputs[0].context_lengths is not None:
            lengths = [each.context_lengths or [] for each in inputs]
            self.contexts = Packing([lengths[request][n] for request, n in self._places], multiple)

    @property
    def requests(self) -> list[int]:
        """The request of each sequence, in the order of the batch."""
        return [request for request, _ in self._places]

    def positions(self, device: torch.device) -> torch.Tensor:
        """int64 [rows]: the position of each row of the inputs; sequences without an offset begin at 0."""
        offsets = [self._requests[request].offsets for request, _ in self._places]
        of_sequences = [0 if given is None else given[n] for given, (_, n) in zip(offsets, self._places, strict=True)]
        return self.inputs.positions(of_sequences, device)

    def pack_inputs(self) -> torch.Tensor:
        """[rows, width], or ids [rows]."""
        return self._pack(
            self.inputs, [each.input for each in self._requests], [each.lengths for each in self._requests]
        )

    def pack_segments(self) -> torch.Tensor:
        """int64 [rows]; 0 where a request has none."""
        segments = [
            torch.zeros(len(each.input), dtype=torch.int64, device=each.input.device)
            if each.segments is None
            else each.segments
            for each in self._requests
        ]
        return self._pack(self.inputs, segments, [each.lengths for each in self._requests])

    def pack_contexts(self) -> torch.Tensor:
        """[rows of the contexts, width]."""
        assert self.contexts is not None
        contexts = [each.context for each in self._requests if each.context is not None]
        return self._pack(self.contexts, contexts, [each.context_lengths or [] for each in self._requests])

    def _pack(
        self, packing: Packing, tensors: Sequence[torch.Tensor], lengths: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        pieces = list(tensors)
        if not self._is_ordered:
            whole = [torch.split(tensor, list(each)) for tensor, each in zip(tensors, lengths, strict=True)]
            pieces = [whole[request][n] for request, n in self._places]
        # Always a copy: its address does not depend on where the requests' tensors lie.
        return torch.cat([*pieces, tensors[0].new_zeros(packing.rows - packing.total, *tensors[0].shape[1:])])

    def unpack(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The rows of each request's own inputs, without the padding at the end."""
        if self._is_ordered:
            return list(torch.split(rows[: self.inputs.total], [sum(each.lengths) for each in self._requests]))
        pieces = self.by_request(torch.split(rows[: self.inputs.total], self.inputs.lengths))
        return [of_one[0] if len(of_one) == 1 else torch.cat([rows[:0], *of_one]) for of_one in pieces]

    def outputs(self, rows: torch.Tensor) -> list[LayerOutput]:
        """The outputs of requests, which are their rows without the padding."""
        packings = [packing for packing in (self.inputs, self.contexts) if packing is not None]
        return [LayerOutput(own, packings=packings) for own in self.unpack(rows)]

    def by_request(self, of_sequences: Sequence[Piece]) -> list[list[Piece]]:
        """Items for each sequence in the order of the batch, as one list per request in that request's order."""
        placed = dict(zip(self._places, of_sequences, strict=True))
        return [[placed[request, n] for n in range(len(each.lengths))] for request, each in enumerate(self._requests)]

    def in_order(self, of_requests: Sequence[Sequence[Piece]]) -> list[Piece]:
        """Items for each sequence of each request, in the order of the batch."""
        return [of_requests[request][n] for request, n in self._places]

    def stacks(self, attention: int, keys: Packing) -> list[Stack]:
        """The kernel calls of one attention, by its number among `kinds`, over keys packed like this."""
        stacks, first = [], 0
        for kind, members in itertools.groupby(self._kinds[attention]):
            count = len(list(members))
            mask, bias = (self._stacked(name, kind, first, count) for name in ("mask", "bias"))
            stacks.append(Stack(kind, first, count, self.inputs.starts[first], keys.starts[first], mask, bias))
            first += count
        return stacks

    def _stacked(self, name: str, kind: SequenceKind, first: int, count: int) -> torch.Tensor | None:
        """Mask or bias of some sequences."""
        if getattr(kind, name) is None:
            return None
        parts = []
        for request, n in self._places[first : first + count]:
            tensor: torch.Tensor = getattr(self._requests[request], name)
            n = n if tensor.shape[0] > 1 else 0
            parts.append(tensor[n : n + 1, :, : kind.query_length, : kind.kv_length])
        return parts[0] if count == 1 else torch.cat(parts)


def _order(kinds: Sequence[list[SequenceKind]], count: int) -> list[int]:
    """The places of sequences, ordered so that equal kinds are adjacent, by first appearance."""
    ranks: list[dict[Hashable, int]] = [{} for _ in kinds]
    keys = [
        tuple(rank.setdefault(of_one[place], len(rank)) for rank, of_one in zip(ranks, kinds, strict=True))
        for place in range(count)
    ]
    return sorted(range(count), key=keys.__getitem__)
