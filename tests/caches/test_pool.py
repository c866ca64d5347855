"""Which pages are free, which of those are taken first, and who holds the others."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import extents_of

from attnserve_server.caches.free_extents import FreeExtents
from attnserve_server.caches.pool import PageAllocator


def taken(allocator: PageAllocator, count: int, behind: int | None = None) -> list[int]:
    allocator.reserve(count)
    return allocator.allocate(count, behind)


def test_a_layer_grows_into_the_pages_right_behind_its_last() -> None:
    allocator = PageAllocator(16)
    pages = taken(allocator, 3)
    for _ in range(5):
        pages += taken(allocator, 1, pages[-1])
    assert pages == list(range(8))


def test_layers_that_grow_in_turns_stay_in_one_run_each() -> None:
    allocator = PageAllocator(64)
    layers = [taken(allocator, 1) for _ in range(4)]
    for _ in range(10):
        for pages in layers:
            pages += taken(allocator, 1, pages[-1])
    assert all(after == before + 1 for pages in layers for before, after in pairwise(pages))


def test_a_run_starts_half_way_only_behind_a_layer_that_may_grow() -> None:
    allocator = PageAllocator(20)
    first = taken(allocator, 4)
    assert taken(allocator, 2) == [11, 12], "half of the 14 pages that are left are for the first to grow into"
    assert taken(allocator, 8, first[-1]) == [4, 5, 6, 7, 8, 9, 10, 16]
    allocator.release(range(4, 10))
    assert taken(allocator, 2) == [4, 5], "the layer before it has gone on elsewhere"
    assert taken(allocator, 2) == [7, 8]


def test_no_room_is_left_where_no_layer_ends() -> None:
    allocator = PageAllocator(12)
    allocator.release(taken(allocator, 3))
    taken(allocator, 12)
    allocator.release(range(3, 10))
    assert taken(allocator, 2) == [3, 4], "the layer that ended there is gone"
    allocator.release(range(3))
    allocator.release([3, 4])
    assert taken(allocator, 2) == [0, 1], (
        "the last page of the pool, where a layer ends, does not come before the first"
    )


def test_pages_come_from_the_longest_extents_when_none_is_long_enough() -> None:
    allocator = PageAllocator(12)
    pages = taken(allocator, 12)
    allocator.release([1, 2, 5, 6, 7, 10])
    assert extents_of(allocator._extents) == [range(1, 3), range(5, 8), range(10, 11)]
    assert taken(allocator, 6) == [5, 6, 7, 1, 2, 10]
    assert len(pages) == 12
    assert allocator.free == 0


def test_a_page_is_free_when_its_last_holder_has_let_go() -> None:
    allocator = PageAllocator(4)
    pages = taken(allocator, 3)
    allocator.share(pages[:2])
    assert [allocator.is_shared(page) for page in pages] == [True, True, False]
    assert (allocator.used, allocator.saved, allocator.shared(pages)) == (3, 2, 2)
    allocator.release(pages)
    assert (allocator.used, allocator.saved, allocator.free) == (2, 0, 2)
    allocator.release(pages[:2])
    assert extents_of(allocator._extents) == [range(4)]
    assert not allocator._holders.any()


def test_what_is_promised_is_not_promised_again() -> None:
    allocator = PageAllocator(4)
    allocator.reserve(3)
    with pytest.raises(ValueError, match="2 pages cannot be promised: 1 are free"):
        allocator.reserve(2)
    with pytest.raises(ValueError, match="4 pages cannot be promised"):
        allocator.allocate(4, None)
    allocator.reserve(-2)
    assert (allocator.available, allocator.free) == (3, 4)
    assert len(allocator.allocate(1, None)) == 1
    assert (allocator.available, allocator.free, allocator.reserved) == (3, 3, 0)


def test_a_pool_without_pages_has_none() -> None:
    allocator = PageAllocator(0)
    assert (allocator.free, allocator.used, allocator.allocate(0, None)) == (0, 0, [])


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 40)), max_size=80))
def test_extents_are_what_a_set_of_free_pages_says(steps: list[tuple[bool, int, int]]) -> None:
    """Against a set: pages are freed in any order and shape; extents never overlap, touch or lose a page."""
    extents, free, held = FreeExtents(40), set(range(40)), list[int]()
    for gives, count, place in steps:
        if gives and held:
            page = held.pop(place % len(held))
            extents.add(page, page + 1)
            free.add(page)
        elif free:
            longest = extents.longest()
            assert len(longest) == max(map(len, runs(free)))
            start = longest.start + place % len(longest)
            pages = extents.take(longest, start, min(count, longest.stop - start))
            assert free.issuperset(pages)
            free.difference_update(pages)
            held.extend(pages)
        assert extents_of(extents) == runs(free)
        assert extents.pages == len(free)
        assert all(extents.beginning_at(run.start) == run for run in runs(free))
        assert not any(extents.beginning_at(page) for page in held)


def test_old_entries_are_forgotten() -> None:
    """The heap of lengths stays in proportion to the extents, however often they have changed."""
    extents = FreeExtents(10_000)
    for page in range(9_999):
        extents.take(extents.beginning_at(page), page, 1)
    assert len(extents._by_length) < 100


def test_the_longest_extent_is_found_when_old_entries_have_been_forgotten() -> None:
    extents = FreeExtents(100)
    extents.take(range(100), 60, 1)
    for _ in range(200):
        extents.take(range(61, 100), 99, 1)
        extents.add(99, 100)
        assert extents.longest() == range(60)


def runs(pages: set[int]) -> list[range]:
    """The runs of adjacent pages."""
    ordered = np.array(sorted(pages), np.int64)
    parts = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    return [range(int(part[0]), int(part[-1]) + 1) for part in parts if part.size]
