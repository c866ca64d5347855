"""`Attend` requests by the native kernel: read where they were received, written in the layout of replies.

In: requests. Out: a result for each, or None where another kernel must compute it, and which sequences' results came
out NaN or infinite. Where a sequence's tensors begin follows from the problem, and callers send the same problem over
and over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from attnserve import _dtypes
from attnserve_server.native.broken import Broken, broken_of
from attnserve_server.native.library import Addresses, Keys, Library, Threads, pack, pack_several
from attnserve_server.native.payloads import (
    NATIVE_FROM_WIRE,
    NOTHING_MORE,
    addresses,
    aligned,
    applies,
    broadcast_strides,
    memory_of,
    more_of,
    shape_of,
    strides_of,
)
from attnserve_server.requests.extent import Span
from attnserve_server.requests.problem import Problem
from attnserve_server.requests.request import Request
from attnserve_server.requests.work import RequestResult

MOST_KEPT: Final = 4096
"""How many problems are remembered."""
MOST_SEQUENCES: Final = 1 << 14
"""Requests of more are left to other kernels: each sequence takes the memory of a call, however small it is."""


class Sequences(NamedTuple):
    """`number` consecutive sequences of one shape. `offsets` say where the first one's query, key, value, output, lse,
    mask and bias begin, in bytes from where the request's do.
    """

    number: int
    offsets: list[int]
    shape: bytes


class Plan(NamedTuple):
    """The sequences of every request of a problem with these spans, and how many bytes their tensors advance from one
    sequence to the next. `inputs` are the payloads of query, key and value; `has_more` says that there are others. The
    output takes `output_bytes` of a reply, whose lse follows at `lse_at`, which is 0 if there is none.
    """

    problem: Problem
    spans: tuple[Span, ...]
    sequences: list[Sequences]
    steps: list[int]
    inputs: tuple[int, int, int]
    has_more: bool
    output_bytes: int
    lse_at: int
    reply_bytes: int


class NativeRequests:
    """The native kernel, for requests."""

    def __init__(self, library: Library) -> None:
        """Everything is computed by `library`."""
        self._library = library
        self._plans: dict[int, Plan] = {}

    def run(self, requests: Sequence[Request], threads: Threads | None) -> tuple[list[RequestResult | None], Broken]:
        """The result of each request, None for those that another kernel must compute; and the sequences whose results
        have no meaning. `threads` as in the library. Raises MemoryError.
        """
        results: list[RequestResult | None] = []
        packed, owners, alive = bytearray(), [], []
        for place, request in enumerate(requests):
            plan = self._plan(request)
            if plan is None:
                results.append(None)
                continue
            # Each reply has memory of its own: a caller slow to receive one must not hold that of others.
            memory, output = memory_of(plan.reply_bytes)
            lse = output + plan.lse_at if plan.lse_at else 0
            query, key, value = addresses(request.payloads, plan.inputs)
            more = NOTHING_MORE
            if plan.has_more:
                more = more_of(plan.problem, request.payloads)
                alive.append(more)  # until the kernel has read it
            mask, bias, slopes, sinks, _ = more
            for number, offsets, shape in plan.sequences:
                of_query, of_key, of_value, of_output, of_lse, of_mask, of_bias = offsets
                first: Addresses = (
                    query + of_query,
                    key + of_key,
                    value + of_value,
                    output + of_output,
                    lse and lse + of_lse,
                    mask + of_mask,  # of tensors that are not there, both are 0
                    bias + of_bias,
                    slopes,
                    sinks,
                )
                if number == 1:
                    packed += pack(first, shape)
                    owners.append(place)
                else:
                    packed += pack_several(first, plan.steps, shape, number)
                    owners += [place] * number
            if plan.lse_at:
                results.append(RequestResult(memory[: plan.output_bytes], memory[plan.lse_at :], None))
            else:
                results.append(RequestResult(memory, None, None))
        return results, broken_of(self._library.attend(packed, threads) if packed else [], owners)

    def _plan(self, request: Request) -> Plan | None:
        """The plan for a request, if the kernel computes such requests."""
        problem, spans = request.problem, request.spans
        plan = self._plans.get(id(problem))
        if plan is not None and plan.spans is spans:  # a plan keeps its problem alive, so no other has this id
            return plan
        if plan is None and not (applies(problem) and problem.query_length and 0 < problem.batch <= MOST_SEQUENCES):
            return None  # without queries, lengths may exceed all bounds
        plan = planned(problem, spans)
        if len(spans) == 1:  # others have per-sequence lengths, which hardly ever recur
            if len(self._plans) >= MOST_KEPT:
                self._plans.clear()
            self._plans[id(problem)] = plan
        return plan


def planned(problem: Problem, spans: tuple[Span, ...]) -> Plan:
    """The plan for every request of a problem with these spans."""
    itemsize = _dtypes.NUMPY[problem.dtype].itemsize
    heads, kv_heads = problem.query_heads, problem.kv_heads
    rows, keys = problem.query_length, problem.kv_length
    batch = 1 if problem.packed else problem.batch
    key_strides, value_strides = (
        strides_of(problem, kv_heads, keys, width) for width in (problem.key_dim, problem.value_dim)
    )
    mask, bias = (broadcast_strides(problem, name) for name in ("mask", "bias"))
    # The bytes of a token in query, key, value and output; then of a sequence in these and all other tensors.
    of_query, of_key = itemsize * heads * problem.head_dim, itemsize * kv_heads * problem.key_dim
    of_value, of_output = (itemsize * count * problem.value_dim for count in (kv_heads, heads))
    of_lse = 4 * heads * rows if problem.return_lse else 0
    steps = [rows * of_query, keys * of_key, keys * of_value, rows * of_output, of_lse, mask[0], 4 * bias[0]]
    sequences = []
    for span in spans:
        at = Keys(span.kv_length, span.offset, NATIVE_FROM_WIRE[problem.dtype], 0, key_strides, value_strides)
        offsets = [span.first * step for step in steps]
        if problem.packed:  # tokens come first, except in the lse
            query, key = span.query_start, span.kv_start
            offsets[:5] = query * of_query, key * of_key, key * of_value, query * of_output, 4 * query
        sequences.append(Sequences(span.sequences, offsets, shape_of(problem, span.query_length, at)))
    query, key, value = (problem.tensors[name].payload for name in ("query", "key", "value"))
    output_bytes = batch * rows * of_output
    lse_at = aligned(output_bytes) if of_lse else 0
    return Plan(
        problem=problem,
        spans=spans,
        sequences=sequences,
        steps=steps,
        inputs=(query, key, value),
        has_more=len(problem.tensors) > 3,
        output_bytes=output_bytes,
        lse_at=lse_at,
        reply_bytes=lse_at + batch * of_lse if lse_at else output_bytes,
    )
