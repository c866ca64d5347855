"""Requests to caches by the native kernel: inputs are read where they were received, results written as replies.

In: requests whose appends have been written. Out: a result each, or None where it has to be computed in another way;
and which sequences of results came out NaN or infinite: only those have to be recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from attnserve import _dtypes
from attnserve_server.caches.page_memory import PageLayout
from attnserve_server.caches.paged import Own, PagedCall, PagedShape, attend_paged, keys_of
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.shape import CacheShape
from attnserve_server.devices.native_compute import NativeCompute
from attnserve_server.native.broken import Broken, broken_of
from attnserve_server.native.payloads import (
    NOTHING_MORE,
    More,
    address,
    aligned,
    applies,
    broadcast_strides,
    memory_of,
    more_of,
    shape_of,
)
from attnserve_server.requests.problem import Problem
from attnserve_server.requests.work import RequestResult

if TYPE_CHECKING:
    from attnserve_server.caches.request import CachedRequest


class Plan(NamedTuple):
    """The calls of a problem: their shape, the strides in bytes from sequence to sequence, and the bytes of a reply.
    `has_more` says that there are masks, biases or the like.
    """

    shape: PagedShape
    steps: Own
    output_bytes: int
    lse_bytes: int
    has_more: bool


def attend_requests(
    requests: Sequence[CachedRequest], pool: PagePool, compute: NativeCompute
) -> tuple[list[RequestResult | None], Broken]:
    """The result of each request, None where the kernel lacks its options; and in which sequences of results it met
    NaN or infinities.
    """
    shape = requests[0].uses[0].cache.shape
    layout = pool.memory.layout(shape)
    results: list[RequestResult | None] = [None] * len(requests)
    calls: list[PagedCall] = []
    owners: list[int] = []
    alive = []  # what calls point to must not be freed before the kernel has read it
    for place, request in enumerate(requests):
        plan = planned(request.problem, shape, layout)
        if plan is not None:
            more = NOTHING_MORE
            if plan.has_more:
                more = more_of(request.problem, request.payloads)
                alive.append(more)
            results[place] = _add(calls, request, plan, more)
            owners += [place] * len(request.uses)
    effort = sum(request.effort for request in requests)
    return results, broken_of(attend_paged(calls, pool, compute, effort) if calls else [], owners)


def _add(calls: list[PagedCall], request: CachedRequest, plan: Plan, more: More) -> RequestResult:
    """Adds a call for each sequence of a request. Returns where the results will be."""
    lse_at = aligned(plan.output_bytes)
    reply, output = memory_of(lse_at + plan.lse_bytes)
    query = address(request.payloads, request.problem.tensors["query"].payload)
    lse = output + lse_at if plan.lse_bytes else 0
    mask, bias, slopes, sinks, _ = more
    steps, shape = plan.steps, plan.shape
    for b, use in enumerate(request.uses):
        own = Own(
            query + b * steps.query,
            output + b * steps.output,
            lse and lse + b * steps.lse,
            mask and mask + b * steps.mask,
            bias and bias + b * steps.bias,
            slopes,
            sinks,
        )
        calls.append(PagedCall(own, shape, use.cache.table(use.layer), request.kv_lengths[b], request.offsets[b]))
    return RequestResult(reply[: plan.output_bytes], reply[lse_at:] if request.problem.return_lse else None, None)


@lru_cache(1024)
def planned(problem: Problem, shape: CacheShape, layout: PageLayout) -> Plan | None:
    """The calls of a problem over pages of that layout; None if the kernel cannot compute them."""
    if not applies(problem):
        return None
    heads, length = problem.query_heads, problem.query_length
    packed = shape_of(problem, length, keys_of(shape, layout))
    mask, bias = (broadcast_strides(problem, name) for name in ("mask", "bias"))
    item, rows = _dtypes.NUMPY[problem.dtype].itemsize, heads * length
    output, lse = rows * shape.value_dim * item, rows * 4 if problem.return_lse else 0
    return Plan(
        shape=PagedShape(packed, layout.tokens_per_page, rows // shape.num_kv_heads),
        steps=Own(rows * shape.head_dim * item, output, lse, mask[0], 4 * bias[0]),
        output_bytes=problem.batch * output,
        lse_bytes=problem.batch * lse,
        has_more=not problem.tensors.keys().isdisjoint(("mask", "bias", "alibi_slopes", "sinks")),
    )
