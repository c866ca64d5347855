"""A batch of attentions to caches, on a device: appends written, queries computed, results in bytes.

What the native kernel computes never becomes tensors (`native_requests.py`). Everything else does (`inputs.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Final

import torch

from attnserve_server.caches.append import append
from attnserve_server.caches.attend import attend_tensors
from attnserve_server.caches.inputs import read_queries
from attnserve_server.caches.native_requests import attend_requests
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.query import CacheQuery
from attnserve_server.caches.scattered_requests import AlikeRequests, alike
from attnserve_server.devices.batch import FEW_CALLS
from attnserve_server.devices.results import ReplyTensors, put, results_of, tensors_of
from attnserve_server.kernels import AttentionResult, widened
from attnserve_server.requests.work import BatchResult, Finish, RequestResult

if TYPE_CHECKING:
    from attnserve_server.caches.request import CachedRequest
    from attnserve_server.devices import Device


FEW_CACHES: Final = 512
"""Requests to so many caches take two milliseconds to be planned and put together, while others wait."""
PLANNED_PAGES: Final = 4096
"""Keys on so many pages take half a millisecond to be planned."""
FEW_COPIES: Final = 16
"""At most so many shared pages are copied while others wait; each takes some operations."""


def run_batch(pool: PagePool, device: Device, batch: Sequence[CachedRequest]) -> BatchResult:
    """Computes requests of one group."""
    begin = perf_counter()
    if batch[0].unfinished is not None:
        return _finish(pool, device, batch)
    append(pool, device, batch)
    after_appends = perf_counter()
    if device.native is None:
        return _run_on_tensors(pool, device, batch, after_appends - begin)
    found, broken = attend_requests(batch, pool, device.native)
    again = {place: batch[place].but_for(sequences, found[place]) for place, sequences in broken.items()}
    compute = perf_counter() - after_appends
    rest = [request for request, result in zip(batch, found, strict=True) if result is None]
    if not rest:
        done = [result for result in found if result is not None]
        calls = device.take_kernel_calls()
        return BatchResult(done, after_appends - begin, compute, 0.0, kernel_calls=calls, again=again)
    others = _run_on_tensors(pool, device, rest, after_appends - begin)
    return others.with_found(found, compute, again)


def launch_batch(pool: PagePool, device: Device, batch: Sequence[CachedRequest]) -> Finish | None:
    """Launches requests of one group, if they take few operations: they append one token at most to each of few caches,
    and the kernel for keys that lie anywhere computes all of them (`scattered.py`). Otherwise None.
    """
    if device.scattering is None or batch[0].unfinished is not None or not _are_few(batch, pool):
        return None
    groups = alike(batch, pool)
    if len(groups) > FEW_CALLS or sum(len(group.places) for group in groups) < len(batch):
        return None
    device.take_kernel_calls()  # forgets those of a launch that failed on this thread
    begin = perf_counter()
    append(pool, device, batch)
    return _launch_on_tensors(pool, device, batch, groups, perf_counter() - begin)


def _are_few(batch: Sequence[CachedRequest], pool: PagePool) -> bool:
    """Whether requests are planned soon and take some dozens of operations."""
    if any(request.problem.kv_length > 1 for request in batch) or sum(len(each.uses) for each in batch) > FEW_CACHES:
        return False
    copies = sum(len(placement.copies) for request in batch for placement in request.placements)
    pages = 0
    for request in batch:
        per_page = pool.tokens_per_page(request.uses[0].cache.shape)
        pages += sum([-(-length // per_page) for length in request.lengths])
    return copies <= FEW_COPIES and pages <= PLANNED_PAGES


def _finish(pool: PagePool, device: Device, batch: Sequence[CachedRequest]) -> BatchResult:
    """Computes what the results of some requests lack, by kernels on torch tensors."""
    begin = perf_counter()
    results = []
    for request in batch:
        assert request.unfinished is not None
        sequences, result = request.unfinished
        _put_anew(pool, device, request, sequences, result)
        results.append(result)
    return BatchResult(results, 0.0, perf_counter() - begin, 0.0, kernel_calls=device.take_kernel_calls())


def _put_anew(
    pool: PagePool, device: Device, request: CachedRequest, sequences: Sequence[int], result: RequestResult
) -> None:
    """Computes some sequences of a request by kernels on torch tensors, and puts them in the place of their results."""
    attended = attend_tensors(read_queries(device, request, sequences), pool, device)
    here = device.fetch([part for each in attended for part in (each.output, each.lse) if part is not None])
    parts = iter(here)
    for place, each in zip(sequences, attended, strict=True):
        anew = replace(each, output=next(parts), lse=None if each.lse is None else next(parts))
        put(result, request.problem, (slice(place, place + 1), slice(None), slice(None)), anew)


def _run_on_tensors(pool: PagePool, device: Device, batch: Sequence[CachedRequest], staged: float) -> BatchResult:
    """Computes requests whose appends have been written, by kernels on torch tensors."""
    groups = [] if device.scattering is None else alike(batch, pool)
    return _launch_on_tensors(pool, device, batch, groups, staged)()


def _launch_on_tensors(
    pool: PagePool, device: Device, batch: Sequence[CachedRequest], groups: Sequence[AlikeRequests], staged: float
) -> Finish:
    """As `_run_on_tensors`, but only launches the requests in groups, each group together. Others are waited for."""
    begin, scattering = perf_counter(), device.scattering
    for group in groups:
        group.stage(device)
    grouped = {place for group in groups for place in group.places}
    rest = [place for place in range(len(batch)) if place not in grouped]
    queries: list[CacheQuery] = []
    for place in rest:
        queries += read_queries(device, batch[place], range(len(batch[place].uses)))
    after_staging = perf_counter()
    computed = []
    for group in groups:
        assert scattering is not None
        computed.append(group.compute(pool, scattering))
    attended = iter(attend_tensors(queries, pool, device) if queries else ())
    parts = [_arranged(batch[place], [next(attended) for _ in batch[place].uses]) for place in rest]
    # The checks that tell which results have a meaning are fetched with them.
    fetch = device.fetching([*itertools.chain(*computed), *tensors_of(parts)])
    kernel_calls = device.take_kernel_calls()

    def finish() -> BatchResult:
        here = iter(fetch())
        after_compute = perf_counter()
        results: list[RequestResult | None] = [None] * len(batch)
        for group, tensors in zip(groups, computed, strict=True):
            for place, result, suspects in group.results([next(here) for _ in tensors]):
                results[place] = result
                if suspects:
                    _put_anew(pool, device, batch[place], suspects, result)
        for place, result in zip(rest, results_of(parts, here), strict=True):
            results[place] = result
        return BatchResult(
            results=[result for result in results if result is not None],
            staging=staged + after_staging - begin,
            compute=after_compute - after_staging,
            fetch=perf_counter() - after_compute,
            kernel_calls=kernel_calls + device.take_kernel_calls(),
        )

    return finish


def _arranged(request: CachedRequest, results: Sequence[AttentionResult]) -> ReplyTensors:
    """The results of a request's sequences as its reply has them."""
    problem = request.problem
    lse = _joined([result.lse for result in results if result.lse is not None]) if problem.return_lse else None
    scores = None
    if problem.return_scores is not None:
        _, longest = request.longest
        found = [result.scores for result in results if result.scores is not None]
        scores = torch.cat([widened(each, longest, problem.return_scores) for each in found])
    output = _joined([result.output for result in results])
    return output.transpose(1, 2) if problem.tokens_first else output, lse, scores


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
