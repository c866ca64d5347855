"""Queries over caches by the native kernel, where the queries are tensors.

In: queries and the pages that they attend to. Out: a result each, or none where other kernels have to compute it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from attnserve_server.caches.layer import PageTable
from attnserve_server.caches.paged import Own, PagedCall, PagedShape, attend_paged, keys_of
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.query import CacheQuery
from attnserve_server.devices.native_compute import NativeCompute
from attnserve_server.kernels import AttentionResult
from attnserve_server.native.calls import broadcast, shape_of
from attnserve_server.native.dtypes import NATIVE_FROM_TORCH
from attnserve_server.native.library import NAME, supports


def attend_queries(
    queries: Sequence[CacheQuery], pool: PagePool, compute: NativeCompute
) -> list[AttentionResult | None]:
    """The result of each query; None where the kernel lacks its options, or met NaN or infinities."""
    results = [_empty(query) if _applies(query) else None for query in queries]
    calls, places, flops = [], [], 0
    alive = []  # what calls point to must not be freed before the kernel has read it
    for place, (query, result) in enumerate(zip(queries, results, strict=True)):
        if result is not None:
            mask, bias = (
                None if each is None else broadcast(each, (*query.query.shape[:3], query.length))
                for each in (query.mask, query.bias)
            )
            alive.append((mask, bias))
            calls.append(_call(query, mask, bias, result, pool))
            places.append(place)
            flops += 2 * (query.query.numel() + result.output.numel()) * calls[-1].length
    if calls:
        for call in attend_paged(calls, pool, compute, flops):
            results[places[call]] = None
    return results


def _applies(query: CacheQuery) -> bool:
    """Whether the native kernel computes a query."""
    tensor = query.query
    return (
        query.return_scores is None
        and supports(
            query,
            max(query.shape.head_dim, query.shape.value_dim),
            hides=query.mask is not None or query.bias is not None,
            alibi=query.alibi_slopes is not None,
        )
        and tensor.dtype in NATIVE_FROM_TORCH
        and tensor.stride(3) == 1
    )


def _empty(query: CacheQuery) -> AttentionResult:
    """Where the result of a query goes."""
    _, heads, length, _ = query.query.shape
    output = query.query.new_empty(1, heads, length, query.shape.value_dim)
    lse = output.new_empty(1, heads, length, dtype=torch.float32) if query.return_lse else None
    return AttentionResult(output, lse, None, NAME)


def _call(
    query: CacheQuery, mask: torch.Tensor | None, bias: torch.Tensor | None, result: AttentionResult, pool: PagePool
) -> PagedCall:
    """A query with mask and bias [1, Hq, Lq, length]."""
    tensor, shape, layout = query.query, query.shape, pool.memory.layout(query.shape)
    packed = shape_of(query, shape.num_kv_heads, result.output, mask, bias, keys_of(shape, layout))
    rows = tensor.shape[2] * (tensor.shape[1] // shape.num_kv_heads)
    parts = tensor, result.output, result.lse, mask, bias, query.alibi_slopes, query.sinks
    return PagedCall(
        own=Own(*(0 if part is None else part.data_ptr() for part in parts)),
        shape=PagedShape(packed, layout.tokens_per_page, rows),
        table=PageTable(array("i", query.pages)),
        length=query.keys,
        offset=query.offset,
    )
