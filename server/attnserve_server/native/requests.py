"""Requests of `Attend` by the native kernel: read where they were received, written as replies have it.

In: requests. Out: a result each, or none where the kernel came upon NaN or infinities: those are computed in another
way. Where a sequence's tensors begin follows from a problem, and callers send the same problem over and over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from attnserve import _dtypes
from attnserve_server.native.library import Addresses, Library, Shape, Threads, pack
from attnserve_server.native.payloads import DTYPES, address, aligned, applies, broadcast_strides, floats, strides_of
from attnserve_server.problem import Problem
from attnserve_server.request import Request, Span
from attnserve_server.work import RequestResult

MOST_KEPT: Final = 4096
"""So many problems are remembered,"""
MOST_SEQUENCES: Final = 64
"""of no more than so many sequences."""
_FLOATS: Final = ("bias", "alibi_slopes", "sinks")


class _Sequence(NamedTuple):
    """Where a sequence's query, key, value, output, lse, mask and bias begin, in bytes from where the request's do."""

    offsets: tuple[int, int, int, int, int, int, int]
    shape: bytes


class _Plan(NamedTuple):
    """The sequences of all requests of a problem with these spans, and the bytes of a reply's output and lse."""

    problem: Problem
    spans: tuple[Span, ...]
    sequences: list[_Sequence]
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
        plans = [self._plan(request) for request in requests]
        size = 0
        for plan in plans:
            if plan is not None:
                size += aligned(plan.output_bytes) + aligned(plan.lse_bytes)
        memory = np.empty(size, np.uint8)
        replies = memoryview(memory)  # type: ignore[arg-type]
        results: list[RequestResult | None] = []
        packed, owners, alive = bytearray(), [], []
        base, at = memory.ctypes.data, 0
        for place, (request, plan) in enumerate(zip(requests, plans, strict=True)):
            if plan is None:
                results.append(None)
                continue
            output, at = at, at + aligned(plan.output_bytes)
            lse, at = at, at + aligned(plan.lse_bytes)
            problem, payloads = plan.problem, request.payloads
            query, key, value = (address(payloads, problem.tensors[name].payload) for name in ("query", "key", "value"))
            mask = bias = slopes = sinks = 0
            if len(problem.tensors) > 3:
                if "mask" in problem.tensors:
                    mask = address(payloads, problem.tensors["mask"].payload)
                converted = [floats(problem, payloads, name) for name in _FLOATS]
                alive.append(converted)  # until the kernel has read them
                bias, slopes, sinks = (0 if each is None else each.ctypes.data for each in converted)
            lse_address = base + lse if plan.lse_bytes else 0
            for (of_query, of_key, of_value, of_output, of_lse, of_mask, of_bias), shape in plan.sequences:
                addresses: Addresses = (
                    query + of_query,
                    key + of_key,
                    value + of_value,
                    base + output + of_output,
                    lse_address and lse_address + of_lse,
                    mask and mask + of_mask,
                    bias and bias + of_bias,
                    slopes,
                    sinks,
                )
                packed += pack(addresses, shape)
                owners.append(place)
            results.append(
                RequestResult(
                    replies[output : output + plan.output_bytes],
                    replies[lse : lse + plan.lse_bytes] if problem.return_lse else None,
                    None,
                )
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
        if plan is None and not applies(problem):
            return None
        plan = _planned(problem, spans)
        if len(plan.sequences) <= MOST_SEQUENCES:
            if len(self._plans) >= MOST_KEPT:
                self._plans.clear()
            self._plans[id(problem)] = plan
        return plan


def _planned(problem: Problem, spans: tuple[Span, ...]) -> _Plan:
    itemsize = _dtypes.NUMPY[problem.dtype].itemsize
    heads, kv_heads = problem.query_heads, problem.kv_heads
    rows, keys = problem.query_length, problem.kv_length
    batch = 1 if problem.packed else problem.batch
    tokens_first = problem.length_first and problem.rank > 2
    mask, bias = (broadcast_strides(problem, name) for name in ("mask", "bias"))
    sequences = []
    for span in spans:
        shape = Shape(
            query_length=span.query_length,
            kv_length=span.kv_length,
            offset=span.offset,
            query_heads=heads,
            kv_heads=kv_heads,
            head_dim=problem.head_dim,
            value_dim=problem.value_dim,
            query_dtype=DTYPES[problem.dtype],
            kv_dtype=DTYPES[problem.dtype],
            page_tokens=0,
            query=strides_of(tokens_first, heads, rows, problem.head_dim),
            key=strides_of(tokens_first, kv_heads, keys, problem.key_dim),
            value=strides_of(tokens_first, kv_heads, keys, problem.value_dim),
            output=strides_of(tokens_first, heads, rows, problem.value_dim),
            lse_head=rows,
            mask=mask[1:],
            bias=bias[1:],
            left=problem.window[0],
            right=0 if problem.causal else problem.window[1],
            scale=problem.scale,
            softcap=problem.softcap,
        )
        packed = shape.packed()
        for number in range(span.first, span.first + span.sequences):
            query, key = (span.query_start, span.kv_start) if problem.packed else (number * rows, number * keys)
            elements = (
                query * heads * problem.head_dim,
                key * kv_heads * problem.key_dim,
                key * kv_heads * problem.value_dim,
                query * heads * problem.value_dim,
            )
            # Packed requests have tokens first, but for their lse.
            lse = span.query_start if problem.packed else number * heads * rows
            of_query, of_key, of_value, of_output = (itemsize * element for element in elements)
            offsets = of_query, of_key, of_value, of_output, 4 * lse, number * mask[0], 4 * number * bias[0]
            sequences.append(_Sequence(offsets, packed))
    return _Plan(
        problem,
        spans,
        sequences,
        batch * rows * heads * problem.value_dim * itemsize,
        batch * rows * heads * 4 if problem.return_lse else 0,
    )
