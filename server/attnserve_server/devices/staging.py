"""From requests to kernel calls, for any device: the layout of payloads becomes heads first and packed.

Requests of one batch that share a problem and have one span each are stacked into one call; all others become one call
per span. Neither changes a bit of any result: kernels compute each sequence as if it were alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from attnserve.v1 import tensor_pb2 as pb
from attnserve_server.devices.inputs import arranged, copy, fill
from attnserve_server.host.cpus import CACHE_LINE
from attnserve_server.kernels import AdditiveScore, AttentionCall, GeneralScore, accumulation_dtype, part_of
from attnserve_server.kernels.finite import surely_finite
from attnserve_server.requests.extent import Span
from attnserve_server.requests.problem import Problem
from attnserve_server.requests.request import Request
from attnserve_server.requests.tensors import TensorSpec

TORCH: dict[int, torch.dtype] = {
    pb.DATA_TYPE_FLOAT32: torch.float32,
    pb.DATA_TYPE_FLOAT16: torch.float16,
    pb.DATA_TYPE_BFLOAT16: torch.bfloat16,
    pb.DATA_TYPE_FLOAT64: torch.float64,
    pb.DATA_TYPE_BOOL: torch.uint8,
}
"""The torch dtype that the elements of each dtype of the wire are read as."""

LOOKED_AT: Final = 4 << 20
"""Staging checks inputs of up to this many bytes for finiteness, all at once; kernels check larger ones, on threads."""

Allocate = Callable[[int], torch.Tensor]
Upload = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class StagedCall:
    """A kernel call and the sequences that it computes: spans of requests, by their places in the batch."""

    call: AttentionCall
    parts: list[tuple[int, Span]]


class Stager:
    """Turns batches into calls: `allocate` gives host memory of a number of bytes, `upload` brings it to the device.

    `looks` says that uploaded tensors can be read without waiting for the device.
    """

    def __init__(self, allocate: Allocate, upload: Upload, looks: bool) -> None:
        self._allocate = allocate
        self._upload = upload
        self._looks = looks

    def stage(self, requests: Sequence[Request]) -> list[StagedCall]:
        """The calls for a batch."""
        staged: list[StagedCall] = []
        for indexes in _stacks(requests):
            staged += self._stage_stack(requests, indexes)
        return staged

    def _stage_stack(self, requests: Sequence[Request], indexes: list[int]) -> Iterator[StagedCall]:
        """The calls for requests that share a problem; several requests only if each has a single span."""
        members = [requests[index] for index in indexes]
        problem, spans = members[0].problem, members[0].spans
        if not problem.batch * problem.query_length:
            return  # nothing to compute, however many sequences of length 0 there may be
        query, key, value, finite = self._inputs(members)
        exact = accumulation_dtype(TORCH[problem.dtype])
        mask = self._broadcast(members, "mask", torch.bool)
        bias = self._broadcast(members, "bias", exact)
        parameters = {
            name: in_range(self._tensor(members, name), exact)
            for name in ("alibi_slopes", "sinks")
            if name in problem.tensors
        }
        score = self._score(members[0], exact)
        # Scores before masking exist for the keys that `kv_lengths` masks, too; otherwise those keys are cut off.
        masked_lengths = problem.return_scores in ("raw", "capped") and not problem.packed
        for span in spans:
            count = span.sequences * len(members)
            bounds = slice(0, span.query_length), slice(0, span.kv_length)
            span_mask = mask
            if masked_lengths:
                bounds = bounds[0], slice(0, problem.kv_length)
                if span.kv_length < problem.kv_length:
                    within = torch.arange(problem.kv_length, device=query.device).view(1, 1, 1, -1) < span.kv_length
                    span_mask = within if mask is None else mask & within
            queries, keys, values = query, key, value
            if len(spans) > 1 or span.sequences < problem.batch or bounds[1].stop < problem.kv_length:
                sequences = slice(0, 1) if problem.packed else slice(span.first, span.first + count)
                queries = query[sequences, :, span.query_start : span.query_start + span.query_length]
                keys, values = (
                    tensor[sequences, :, span.kv_start : span.kv_start + bounds[1].stop] for tensor in (key, value)
                )
            yield StagedCall(
                AttentionCall(
                    query=queries,
                    key=keys,
                    value=values,
                    scale=problem.scale,
                    score=score,
                    softcap=problem.softcap,
                    offset=span.offset,
                    window=problem.window,
                    mask=_cut(span_mask, slice(span.first, span.first + count), *bounds),
                    bias=_cut(bias, slice(span.first, span.first + count), *bounds),
                    return_lse=problem.return_lse,
                    return_scores=problem.return_scores,
                    alibi_slopes=parameters.get("alibi_slopes"),
                    sinks=parameters.get("sinks"),
                    finite=finite,
                ),
                [(index, span) for index in indexes],
            )

    def _inputs(self, members: Sequence[Request]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
        """Queries, keys and values [N, H, L, D], packed, of requests that share a problem, sequence by sequence; and
        whether they are known to hold neither NaN nor infinities.

        They share memory, which is allocated, uploaded and checked in one go.
        """
        problem, count, end, used = members[0].problem, len(members), 0, 0
        dtype, begins = TORCH[problem.dtype], []
        specs = [problem.tensors[name] for name in ("query", "key", "value")]
        for spec in specs:
            begins.append(end)
            used += spec.size * count
            end += -(-spec.size * count // CACHE_LINE) * CACHE_LINE
        raw = self._allocate(end)
        target = memoryview(raw.numpy())  # type: ignore[arg-type]
        for spec, start in zip(specs, begins, strict=True):
            for member in members if spec.size else ():
                start = copy(member.payloads[spec.payload], target, start)
        elements = self._upload(raw.view(dtype))
        query, key, value = (
            elements.as_strided(*arranged(spec.shape, problem.length_first, count), begin // dtype.itemsize)
            for spec, begin in zip(specs, begins, strict=True)
        )
        if problem.length_first:
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        # If there are gaps between them, these hold anything: then nothing is known.
        finite = self._looks and used == end <= LOOKED_AT and surely_finite(elements)
        return query, key, value, finite

    def _tensor(self, members: Sequence[Request], name: str) -> torch.Tensor:
        """A tensor of several requests, stacked along a new first axis, which is dropped for a single one."""
        spec = members[0].problem.tensors[name]
        raw = self._allocate(spec.size * len(members))
        fill(raw, [member.payload(name) for member in members])
        tensor = self._upload(raw.view(TORCH[spec.dtype]))
        return tensor.view(spec.shape if len(members) == 1 else (len(members), *spec.shape))

    def _broadcast(self, members: Sequence[Request], name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """Mask or bias of rank 4, whose first axis is 1 or the sequences of all requests."""
        problem = members[0].problem
        spec = problem.tensors.get(name)
        if spec is None:
            return None
        shape = (1,) * (4 - len(spec.shape)) + spec.shape
        tensor = self._tensor(members, name)
        tensor = tensor.to(dtype) if dtype == torch.bool else in_range(tensor, dtype)
        if len(members) == 1:
            return tensor.view(shape)
        tensor = tensor.view(len(members), *shape).expand(-1, problem.batch, -1, -1, -1)
        return tensor.reshape(len(members) * problem.batch, *shape[1:])

    def _score(self, request: Request, dtype: torch.dtype) -> GeneralScore | AdditiveScore | None:
        def parameter(path: str) -> torch.Tensor | None:
            return in_range(self._tensor([request], path), dtype) if path in request.problem.tensors else None

        return score_of(request.problem, parameter)


def _stacks(requests: Sequence[Request]) -> list[list[int]]:
    """The batch as lists of places: requests that can be one call, in order of arrival."""
    stacks: dict[object, list[int]] = {}
    for index, request in enumerate(requests):
        problem = request.problem
        alone = len(request.spans) > 1 or not problem.stackable
        stacks.setdefault(index if alone else (id(problem), request.spans), []).append(index)
    return list(stacks.values())


def score_of(problem: Problem, parameter: Callable[[str], torch.Tensor | None]) -> GeneralScore | AdditiveScore | None:
    """A problem's score; `parameter` gives the tensor of a path such as `general.weight`, None if there is none."""
    if problem.score is None:
        return None
    if problem.score == "general":
        weight = parameter("general.weight")
        assert weight is not None
        return GeneralScore(weight)
    query_weight, key_weight = parameter("additive.query_weight"), parameter("additive.key_weight")
    assert query_weight is not None
    assert key_weight is not None
    return AdditiveScore(query_weight, key_weight, parameter("additive.bias"), parameter("additive.output_weight"))


