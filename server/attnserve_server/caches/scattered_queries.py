"""Which requests and queries over caches are computed as in `scattered.py`, and their results.

In: requests of one batch, or queries. Out: a result each, None where it has to be computed in another way.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.query import CacheQuery
from attnserve_server.caches.scattered import Attended, Reach, attend_ranges, computes, reach
from attnserve_server.caches.shape import CacheShape
from attnserve_server.devices.compute import Scattering
from attnserve_server.devices.staging import TORCH
from attnserve_server.kernels import AttentionResult, varlen_cuda
from attnserve_server.kernels.bias import add_sinks
from attnserve_server.kernels.fused import is_fusable
from attnserve_server.kernels.math import needs_float64

if TYPE_CHECKING:
    from attnserve_server.caches.request import CachedRequest
    from attnserve_server.requests.problem import Problem


class Alike(NamedTuple):
    """Requests, by their places in a batch, whose queries are computed together."""

    places: list[int]
    reaches: list[Reach]


def alike(batch: Sequence[CachedRequest], pool: PagePool) -> list[Alike]:
    """The requests of a batch that can be computed so."""
    found: dict[Hashable, Alike] = {}
    for place, request in enumerate(batch):
        problem, shape = request.problem, request.uses[0].cache.shape
        reaches = _reaches(request, pool) if _is_plain(problem, shape, pool) else None
        if reaches is not None:
            sinks = "sinks" in problem.tensors
            key = problem.dtype, problem.query_heads, problem.query_length, problem.scale, shape, sinks
            group = found.setdefault(key, Alike([], []))
            group.places.append(place)
            group.reaches.extend(reaches)
    return list(found.values())


def attend_group(
    group: Alike, query: torch.Tensor, batch: Sequence[CachedRequest], pool: PagePool, device: Scattering
) -> Iterator[tuple[int, Attended]]:
    """The place and the results of each request of a group, without sinks; `query` is that of all their sequences."""
    problem, shape = batch[group.places[0]].problem, batch[group.places[0]].uses[0].cache.shape
    rounded = "sinks" not in problem.tensors
    attended = attend_ranges(query, group.reaches, problem.scale, shape, pool, device, rounded)
    counts = [len(batch[place].uses) for place in group.places]
    for place, *parts in zip(group.places, *(torch.split(part, counts) for part in attended), strict=True):
        yield place, Attended(*parts)


def _is_plain(problem: Problem, shape: CacheShape, pool: PagePool) -> bool:
    if not is_fusable(problem) or problem.tensors.keys() & {"mask", "bias", "alibi_slopes"}:
        return False
    if needs_float64(problem.scale, problem.softcap):
        return False
    return computes(shape, TORCH[problem.dtype], problem.query_heads, problem.query_length, pool)


def _reaches(request: CachedRequest, pool: PagePool) -> list[Reach] | None:
    """The range of each sequence; None if one of them has none."""
    problem, reaches = request.problem, []
    per_page = pool.tokens_per_page(request.uses[0].cache.shape)
    for use, keys, offset in zip(request.uses, request.kv_lengths, request.offsets, strict=True):
        pages = use.cache.table(use.layer).numbers
        own = reach(pages, per_page, problem.query_length, keys, offset, problem.causal, problem.window)
        if own is None:
            return None
        reaches.append(own)
    return reaches


def attend_alike(queries: Sequence[CacheQuery], pool: PagePool, device: Scattering) -> list[AttentionResult | None]:
    """The result of each query; None where it has to be computed in another way, as where inputs are not finite."""
    groups: dict[Hashable, tuple[list[int], list[Reach]]] = {}
    for place, query in enumerate(queries):
        own = _reach_of(query, pool)
        if own is not None:
            key = query.shape, query.query.shape, query.scale, query.sinks is None
            places, reaches = groups.setdefault(key, ([], []))
            places.append(place)
            reaches.append(own)
    found: list[AttentionResult | None] = [None] * len(queries)
    each: list[Attended] = []
    for places, reaches in groups.values():
        first = queries[places[0]]
        tensor = first.query if len(places) == 1 else torch.cat([queries[place].query for place in places])
        each.append(attend_ranges(tensor, reaches, first.scale, first.shape, pool, device, first.sinks is None))
    if not each:
        return found
    suspects = set(device.flagged(torch.cat([attended.suspect for attended in each])))
    order = [
        (place, attended, n)
        for (places, _), attended in zip(groups.values(), each, strict=True)
        for n, place in enumerate(places)
    ]
    for number, (place, attended, n) in enumerate(order):
        if number not in suspects:
            query = queries[place]
            part = slice(n, n + 1)
            output, lse = with_sinks(attended.output[part], attended.lse[part], query.sinks, query.query.dtype)
            found[place] = AttentionResult(output, lse if query.return_lse else None, None, varlen_cuda.NAME)
    return found


def _reach_of(query: CacheQuery, pool: PagePool) -> Reach | None:
    _, heads, length, _ = query.query.shape
    if not is_fusable(query):
        return None
    if query.mask is not None or query.bias is not None or query.alibi_slopes is not None:
        return None
    if needs_float64(query.scale, query.softcap) or not computes(query.shape, query.query.dtype, heads, length, pool):
        return None
    keys = query.length if query.kv_length is None else query.kv_length
    per_page = pool.tokens_per_page(query.shape)
    return reach(query.pages, per_page, length, keys, query.offset, query.causal, query.window)


def with_sinks(
    output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [S, Hq, Lq, D] in a dtype and lse [S, Hq, Lq], with sinks [Hq], if there are any."""
    if sinks is not None:
        output, lse = add_sinks(output, lse, sinks[None, :, None])
    return output.to(dtype), lse
