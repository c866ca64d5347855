"""Queries that attend to whole ranges of tokens, such as steps, over the pages of many caches: one call on a GPU.

In: queries of equal shapes, and which tokens of which pages each attends to; no masks, biases or the like. Out: their
results, and which of these are to be computed in another way.

To the kernel, the keys of a page are a sequence of their own, which is read where it lies. They are read once for all
queries that attend to them, or several times if these are more than the kernel computes together. Results over pages
are merged by their log-sum-exps, up to `MERGED` neighbours at a time. So the number of operations on the device does
not grow with the number of caches. And nothing is read only to see whether keys and values are finite: the results show
that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from attnserve_server.caches.page_memory import STORAGE
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.shape import CacheShape
from attnserve_server.devices.compute import Scattering
from attnserve_server.kernels import ScatteredCall, varlen_cuda
from attnserve_server.kernels.band import Band
from attnserve_server.kernels.ragged import MAX_SEQUENCES

MERGED: Final = 64
"""The most results that are merged at once."""
CALL_BYTES: Final = 1 << 28
"""The most bytes of copies of queries and of results over pages in one call; a single query may have more."""
BLOCK_ROWS: Final = 128
"""The most queries that the kernel computes together. For each sequence of keys, it starts as many blocks as the one
with the most queries needs, even if most blocks are empty. So a part of a page that more queries attend to becomes
several sequences.
"""
MOST_REMEMBERED: Final = 4096
"""Plans for up to so many pages are remembered. The largest takes 100 KB, and half a millisecond to be made."""
_MINUS_INFINITY: Final = np.float32(-np.inf).view(np.int32)
MAX_ROWS: Final = 2**31 - 1
"""The kernel counts rows of keys in int32."""


class Reach(NamedTuple):
    """Tokens from `begin` up to `end`, at least one, of those in `pages`."""

    pages: Sequence[int]
    begin: int
    end: int


class Attended(NamedTuple):
    """output [S, Hq, Lq, D], of any precision; lse [S, Hq, Lq] in float32; `check` [S] in float32: where it is not
    finite, inputs were not, or scores were beyond float32, and the result has no meaning.
    """

    output: torch.Tensor
    lse: torch.Tensor
    check: torch.Tensor


def applies(shape: CacheShape, dtype: torch.dtype, heads: int, length: int, pool: PagePool) -> bool:
    """Whether queries [S, heads, length, D] of a dtype over caches of a shape can be computed so."""
    width, per_page = shape.head_dim, pool.tokens_per_page(shape)
    if dtype not in varlen_cuda.DTYPES or STORAGE[shape.dtype] != dtype or shape.value_dim != width:
        return False
    if width > varlen_cuda.MAX_WIDTH or width % varlen_cuda.ROW_ELEMENTS or shape.num_kv_heads > MAX_SEQUENCES:
        return False
    page_elements, pages = pool.memory.views(shape).key.stride(0), pool.memory.count
    # Results over pages must be no larger than the pages that they are computed from.
    return (
        length > 0
        and heads * length <= shape.num_kv_heads * per_page
        and page_elements % width == 0
        and page_elements // width * pages <= MAX_ROWS
    )


def reach(pages: Sequence[int], per_page: int, band: Band) -> Reach | None:
    """The range that each query of a band attends to; None if there is no key in it, or not all attend to the same."""
    begin, end = band.reach()
    if begin == end or -(-end // per_page) - begin // per_page > MAX_SEQUENCES:
        return None
    if band.query_length > 1 and (band.begin(band.query_length - 1) > begin or band.end(0) < end):
        return None
    return Reach(pages, begin, end)


def attend_ranges(
    query: torch.Tensor,
    reaches: Sequence[Reach],
    scale: float,
    shape: CacheShape,
    pool: PagePool,
    device: Scattering,
    rounded: bool,
) -> Attended:
    """The results of query [S, Hq, Lq, D] over the S ranges of tokens; see `applies`. `rounded`: the output has the
    dtype of the queries; else it may have more bits, for what is yet to be computed with it.
    """
    count, heads, length, width = query.shape
    rows = heads // shape.num_kv_heads * length
    per_page = pool.tokens_per_page(shape)
    # Queries that share a key head become queries of that head, which the kernel reads once for all of them.
    folded = query.reshape(count, shape.num_kv_heads, rows, width).transpose(1, 2).contiguous()
    most = max(1, CALL_BYTES // (2 * heads * length * width * query.element_size()))
    parts = [
        _attend(folded[start:stop], reaches[start:stop], scale, shape, pool, device)
        for start, stop in _calls([-(-end // per_page) - begin // per_page for _, begin, end in reaches], most)
    ]
    output, lse = (each[0] if len(each) == 1 else torch.cat(each) for each in map(list, zip(*parts, strict=True)))
    # A sum is finite only if all its terms are. Every row has a key: an infinite lse means scores beyond float32.
    check = output.sum((1, 2, 3), dtype=torch.float32) + lse.sum((1, 2))
    output = output.transpose(1, 2).reshape(query.shape)
    output = output.to(query.dtype) if rounded else output
    return Attended(output, lse.transpose(1, 2).reshape(query.shape[:3]), check)


def _calls(counts: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Which sequences are computed together: from the first up to the last, exclusive. `counts` are their numbers of
    pages; `most` is the most results over pages in one call.
    """
    if sum(counts) <= MAX_SEQUENCES and 2 * len(counts) * max(counts) <= most:  # nearly always
        yield 0, len(counts)
        return
    start, pages, groups, longest = 0, 0, 0, 0
    for place, own in enumerate(counts):
        pages, groups, longest = pages + own, groups + -(-own // MERGED), max(longest, own)
        # Results are merged in groups of one size, with gaps, which may take more room than the results.
        if place > start and (pages > MAX_SEQUENCES or max(pages, groups * min(MERGED, longest)) > most):
            yield start, place
            start, pages, groups, longest = place, own, -(-own // MERGED), own
    yield start, len(counts)


def _attend(
    query: torch.Tensor,
    reaches: Sequence[Reach],
    scale: float,
    shape: CacheShape,
    pool: PagePool,
    device: Scattering,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [S, R, Hk, D] and lse [S, R, Hk] of query [S, R, Hk, D], by one kernel call."""
    count, rows, heads, width = query.shape
    views = pool.memory.views(shape)
    key, value = views.key, views.value
    page_rows = key.stride(0) // width
    plan = _planned(reaches, pool.tokens_per_page(shape), page_rows, rows)
    query_starts, kv_starts, kv_lengths, sequence, *merged = torch.split(device.send(plan.numbers), plan.parts)
    result = device.attend_scattered(
        ScatteredCall(
            query.view(count, -1).index_select(0, sequence).view(-1, heads, width),
            _scattered(key, page_rows),
            _scattered(value, page_rows),
            query_starts,
            kv_starts,
            kv_lengths,
            plan.longest_query,
            plan.longest_kv,
            scale,
        )
    )
    assert result.lse is not None
    output, lse = result.output.view(-1, rows, heads, width), result.lse.reshape(-1, rows, heads)
    given = iter(merged)
    for merge in plan.merges:
        output, lse = _merged(output, lse, None if merge.all_in_order else (next(given), next(given)), merge.size)
    return output, lse


def _scattered(whole: torch.Tensor, page_rows: int) -> torch.Tensor:
    """All keys or values [pages, Hk, P, D] as rows [U, Hk, D]: token t of page p is the row `p * page_rows + t`."""
    pages, heads, _, width = whole.shape
    beyond = -(-(heads - 1) * whole.stride(1) // width)  # the last rows would have their last heads beyond all pages
    return whole.as_strided((pages * page_rows - beyond, heads, width), (width, whole.stride(1), 1))


class _Merge(NamedTuple):
    """A level of merging, where `size` results at a time become one: all of them, in their order, or those that
    `_chosen` gives.
    """

    size: int
    all_in_order: bool


class _Plan(NamedTuple):
    """What the kernel computes, and how results are merged. There are C parts of pages, and E pairs of a part and a
    query that attends to it.

    `numbers` holds several arrays, one after the other; `parts` are their lengths. They are: where the queries of each
    part begin [C + 1], where each part begins [C + 1], and its length [C], all in rows; the query of each pair [E];
    and, for each merge that is not `all_in_order`, the two arrays of `_chosen`.
    """

    numbers: NDArray[np.int32]
    parts: list[int]
    longest_query: int
    longest_kv: int
    merges: list[_Merge]


def _planned(reaches: Sequence[Reach], per_page: int, page_rows: int, rows: int) -> _Plan:
    """The plan for ranges of tokens, with so many rows of queries each, remembered or made."""
    begins, ends = (np.array(each, np.int64) for each in list(zip(*reaches, strict=True))[1:])
    firsts = (begins // per_page).tolist()
    lasts = (-(-ends // per_page)).tolist()
    taken = zip(reaches, firsts, lasts, strict=True)
    pages = np.concatenate([np.asarray(each.pages[first:last], np.int32) for each, first, last in taken])
    plan = _remembered if len(pages) <= MOST_REMEMBERED else _plan
    most = max(1, BLOCK_ROWS // rows)
    return plan(pages.tobytes(), begins.tobytes(), ends.tobytes(), per_page, page_rows, rows, most)


def _plan(
    of_pages: bytes, of_begins: bytes, of_ends: bytes, per_page: int, page_rows: int, rows: int, most: int
) -> _Plan:
    """The plan for ranges of tokens: `of_pages` are their pages, int32; `of_begins` and `of_ends` are where they begin
    and end, int64. A part has at most `most` queries.
    """
    pages, begins, ends = (
        np.frombuffer(of_pages, np.int32),
        np.frombuffer(of_begins, np.int64),
        np.frombuffer(of_ends, np.int64),
    )
    firsts = begins // per_page
    counts = -(-ends // per_page) - firsts
    sequence = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(pages))
    token = (place - (counts.cumsum() - counts - firsts)[sequence]) * per_page
    low = np.maximum(begins[sequence] - token, 0)
    lengths = np.minimum(ends[sequence] - token, per_page) - low
    starts = pages.astype(np.int64) * page_rows + low
    readers = np.arange(len(pages) + 1)
    # To look whether pages are shared is much faster than to find their order, which is needed only if some are.
    if len(counts) > 1 and np.bincount(pages).max() > 1:
        alike = starts * (per_page + 1) + lengths
        order = np.argsort(alike, kind="stable")
        ordered = alike[order]
        changes = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
        place[order] = np.arange(len(order))
        readers = _divided(np.concatenate(([0], changes, [len(order)])), most)
        starts, lengths = (each[order][readers[:-1]] for each in (starts, lengths))
        sequence = sequence[order]
    levels, sizes = _levels(counts, place)
    chosen = [part for level in levels if level is not None for part in _chosen(level)]
    arrays: list[NDArray[Any]] = [readers * rows, np.append(starts, 0), lengths, sequence, *chosen]
    return _Plan(
        np.concatenate(arrays).astype(np.int32),
        [len(array) for array in arrays],
        int(np.diff(readers).max()) * rows,
        int(lengths.max()),
        [_Merge(size, level is None) for level, size in zip(levels, sizes, strict=True)],
    )


_remembered = lru_cache(maxsize=32)(_plan)
"""Many ask the same caches again and again."""


def _divided(bounds: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Divides adjacent ranges that are longer than `most`. In and out: where each begins, and the last one ends."""
    parts = -(-np.diff(bounds) // most)
    begin, first = np.repeat(bounds[:-1], parts), np.repeat(parts.cumsum() - parts, parts)
    return np.append(begin + (np.arange(len(begin)) - first) * most, bounds[-1])


def _levels(counts: NDArray[np.int64], place: NDArray[np.int64]) -> tuple[list[NDArray[np.int64] | None], list[int]]:
    """How results are merged, level by level, until each sequence has one. Sequence i has `counts[i]` results, and
    `place` says where they are, sequence by sequence. Returns which results are merged, and the sizes, an item for each
    level: [G, size], where `~n` in place of n stands for no result; or None for all results in their order.
    """
    levels: list[NDArray[np.int64] | None] = []
    sizes = []
    while True:
        results, size = len(place), min(MERGED, int(counts.max()))
        groups = -(-counts // size)
        sequence = np.repeat(np.arange(len(counts)), groups)
        within = (np.arange(len(sequence)) - (groups.cumsum() - groups)[sequence])[:, None] * size + np.arange(size)
        there, begin = counts[sequence][:, None], (counts.cumsum() - counts)[sequence][:, None]
        index = place[begin + np.minimum(within, there - 1)]
        index = np.where(within < there, index, ~index)
        in_order = index.size == results and bool((index.ravel() == np.arange(results)).all())
        if size > 1 or not in_order:
            levels.append(None if in_order else index)
            sizes.append(size)
        if int(groups.max()) == 1:
            return levels, sizes
        counts, place = groups, np.arange(len(sequence))


def _chosen(level: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Which results are merged, and what is added to their lses, as bits of float32: nothing, or -inf where there is no
    result.
    """
    index = level.ravel().astype(np.int32)
    absent = index < 0
    return np.where(absent, ~index, index), np.where(absent, _MINUS_INFINITY, np.int32(0))


def _merged(
    output: torch.Tensor, lse: torch.Tensor, chosen: tuple[torch.Tensor, torch.Tensor] | None, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [G, R, Hk, D] and lse [G, R, Hk] in float32, of outputs [E, R, Hk, D] and lses [E, R, Hk] over disjoint
    keys: of those that `_chosen` gives, [G * size], or of all. Where all lses are -inf, both are NaN.

    Sums are the last of cumulative sums, which add one by one. So the bits depend neither on the number of places
    without results nor on that of groups. The order in which `sum`, `softmax` and `logsumexp` add depends on both.
    """
    if chosen is not None:
        at, added = chosen
        output, lse = output.index_select(0, at), lse.index_select(0, at) + added.view(torch.float32)[:, None, None]
    output, lse = (each.view(-1, size, *each.shape[1:]) for each in (output, lse))
    largest = lse.amax(1)
    # Weighted outputs, and behind them the weights, so that both are added together.
    count, elements = len(output), output[0, 0].numel()
    sums = largest.new_empty(count, size, elements + lse[0, 0].numel())
    weighted, weights = sums[..., :elements].view(output.shape), sums[..., elements:].view(lse.shape)
    torch.sub(lse, largest.unsqueeze(1), out=weights).exp_()
    torch.mul(output, weights.unsqueeze(-1), out=weighted)
    sums = sums.cumsum(1)[:, -1]
    whole = sums[:, elements:].view(largest.shape)
    return sums[:, :elements].view(count, *output.shape[2:]) / whole.unsqueeze(-1), whole.log().add_(largest)
