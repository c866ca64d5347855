"""Writes what requests append to the pages where it has been placed.

In: requests whose turn it is. Out: nothing; their tokens are in the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnserve import _dtypes
from attnserve_server.caches.inputs import read_heads_first
from attnserve_server.caches.layer import Write
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.stored_range import check_many
from attnserve_server.devices.inputs import fill
from attnserve_server.devices.packed_results import bytes_of
from attnserve_server.devices.staging import TORCH
from attnserve_server.native.payloads import NATIVE_FROM_WIRE

if TYPE_CHECKING:
    from attnserve_server.caches.request import CachedRequest
    from attnserve_server.devices import Device


def append(pool: PagePool, device: Device, batch: Sequence[CachedRequest]) -> None:
    """Writes what requests append, where it has been placed. Raises InvalidRequest before anything is written."""
    for request in batch:
        check_many(request.problem.tensors, request.payloads, request.uses[0].cache.shape.dtype)
    on_cpu = device.torch_device.type == "cpu"
    single: list[CachedRequest] = []
    for request in batch:
        problem, placements = request.problem, request.placements
        if placements and problem.kv_length > 1:
            key, value = (read_heads_first(name, request, device) for name in ("key", "value"))
            for b, placement in enumerate(placements):
                pool.write(request.uses[0].cache.shape, placement, key[b], value[b])
        elif placements and on_cpu and problem.dtype in NATIVE_FROM_WIRE:
            append_tokens(pool, request)
        elif placements:
            single.append(request)
    if single:
        _append_together(pool, device, single)


def append_tokens(pool: PagePool, request: CachedRequest) -> None:
    """Writes a request's one token for each cache to its place: at most 32 bits an element, on a CPU."""
    key, value = (_token(name, request) for name in ("key", "value"))
    pool.write_arrays(request.uses[0].cache.shape, _places(pool, request), key, value)


def _append_together(pool: PagePool, device: Device, requests: Sequence[CachedRequest]) -> None:
    """Writes one token for each cache of requests of one group, which take one copy to the device."""
    dtype = TORCH[requests[0].problem.dtype]
    parts = [[_token(name, request) for request in requests] for name in ("key", "value")]
    raw = device.allocate(sum(array.nbytes for arrays in parts for array in arrays))
    fill(raw, [bytes_of(array) for arrays in parts for array in arrays])
    sent = device.upload(raw.view(dtype))
    places = [place for request in requests for place in _places(pool, request)]
    ends = sum(array.size for array in parts[0]), sent.numel()
    key, value = (
        sent[end - sum(array.size for array in arrays) : end].view(len(places), *arrays[0].shape[1:])
        for end, arrays in zip(ends, parts, strict=True)
    )
    pool.write_tokens(requests[0].uses[0].cache.shape, places, key, value)


def _places(pool: PagePool, request: CachedRequest) -> list[Write]:
    """The places of the tokens of a request that appends one to each cache; shared pages are copied first."""
    for placement in request.placements:
        pool.copy(placement.copies)
    return [placement.writes[0] for placement in request.placements]


def _token(name: str, request: CachedRequest) -> NDArray[Any]:
    """Keys or values [n, Hk, width] of one token for each sequence; both layouts store these in the same order."""
    problem, spec = request.problem, request.problem.tensors[name]
    array = np.frombuffer(request.payloads[spec.payload], _dtypes.NUMPY[spec.dtype])
    return array.reshape(problem.batch, problem.kv_heads, -1)
