"""Which queries over caches are computed as in `scattered.py`, and their results.

In: queries. Out: a result each, None where it has to be computed in another way.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.query import CacheQuery
from attnserve_server.caches.scattered import Attended, Reach, applies, attend_ranges, reach
from attnserve_server.devices.compute import Scattering
from attnserve_server.kernels import AttentionResult, varlen_cuda
from attnserve_server.kernels.bias import add_sinks
from attnserve_server.requests.scores import is_fusable


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
    suspects = set(device.flagged(~torch.cat([attended.check for attended in each]).isfinite()))
    order = [
        (place, attended, n)
        for (places, _), attended in zip(groups.values(), each, strict=True)
        for n, place in enumerate(places)
    ]
    for number, (place, attended, n) in enumerate(order):
        if number not in suspects:
            query = queries[place]
            part = slice(n, n + 1)
            sinks = None if query.sinks is None else query.sinks[None]
            output, lse = with_sinks(attended.output[part], attended.lse[part], sinks, query.query.dtype)
            found[place] = AttentionResult(output, lse if query.return_lse else None, None, varlen_cuda.NAME)
    return found


def _reach_of(query: CacheQuery, pool: PagePool) -> Reach | None:
    _, heads, length, _ = query.query.shape
    if not is_fusable(query):
        return None
    if query.mask is not None or query.bias is not None or query.alibi_slopes is not None:
        return None
    if not applies(query.shape, query.query.dtype, heads, length, pool):
        return None
    return reach(query.pages, pool.tokens_per_page(query.shape), query.band)


def with_sinks(
    output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [S, Hq, Lq, D] in a dtype and lse [S, Hq, Lq], with sinks [S or 1, Hq], if there are any."""
    if sinks is not None:
        output, lse = add_sinks(output, lse, sinks[:, :, None])
    return output.to(dtype), lse
