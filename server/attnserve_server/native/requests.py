"""Requests of `Attend` by the native kernel: read where they were received, written as replies have it.

In: requests. Out: a result each, or none where the kernel came upon NaN or infinities: those are computed in another
way. Where a sequence's tensors begin follows from a problem, and callers send the same problem over and over.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_char
from typing import Final, NamedTuple

import numpy as np

from attnserve import _dtypes
from attnserve_server.native.library import Addresses, Keys, Library, Threads, pack, pack_several
from attnserve_server.native.payloads import (
    DTYPES,
    address,
    address_of,
    aligned,
    applies,
    broadcast_strides,
    floats,
    shape_of,
    strides_of,
)
from attnserve_server.problem import Problem
from attnserve_server.request import Request, Span
from attnserve_server.work import RequestResult

MOST_KEPT: Final = 4096
"""So many problems are remembered."""
MOST_SEQUENCES: Final = 1 << 14
"""A request of more is left to others: each takes the memory of a call, however small it is."""
_FLOATS: Final = ("bias", "alibi_slopes", "sinks")


class _Sequences(NamedTuple):
    """So many sequences alike, one behind the other: where the first one's query, key, value, output, lse, mask and
    bias begin, in bytes from where the request's do.
    """

    number: int
    offsets: list[int]
    shape: bytes


class _Plan(NamedTuple):
    """The sequences of all requests of a problem with these spans, by how many bytes the tensors of each are behind
    those of the one before, and the bytes of a reply's output and lse.
    """

    problem: Problem
    spans: tuple[Span, ...]
    sequences: list[_Sequences]
    steps: list[int]
    output_bytes: int
    lse_bytes: int


class NativeRequests:
    """The native kernel, as far as requests are concerned."""

    def __init__(self, library: Library) -> None:
        """Everything is computed by `library`."""
        self._library = library
        self._plans: dict[int, _Plan] = {}

    def run(self, requests: Sequence[Request], threads: Threads | None) -> list[RequestResult | None]:
        """The result of each request, None for those that are to be computed in another way. `threads` as in the
        library. Raises MemoryError.
        """
        results: list[RequestResult | None] = []
        packed, owners, alive = bytearray(), [], []
        for place, request in enumerate(requests):
            plan = self._plan(request)
            if plan is None:
                results.append(None)
                continue
            # Of its own: who is slow to take a reply is not to hold the memory of others'.
            lse_at = aligned(plan.output_bytes)
            memory = np.empty(lse_at + plan.lse_bytes, np.uint8)
            reply, output = memoryview(memory), addressof(c_char.from_buffer(memory))  # type: ignore[arg-type]
            lse = output + lse_at if plan.lse_bytes else 0
            problem, payloads = plan.problem, request.payloads
            query, key, value = (address(payloads, problem.tensors[name].payload) for name in ("query", "key", "value"))
            mask = bias = slopes = sinks = 0
            if len(problem.tensors) > 3:
                if "mask" in problem.tensors:
                    mask = address(payloads, problem.tensors["mask"].payload)
                converted = [floats(problem, payloads, name) for name in _FLOATS]
                alive.append(converted)  # until the kernel has read them
                bias, slopes, sinks = (0 if each is None else address_of(each) for each in converted)
            for number, offsets, shape in plan.sequences:
                of_query, of_key, of_value, of_output, of_lse, of_mask, of_bias = offsets
                addresses: Addresses = (
                    query + of_query,
                    key + of_key,
                    value + of_value,
                    output + of_output,
                    lse and lse + of_lse,
                    mask and mask + of_mask,
                    bias and bias + of_bias,
                    slopes,
                    sinks,
                )
                if number == 1:
                    packed += pack(addresses, shape)
                    owners.append(place)
                else:
                    packed += pack_several(addresses, plan.steps, shape, number)
                    owners += [place] * number
            results.append(
                RequestResult(reply[: plan.output_bytes], reply[lse_at:] if problem.return_lse else None, None)
            )
        if packed:
            finite = self._library.attend(packed, threads)
            if not finite.all():
                for call in (~finite).nonzero()[0].tolist():
                    results[owners[call]] = None
        return results

    def _plan(self, request: Request) -> _Plan | None:
        """The plan for a request, if the kernel computes such requests."""
        problem, spans = request.problem, request.spans
        plan = self._plans.get(id(problem))
        if plan is not None and plan.spans is spans:  # it keeps its problem alive, so that no other has this id
            return plan
        if plan is None and not (applies(problem) and problem.query_length and 0 < problem.batch <= MOST_SEQUENCES):
            return None  # where there is no query, lengths may be beyond all bounds
        plan = _planned(problem, spans)
        if len(spans) == 1:  # others have lengths of their own, which hardly ever come again
            if len(self._plans) >= MOST_KEPT:
                self._plans.clear()
            self._plans[id(problem)] = plan
        return plan


def _planned(problem: Problem, spans: tuple[Span, ...]) -> _Plan:
    itemsize = _dtypes.NUMPY[problem.dtype].itemsize
    heads, kv_heads = problem.query_heads, problem.kv_heads
    rows, keys = problem.query_length, problem.kv_length
    batch = 1 if problem.packed else problem.batch
    key_strides, value_strides = (
        strides_of(problem, kv_heads, keys, width) for width in (problem.key_dim, problem.value_dim)
    )
    mask, bias = (broadcast_strides(problem, name) for name in ("mask", "bias"))
    # The bytes of a token in query, key, value and output, and of a sequence in these and all else.
    of_query, of_key = itemsize * heads * problem.head_dim, itemsize * kv_heads * problem.key_dim
    of_value, of_output = (itemsize * count * problem.value_dim for count in (kv_heads, heads))
    of_lse = 4 * heads * rows if problem.return_lse else 0
    steps = [rows * of_query, keys * of_key, keys * of_value, rows * of_output, of_lse, mask[0], 4 * bias[0]]
    sequences = []
    for span in spans:
        at = Keys(span.kv_length, span.offset, DTYPES[problem.dtype], 0, key_strides, value_strides)
        offsets = [span.first * step for step in steps]
        if problem.packed:  # tokens come first, but in the lse
            query, key = span.query_start, span.kv_start
            offsets[:5] = query * of_query, key * of_key, key * of_value, query * of_output, 4 * query
        sequences.append(_Sequences(span.sequences, offsets, shape_of(problem, span.query_length, at)))
    return _Plan(
        problem,
        spans,
        sequences,
        steps,
        batch * rows * of_output,
        batch * of_lse,
    )
