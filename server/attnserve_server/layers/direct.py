"""Requests for a multi-head layer by one call of the native kernel: read where they were received, written in the
layout of replies, with no tensors in between.

In: requests, with the plans of their applications. Out: a result for each, and those in which it met NaN or infinities:
these are computed on tensors. Where a row begins follows from the application, which callers repeat over and over.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnserve._wire import Payloads
from attnserve_server.devices.compute import Compute
from attnserve_server.devices.staging import TORCH
from attnserve_server.layers.application import Application
from attnserve_server.layers.specification import Attention
from attnserve_server.native.dtypes import NATIVE_FROM_TORCH
from attnserve_server.native.library import Shape, Strides, pack, supports
from attnserve_server.native.multi_head import PIECE, packed_layer
from attnserve_server.native.payloads import address, memory_of
from attnserve_server.native.products import PackedWeight
from attnserve_server.requests.work import RequestResult

if TYPE_CHECKING:
    from attnserve_server.layers.attend import Scoring

MOST_VARIANTS: Final = 64
"""How many combinations of masking that requests ask for are remembered."""
_TENSORS: Final = {"input", "lengths"}


class Weights(NamedTuple):
    """The weights from rows to the heads' queries, keys and values, which begin at these columns; and from all heads'
    outputs, side by side, to the reply's rows, or None.
    """

    project: PackedWeight
    columns: tuple[int, int, int]
    output: PackedWeight | None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """How the requests of an application are computed. Those with equal `group` are computed in one call.

    `pieces` has a row for each sequence: where it begins in the payload, where in the reply, how many rows it has, and
    1; sequences without rows are left out. `first` is the only row, empty if there are several. `filled` says that the
    reply has padding rows.
    """

    layer: bytes
    group: Hashable
    payload: int
    pieces: NDArray[np.int64]
    first: tuple[int, ...]
    reply_bytes: int
    filled: bool


def direct_of(architecture: Attention, weights: Weights, scoring: Scoring) -> Direct | None:
    """The layer, if the library supports it: rows and outputs must be as wide as their weights, which may have been
    padded.
    """
    project, output, heads_width = weights.project, weights.output, architecture.heads * architecture.value_dim
    widest = max(architecture.head_dim, architecture.value_dim)
    there = supports(scoring, widest, hides=False, alibi=scoring.alibi_slopes is not None)
    if not there or project.inputs != architecture.inputs:
        return None
    if output is not None and (output.inputs, output.outputs) != (heads_width, architecture.outputs):
        return None
    return Direct(architecture, weights, scoring)


class Direct:
    """A multi-head layer on the native kernel."""

    def __init__(self, architecture: Attention, weights: Weights, scoring: Scoring) -> None:
        self._architecture = architecture
        self._weights = weights
        self._dtype = weights.project.dtype
        self._scoring = scoring
        self._variants: dict[tuple[int, int], bytes] = {}

    def plan(self, application: Application, lengths: Sequence[int]) -> Plan | None:
        """The plan of an application whose sequences have these lengths; None if its requests must be computed on
        tensors: they ask for more than rows, bring more than rows, or have another dtype.
        """
        options, spec = application.options, application.tensors["input"]
        if (
            not application.tensors.keys() <= _TENSORS
            or application.resident
            or options.return_lse
            or options.return_scores is not None
            or TORCH[spec.dtype] != self._dtype
            or not sum(lengths)
        ):
            return None
        architecture = self._architecture
        within = options.within(architecture.causal, architecture.window)
        pieces = np.ones((len(lengths), 4), np.int64)
        rows = pieces[:, 2] = lengths
        if application.batched:
            starts = np.arange(len(lengths)) * application.length
        else:
            starts = np.cumsum(pieces[:, 2]) - pieces[:, 2]
        input_row, output_row = (self._dtype.itemsize * width for width in (architecture.inputs, architecture.outputs))
        pieces[:, 0], pieces[:, 1] = starts * input_row, starts * output_row
        pieces = pieces[pieces[:, 2] > 0]
        return Plan(
            layer=self._layer(within),
            group=(self, within),
            payload=spec.payload,
            pieces=pieces,
            first=tuple(pieces[0].tolist()) if len(pieces) == 1 else (),
            reply_bytes=application.rows * output_row,
            filled=sum(rows) < application.rows,
        )

    def _layer(self, within: tuple[int, int]) -> bytes:
        """The packed layer for queries that reach `within` (left, right)."""
        found = self._variants.get(within)
        if found is not None:
            return found
        own, (project, columns, output) = self._architecture, self._weights
        inside = Strides(project.outputs, own.head_dim)
        values = Strides(project.outputs, own.value_dim)
        shape = Shape(
            query_length=0,
            kv_length=0,
            offset=0,
            query_heads=own.heads,
            kv_heads=own.kv_heads,
            head_dim=own.head_dim,
            value_dim=own.value_dim,
            query_dtype=NATIVE_FROM_TORCH[self._dtype],
            kv_dtype=NATIVE_FROM_TORCH[self._dtype],
            page_tokens=0,
            query=inside,
            key=inside,
            value=values,
            output=Strides(own.heads * own.value_dim, own.value_dim),
            lse_head=0,
            mask=(0, 0, 0),
            bias=(0, 0, 0),
            left=within[0],
            right=within[1],
            scale=self._scoring.scale,
            softcap=self._scoring.softcap,
        )
        slopes = self._scoring.alibi_slopes
        call = pack((0, 0, 0, 0, 0, 0, 0, 0 if slopes is None else slopes.data_ptr(), 0), shape.packed())
        found = packed_layer(project, columns, output, call)
        if len(self._variants) >= MOST_VARIANTS:
            self._variants.clear()
        self._variants[within] = found
        return found


class Received(NamedTuple):
    """A request where it was received: its plan, its payloads, and its cost in FLOPs."""

    plan: Plan
    payloads: Payloads
    flops: int


def apply(compute: Compute, requests: Sequence[Received]) -> tuple[list[RequestResult], set[int]]:
    """The result of each request of one group, and the places of those whose result has no meaning. Raises
    MemoryError.
    """
    results, pieces, owners = [], bytearray(), []
    for place, (plan, payloads, _) in enumerate(requests):
        # Each reply has memory of its own: a caller slow to receive one must not hold that of others.
        memory, to = memory_of(plan.reply_bytes)
        if plan.filled:
            ctypes.memset(to, 0, plan.reply_bytes)
        begin = address(payloads, plan.payload)
        if plan.first:
            of_input, of_output, rows, finite = plan.first
            pieces += PIECE.pack(begin + of_input, to + of_output, rows, finite)
            owners.append(place)
        else:
            own = plan.pieces + np.array((begin, to, 0, 0))
            pieces += own.tobytes()
            owners += [place] * len(own)
        results.append(RequestResult(memory, None, None))
    assert compute.native is not None
    broken = compute.native.apply(requests[0].plan.layer, pieces, sum(request.flops for request in requests))
    return results, {owners[piece] for piece in broken}
