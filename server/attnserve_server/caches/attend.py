"""Attention over caches: by the native kernel where there is one that can, else by few calls of other kernels.

In: queries and the pages they attend to. Out: a result each. Which call computes what follows from a query and the
length of its cache alone (see `parts.py`). Results of calls are merged query by query, in the order of the keys. So on
a CPU, the bits of a result depend neither on where pages lie nor on the other queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch

from attnserve_server.caches.native_queries import attend_queries
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.parts import Part
from attnserve_server.caches.query import CacheQuery, Job, QueryAttention
from attnserve_server.caches.scattered_queries import attend_alike
from attnserve_server.caches.step import Step
from attnserve_server.devices.compute import Compute
from attnserve_server.kernels import AttentionResult
from attnserve_server.requests.work import completed

WAVE_BYTES = 1 << 28
"""The most bytes of copies and partial results of groups that run together; a single group may have more."""


def attend_cache(queries: Sequence[CacheQuery], pool: PagePool, compute: Compute) -> list[AttentionResult]:
    """The result of each query: output [1, Hq, Lq, Dv]; lse [1, Hq, Lq] and scores [1, Hq, Lq, length] if asked for.

    Rows with nothing to attend have output 0 and lse -inf.
    """
    if compute.native is None:
        return attend_tensors(queries, pool, compute)
    found = attend_queries(queries, pool, compute.native)
    return completed(queries, found, lambda others: attend_tensors(others, pool, compute))


def attend_tensors(
    queries: Sequence[CacheQuery], pool: PagePool, compute: Compute, fold: bool | None = None
) -> list[AttentionResult]:
    """The results of queries, as those of `attend_cache`, without the native kernel.

    Where there is a kernel for keys that lie anywhere, it takes what it can (see `scattered.py`). The kernels of
    `Attend` compute the others. With `fold`, the default on any device but a CPU, they compute those of few rows page
    by page, and all those over the same pages in one call: the bits then depend on how many queries there are. Without
    `fold`, those of few rows are computed as in `step.py`.
    """
    scattering = compute.scattering
    if scattering is not None and len(queries):
        found = attend_alike(queries, pool, scattering)
        return completed(queries, found, lambda others: _attend_each(others, pool, compute, True))
    return _attend_each(queries, pool, compute, compute.torch_device.type != "cpu" if fold is None else fold)


def _attend_each(queries: Sequence[CacheQuery], pool: PagePool, compute: Compute, fold: bool) -> list[AttentionResult]:
    """The results of queries by steps, where there are any (see `step.py`), and by the kernels of `Attend`."""
    steps = [None if fold else Step.of(query, pool) for query in queries]
    stepped = _run_steps([step for step in steps if step is not None], compute) if any(steps) else iter(())
    found = [None if step is None else next(stepped) for step in steps]
    doubted = {
        id(query)
        for query, step, result in zip(queries, steps, found, strict=True)
        if step is not None and result is None
    }
    return completed(queries, found, lambda others: _attend_all(others, pool, compute, fold, doubted))


def _attend_all(
    queries: Sequence[CacheQuery], pool: PagePool, compute: Compute, fold: bool, doubted: Set[int]
) -> list[AttentionResult]:
    """The results of queries by the kernels of `Attend`: once more in float64 where scores have left the range of
    float32, since infinite lses cannot be merged. So may those of queries whose ids are `doubted`, however finite.
    """
    running = [QueryAttention.of(query, pool, compute.torch_device, fold) for query in queries]
    _run_waves(running, pool, compute)
    again = {
        place: attention.in_float64()
        for place, attention in enumerate(running)
        if (attention.is_suspect or id(queries[place]) in doubted) and not attention.stays_in_float32(pool)
    }
    _run_waves(list(again.values()), pool, compute)
    return [again.get(place, attention).result() for place, attention in enumerate(running)]


def _run_waves(running: Sequence[QueryAttention], pool: PagePool, compute: Compute) -> None:
    """Computes all groups of some queries."""
    for wave in _waves(running):
        _run(wave, pool, compute)


def _run_steps(steps: Sequence[Step], compute: Compute) -> Iterator[AttentionResult | None]:
    """The results of steps: those over the same pages run one after the other, while the processor caches these."""
    each = [list(step.computations()) for step in steps]
    every = [computation for of_step in each for computation in of_step]
    order = sorted(range(len(every)), key=lambda place: every[place][0])
    computed = compute.run_each([every[place][1] for place in order], sum(step.flops for step in steps))
    results = iter([result for _, result in sorted(zip(order, computed, strict=True), key=lambda pair: pair[0])])
    for step, of_step in zip(steps, each, strict=True):
        yield step.take([next(results) for _ in of_step])


_Wave: TypeAlias = list[tuple[QueryAttention, list[Part]]]


def _waves(running: Sequence[QueryAttention]) -> Iterator[_Wave]:
    """Groups in their order, as many at a time as WAVE_BYTES allows."""
    wave: _Wave = []
    total = 0
    for attention in running:
        for group in attention.groups:
            size = attention.bytes(group)
            if wave and total + size > WAVE_BYTES:
                yield wave
                wave, total = [], 0
            wave.append((attention, group))
            total += size
    if wave:
        yield wave


def _run(wave: _Wave, pool: PagePool, compute: Compute) -> None:
    """Computes groups: one list of calls, in the order of their pages."""
    flops = sum(attention.flops(part) for attention, group in wave for part in group)
    jobs: list[Job] = []
    takers: list[list[int]] = []
    for shared in _sharing(wave) if len(wave) > 1 else ():
        own = _shared_jobs(shared, wave, pool)
        jobs += own
        takers += [shared.members] * len(own)
        for place in shared.members:
            wave[place] = wave[place][0], shared.rest(wave[place][1])
    for place, (attention, group) in enumerate(wave):
        for part in group:
            own = list(attention.jobs(part, pool))
            jobs += own
            takers += [[place]] * len(own)

    order = sorted(range(len(jobs)), key=lambda place: jobs[place].first_page)
    computed = compute.attend([jobs[place].call for place in order], flops)
    results = [result for _, result in sorted(zip(order, computed, strict=True), key=lambda pair: pair[0])]
    taken: list[list[AttentionResult]] = [[] for _ in wave]
    for job, result, places in zip(jobs, results, takers, strict=True):
        if len(places) == 1:
            taken[places[0]].append(job.completed(result))
            continue
        lengths = [wave[place][0].tensor.shape[2] for place in places]
        for place, own_rows in zip(places, _unfolded(result, lengths), strict=True):
            taken[place].append(own_rows)
    for (attention, _), own_results in zip(wave, taken, strict=True):
        attention.take(own_results)


class _Shared(NamedTuple):
    """Groups, by their places in a wave, whose whole pages from token `begin` up to `end` are the same."""

    members: list[int]
    begin: int
    end: int

    def rest(self, group: list[Part]) -> list[Part]:
        """The parts of a group that are not shared."""
        parts = [part._replace(begin=self.end) if part.by_page else part for part in group]
        return [part for part in parts if part.begin < part.end]


def _sharing(wave: _Wave) -> list[_Shared]:
    """Sets of two or more groups that can be one call over the same pages, which are computed page by page."""
    alike: dict[tuple[object, int, int], list[tuple[int, Part]]] = {}
    for place, (attention, group) in enumerate(wave):
        company = attention.shares_with
        for part in group:
            if part.by_page and company is not None:
                page = attention.query.pages[part.begin // attention.per_page]
                alike.setdefault((company, part.begin, page), []).append((place, part))
    sharing = []
    for members in alike.values():
        if len(members) > 1:
            begin, places = members[0][1].begin, [place for place, _ in members]
            per_page = wave[places[0]][0].per_page
            pages = [wave[place][0].query.pages[begin // per_page : part.end // per_page] for place, part in members]
            sharing.append(_Shared(places, begin, begin + per_page * _common(pages)))
    return sharing


def _common(sequences: Sequence[Sequence[int]]) -> int:
    """The length of the longest common prefix of sequences: that of the least and the greatest of them."""
    least, greatest = min(map(list, sequences)), max(map(list, sequences))
    differing = (place for place, (one, other) in enumerate(zip(least, greatest, strict=False)) if one != other)
    return next(differing, len(least))  # where none differs, the least is the shorter


def _shared_jobs(shared: _Shared, wave: _Wave, pool: PagePool) -> list[Job]:
    """The calls over shared pages, with the queries of all members."""
    attention = wave[shared.members[0]][0]
    queries = torch.cat([wave[place][0].tensor for place in shared.members], 2)
    together = replace(attention, tensor=queries)
    return list(together.jobs(Part(shared.begin, shared.end, True), pool))


def _unfolded(result: AttentionResult, lengths: list[int]) -> Iterator[AttentionResult]:
    """Splits the result of a shared call into one for each group, which has so many of the queries."""
    assert result.lse is not None
    outputs, lses = torch.split(result.output, lengths, 2), torch.split(result.lse, lengths, 2)
    for output, lse in zip(outputs, lses, strict=True):
        yield AttentionResult(output, lse, None, result.kernel)