def in_range(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in a dtype of perhaps less range, where what was finite stays finite: large biases are values."""
    converted = tensor.to(dtype)
    if tensor.dtype != torch.float64 or dtype == torch.float64:
        return converted
    largest = torch.finfo(dtype).max
    return torch.where(tensor.isfinite(), converted.clamp(-largest, largest), converted)


def sinks_of(tensors: Mapping[str, TensorSpec], payloads: Sequence[memoryview]) -> NDArray[np.float32]:
    """The sinks [Hq] among the tensors of a request, on the host in float32."""
    spec = tensors["sinks"]
    raw = torch.empty(spec.size, dtype=torch.uint8)
    fill(raw, [payloads[spec.payload]])
    return in_range(raw.view(TORCH[spec.dtype]), torch.float32).numpy()


def heads_first(elements: torch.Tensor, shape: tuple[int, ...], length_first: bool) -> torch.Tensor:
    """[N, H, L, D], packed, from the elements of a tensor of rank 2 to 4, in some layout."""
    tensor = elements.as_strided(*arranged(shape, length_first, 1))
    return tensor.contiguous() if length_first else tensor


def _cut(tensor: torch.Tensor | None, *bounds: slice) -> torch.Tensor | None:
    """The part of a mask or bias of rank 4 for some sequences, queries and keys; broadcast axes stay as they are."""
    for axis, bound in zip((0, 2, 3), bounds, strict=True):
        tensor = part_of(tensor, axis, bound.start, bound.stop)
    return tensor
