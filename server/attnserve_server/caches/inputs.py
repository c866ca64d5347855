"""The inputs of requests to caches, as tensors on a device.

In: requests with their payloads. Out: queries over pages, keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from attnserve_server.caches.query import CacheQuery
from attnserve_server.devices.inputs import fill
from attnserve_server.devices.staging import TORCH, heads_first, in_range, score_of
from attnserve_server.kernels import accumulation_dtype, part_of
from attnserve_server.requests.tensors import TensorSpec

if TYPE_CHECKING:
    from attnserve_server.caches.request import CachedRequest
    from attnserve_server.devices import Device


def read_tensor(spec: TensorSpec, payloads: Sequence[memoryview], device: Device) -> torch.Tensor:
    """A tensor of a request, in memory of its own on the device."""
    return _elements(spec, payloads, device).view(spec.shape)


def _elements(spec: TensorSpec, payloads: Sequence[memoryview], device: Device) -> torch.Tensor:
    """The elements of a tensor, flat."""
    raw = device.allocate(spec.size)
    if spec.payload >= 0:
        fill(raw, [payloads[spec.payload]])
    return device.upload(raw.view(TORCH[spec.dtype]))


def read_heads_first(name: str, request: CachedRequest, device: Device) -> torch.Tensor:
    """Queries, keys or values of a request as [N, H, L, D]."""
    spec = request.problem.tensors[name]
    return heads_first(_elements(spec, request.payloads, device), spec.shape, request.problem.length_first)


def read_queries(device: Device, request: CachedRequest, sequences: Sequence[int]) -> list[CacheQuery]:
    """The queries of some sequences of a request."""
    problem, payloads = request.problem, request.payloads

    def read(name: str) -> torch.Tensor | None:
        spec = problem.tensors.get(name)
        return None if spec is None else read_tensor(spec, payloads, device)

    def parameter(name: str) -> torch.Tensor | None:
        """A tensor of the request, in the dtype of sums."""
        tensor = read(name)
        return None if tensor is None else in_range(tensor, accumulation_dtype(TORCH[problem.dtype]))

    def of_rank_4(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.view((1,) * (4 - tensor.dim()) + tensor.shape)

    query = read_heads_first("query", request, device)
    mask = of_rank_4(read("mask"))
    mask = None if mask is None else mask != 0
    bias = of_rank_4(parameter("bias"))
    score = score_of(problem, parameter)
    alibi_slopes, sinks = parameter("alibi_slopes"), parameter("sinks")
    return [
        CacheQuery(
            query=query[b : b + 1],
            shape=request.uses[b].cache.shape,
            pages=request.uses[b].cache.pages(request.uses[b].layer),
            length=request.lengths[b],
            kv_length=request.kv_lengths[b],
            scale=problem.scale,
            score=score,
            softcap=problem.softcap,
            offset=request.offsets[b],
            window=problem.window,
            mask=_of_sequence(mask, b, request.lengths[b]),
            bias=_of_sequence(bias, b, request.lengths[b]),
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            return_lse=problem.return_lse,
            return_scores=problem.return_scores,
        )
        for b in sequences
    ]


def _of_sequence(tensor: torch.Tensor | None, b: int, length: int) -> torch.Tensor | None:
    """The part of a mask or bias for a sequence and the keys that it has."""
    return part_of(part_of(tensor, 0, b, b + 1), 3, 0, length)
