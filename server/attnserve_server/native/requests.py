"""Requests of `Attend` by the native kernel: read where they were received, written as replies have it.

In: requests. Out: a result each, or none where the kernel came upon NaN or infinities: those are computed in another
way. Where a sequence's tensors begin follows from a problem, and callers send the same problem over and over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnserve import _dtypes
from attnserve.v1 import tensor_pb2 as pb
from attnserve_server.native.library import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    MAX_WIDTH,
    Addresses,
    Library,
    Shape,
    Strides,
    Threads,
    pack,
)
from attnserve_server.problem import Problem
from attnserve_server.request import Request, Span
from attnserve_server.work import RequestResult

DTYPES: Final[dict[int, int]] = {
    pb.DATA_TYPE_FLOAT32: FLOAT32,
    pb.DATA_TYPE_FLOAT16: FLOAT16,
    pb.DATA_TYPE_BFLOAT16: BFLOAT16,
}
MOST_KEPT: Final = 4096
"""So many problems are remembered,"""
MOST_SEQUENCES: Final = 64
"""of no more than so many sequences."""
ALIGNMENT: Final = 64
"""Results begin at multiples of so many bytes."""

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
                size += _aligned(plan.output_bytes) + _aligned(plan.lse_bytes)
        memory = np.empty(size, np.uint8)
        replies = memoryview(memory)  # type: ignore[arg-type]
        results: list[RequestResult | None] = []
        packed, owners, alive = bytearray(), [], []
        base, at = memory.ctypes.data, 0
        for place, (request, plan) in enumerate(zip(requests, plans, strict=True)):
            if plan is None:
                results.append(None)
                continue
            output, at = at, at + _aligned(plan.output_bytes)
            lse, at = at, at + _aligned(plan.lse_bytes)
            problem, payloads = plan.problem, request.payloads
            query, key, value = (
                _address(payloads, problem.tensors[name].payload) for name in ("query", "key", "value")
            )
            mask = bias = slopes = sinks = 0
            if len(problem.tensors) > 3:
                if "mask" in problem.tensors:
                    mask = _address(payloads, problem.tensors["mask"].payload)
                floats = [_floats(request, name) for name in _FLOATS]
                alive.append(floats)  # until the kernel has read them
                bias, slopes, sinks = (0 if each is None else each.ctypes.data for each in floats)
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
        if plan is None and not _applies(problem):
            return None
        plan = _planned(problem, spans)
        if len(plan.sequences) <= MOST_SEQUENCES:
            if len(self._plans) >= MOST_KEPT:
                self._plans.clear()
            self._plans[id(problem)] = plan
        return plan


def _applies(problem: Problem) -> bool:
    """Whether the native kernel computes such requests."""
    names = problem.tensors.keys()
    return (
        problem.dtype in DTYPES
        and problem.score is None
        and problem.return_scores is None
        # A mask may leave only distant keys, whose large ALiBi biases cost float32 its precision.
        and not {"mask", "alibi_slopes"} <= names
        and max(problem.head_dim, problem.value_dim) <= MAX_WIDTH
    )


def _planned(problem: Problem, spans: tuple[Span, ...]) -> _Plan:
    itemsize = _dtypes.NUMPY[problem.dtype].itemsize
    heads, kv_heads = problem.query_heads, problem.kv_heads
    rows, keys = problem.query_length, problem.kv_length
    batch = 1 if problem.packed else problem.batch
    tokens_first = problem.length_first and problem.rank > 2
    mask, bias = (_broadcast(problem, name) for name in ("mask", "bias"))
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
            query=_strides(tokens_first, heads, rows, problem.head_dim),
            key=_strides(tokens_first, kv_heads, keys, problem.key_dim),
            value=_strides(tokens_first, kv_heads, keys, problem.value_dim),
            output=_strides(tokens_first, heads, rows, problem.value_dim),
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


def _strides(tokens_first: bool, heads: int, length: int, width: int) -> Strides:
    return Strides(heads * width, width) if tokens_first else Strides(width, length * width)


def _broadcast(problem: Problem, name: str) -> tuple[int, ...]:
    """The strides of a mask or bias along its 4 axes, 0 where it is broadcast."""
    spec = problem.tensors.get(name)
    if spec is None:
        return 0, 0, 0, 0
    shape, strides, step = (1,) * (4 - len(spec.shape)) + spec.shape, [], 1
    for length in reversed(shape):
        strides.append(step if length > 1 else 0)
        step *= length
    return tuple(reversed(strides))


def _floats(request: Request, name: str) -> NDArray[Any] | None:
    """A tensor of biases or the like as float32, in which what was finite stays finite."""
    spec = request.problem.tensors.get(name)
    if spec is None:
        return None
    array = np.frombuffer(request.payload(name), _dtypes.NUMPY[spec.dtype])
    if spec.dtype == pb.DATA_TYPE_FLOAT32:
        return array
    if spec.dtype == pb.DATA_TYPE_FLOAT64:
        largest = np.finfo(np.float32).max
        array = np.where(np.isfinite(array), array.clip(-largest, largest), array)
    return array.astype(np.float32)


def _address(payloads: Sequence[memoryview], place: int) -> int:
    """Where a payload is; anywhere if it has no elements."""
    if place < 0 or not payloads[place]:
        return ALIGNMENT
    address: int = np.frombuffer(payloads[place], np.uint8).ctypes.data
    return address


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
