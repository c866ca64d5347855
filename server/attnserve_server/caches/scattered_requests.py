"""Requests of a batch that are computed as in `scattered.py`, on a device with a kernel for that.

In: requests. Out: their results, and which of these have no meaning. Whatever their number, requests that are alike
take one copy to the device, one computation and one fetch: rows are put together, and taken apart, on the host.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch

from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.scattered import Reach, applies, attend_ranges, reach
from attnserve_server.caches.scattered_queries import with_sinks
from attnserve_server.devices.packed_results import BITS, as_bits, bytes_of, with_axes
from attnserve_server.devices.staging import TORCH, sinks_of
from attnserve_server.kernels.band import Band
from attnserve_server.kernels.ragged import MAX_SEQUENCES
from attnserve_server.requests.scores import is_fusable
from attnserve_server.requests.work import RequestResult

if TYPE_CHECKING:
    from attnserve_server.caches.request import CachedRequest
    from attnserve_server.caches.shape import CacheShape
    from attnserve_server.devices import Device
    from attnserve_server.devices.compute import Scattering
    from attnserve_server.requests.problem import Problem


class AlikeRequests:
    """Requests, by their places in a batch, whose queries are computed together."""

    def __init__(self, batch: Sequence[CachedRequest]) -> None:
        self._batch = batch
        self.places: list[int] = []
        self._reaches: list[Reach] = []
        self._asked: list[torch.Tensor] = []

    @property
    def _requests(self) -> list[CachedRequest]:
        return [self._batch[place] for place in self.places]

    def add(self, place: int, reaches: Sequence[Reach]) -> None:
        """Adds a request, whose sequences attend to these ranges."""
        self.places.append(place)
        self._reaches.extend(reaches)

    def stage(self, device: Device) -> None:
        """Sends queries [S, Hq, L, D] and, if there are any, sinks [S, Hq], of all sequences."""
        problem = self._requests[0].problem
        shape = len(self._reaches), problem.query_heads, problem.query_length, problem.head_dim
        dtype = TORCH[problem.dtype]
        raw = device.allocate(prod(shape) * dtype.itemsize)
        rows = raw.numpy().view(BITS[dtype.itemsize]).reshape(shape).swapaxes(1, 2)
        begin = 0
        for request in self._requests:
            spec = request.problem.tensors["query"]
            payload = np.frombuffer(request.payloads[spec.payload], rows.dtype).reshape(spec.shape)
            rows[begin : begin + len(request.uses)] = with_axes(payload, request.problem)
            begin += len(request.uses)
        self._query = device.upload(raw.view(dtype)).view(shape)
        self._sinks = None
        if "sinks" in problem.tensors:
            here = device.allocate(4 * prod(shape[:2])).view(torch.float32).view(shape[:2])
            each = np.stack([sinks_of(request.problem.tensors, request.payloads) for request in self._requests])
            here.numpy()[...] = np.repeat(each, [len(request.uses) for request in self._requests], axis=0)
            self._sinks = device.upload(here)

    def compute(self, pool: PagePool, scattering: Scattering) -> list[torch.Tensor]:
        """Computes them. Returns the tensors to be fetched."""
        request = self._requests[0]
        problem, shape, sinks = request.problem, request.uses[0].cache.shape, self._sinks
        found = attend_ranges(self._query, self._reaches, problem.scale, shape, pool, scattering, sinks is None)
        output, lse = with_sinks(found.output, found.lse, sinks, self._query.dtype)
        return [output, found.check, lse] if problem.return_lse else [output, found.check]

    def results(self, fetched: Sequence[torch.Tensor]) -> Iterator[tuple[int, RequestResult, list[int]]]:
        """From these tensors on the host: each request's place, result, and for which sequences it has no meaning."""
        output, check, *lses = (tensor.contiguous() for tensor in fetched)
        rows = as_bits(output)
        lse = lses[0].numpy() if lses else None
        suspects = ~np.isfinite(check.numpy())
        begin = 0
        for place, request in zip(self.places, self._requests, strict=True):
            part = slice(begin, begin + len(request.uses))
            own = rows[part].swapaxes(1, 2) if request.problem.tokens_first else rows[part]
            own_lse = None if lse is None else bytes_of(lse[part])
            result = RequestResult(bytes_of(own), own_lse, None)
            yield place, result, np.flatnonzero(suspects[part]).tolist()
            begin = part.stop


def alike(batch: Sequence[CachedRequest], pool: PagePool) -> list[AlikeRequests]:
    """The requests of a batch that can be computed so."""
    found: dict[Hashable, AlikeRequests] = {}
    for place, request in enumerate(batch):
        problem, shape = request.problem, request.uses[0].cache.shape
        reaches = _reaches(request, pool) if _is_plain(problem, shape, pool) else None
        if reaches is not None:
            lse, sinks = problem.return_lse, "sinks" in problem.tensors
            key = problem.dtype, problem.query_heads, problem.query_length, problem.scale, shape, lse, sinks
            found.setdefault(key, AlikeRequests(batch)).add(place, reaches)
    return list(found.values())


def _is_plain(problem: Problem, shape: CacheShape, pool: PagePool) -> bool:
    if not is_fusable(problem) or problem.tensors.keys() & {"mask", "bias", "alibi_slopes"}:
        return False
    return applies(shape, TORCH[problem.dtype], problem.query_heads, problem.query_length, pool)


def _reaches(request: CachedRequest, pool: PagePool) -> list[Reach] | None:
    """The range of each sequence; None if one of them has none."""
    problem, reaches = request.problem, []
    per_page = pool.tokens_per_page(request.uses[0].cache.shape)
    (left, right), longest = problem.window, per_page * MAX_SEQUENCES
    for use, keys, offset in zip(request.uses, request.kv_lengths, request.offsets, strict=True):
        pages = use.cache.table(use.layer).numbers
        if left < 0 and 0 < keys <= longest and (right < 0 or offset + right >= keys - 1):  # nearly always
            reaches.append(Reach(pages, 0, keys))
            continue
        band = Band(problem.query_length, keys, offset, left, right)
        own = reach(pages, per_page, band)
        if own is None:
            return None
        reaches.append(own)
    return reaches
