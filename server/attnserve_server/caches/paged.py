"""Calls of the native kernel over the pages of caches: keys and values are read there, wherever the pages lie.

In: where queries are and results go, and the pages that they attend to. Out: which results are not finite. First pages
that several calls have in common are read once for all of these; each result has the same bits as alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from attnserve_server.caches.layer import PageTable
from attnserve_server.caches.page_memory import STORAGE, PageLayout
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.shape import CacheShape
from attnserve_server.caches.sharing import Group, groups
from attnserve_server.devices.native_compute import NativeCompute
from attnserve_server.native.dtypes import NATIVE_FROM_TORCH
from attnserve_server.native.library import Keys, Strides, pack, with_keys

GROUP_ROWS: Final = 128
"""The most rows of queries computed together over a block of keys: more would save little, and one thread computes them
all.
"""


class Own(NamedTuple):
    """The addresses of a call's own tensors, 0 where it has none. As in the library."""

    query: int
    output: int
    lse: int = 0
    mask: int = 0
    bias: int = 0
    alibi_slopes: int = 0
    sinks: int = 0


class PagedShape(NamedTuple):
    """Equal for calls that are alike: a shape as the library packs it, whatever its lengths."""

    packed: bytes
    tokens_per_page: int
    rows: int
    """Rows of queries that read one key head."""


class PagedCall(NamedTuple):
    """Queries, the first at position `offset`, over the first `length` tokens that pages hold."""

    own: Own
    shape: PagedShape
    table: PageTable
    length: int
    offset: int


def keys_of(shape: CacheShape, layout: PageLayout) -> Keys:
    """How keys and values lie in pages; each call adds how many there are, and the position of its queries."""
    dtype = NATIVE_FROM_TORCH[STORAGE[shape.dtype]]
    return Keys(0, 0, dtype, layout.tokens_per_page, Strides(*layout.key), Strides(*layout.value))


def attend_paged(calls: Sequence[PagedCall], pool: PagePool, compute: NativeCompute, flops: int) -> list[int]:
    """Computes calls. Returns the places of those whose results are not finite, and thus meaningless."""
    packed, order = packed_calls(calls, pool)
    return [order[place] for place in compute.attend(packed, flops)]


def packed_calls(calls: Sequence[PagedCall], pool: PagePool) -> tuple[bytearray, list[int]]:
    """Calls as the library reads them, in an order in which those that share pages are adjacent; and the places that
    they had before, in this order.
    """
    if len(calls) == 1:
        return bytearray(_packed(calls[0], pool, 0)), [0]
    packed, order = bytearray(), []
    for members, shared in _grouped(calls, pool):
        before = 0
        for place in members:
            packed += _packed(calls[place], pool, before)
            before = shared
        order += members
    return packed, order


def _packed(call: PagedCall, pool: PagePool, shared: int) -> bytes:
    """A call whose first `shared` pages are also those of the call before it."""
    (query, output, lse, mask, bias, slopes, sinks), shape, table, length, offset = call
    key, value, _ = pool.memory.addresses(table)
    return pack(
        (query, key, value, output, lse, mask, bias, slopes, sinks), with_keys(shape.packed, length, offset), shared
    )


def _grouped(calls: Sequence[PagedCall], pool: PagePool) -> list[Group]:
    """All calls, by their places, in groups that read the same first pages together."""
    pages = [np.asarray(call.table.numbers)[: -(-call.length // call.shape.tokens_per_page)] for call in calls]
    alike: dict[tuple[PagedShape, int], list[int]] = {}
    found = []
    for place, call in enumerate(calls):
        if call.length >= call.shape.tokens_per_page and 2 * call.shape.rows <= GROUP_ROWS:
            alike.setdefault((call.shape, int(pages[place][0])), []).append(place)
        else:
            found.append(Group([place], 0))
    for (shape, _), members in alike.items():
        if len(members) == 1:
            found.append(Group(members, 0))
            continue
        # Only pages known to be finite are shared: otherwise, whether a result is finite would depend on the other
        # calls.
        full = [pages[place][: calls[place].length // shape.tokens_per_page] for place in members]
        shareable = [own[: pool.finite.leading(own)] for own in full]
        most = GROUP_ROWS // max(1, shape.rows)
        found += [Group([members[n] for n in own], shared) for own, shared in groups(shareable, most)]
    return found
