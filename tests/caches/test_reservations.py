"""Pages reserved for appends: which gets them, where tokens go, and what is left of an append that is undone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from google.rpc import error_details_pb2
from stores import PAGE_BYTES, SHAPE, append, store_of

from attnserve_server.caches.cache import Cache
from attnserve_server.caches.errors import CacheFull
from attnserve_server.caches.layer import Placement
from attnserve_server.errors import InvalidRequest


def test_a_full_pool_says_how_much_is_free_and_when_to_retry() -> None:
    store = store_of(4)
    cache = store.create(SHAPE, None, 0.0)
    append(store, cache, 11)
    leased = store.create(SHAPE, 2.0, 0.0)
    with pytest.raises(CacheFull) as error:
        append(store, cache, 6, now=0.5)
    assert error.value.metadata == {"bound": "cache_bytes", "free_bytes": "256"}
    details = error.value.details()
    assert isinstance(details[1], error_details_pb2.RetryInfo)
    assert details[1].retry_delay.ToNanoseconds() == 1.5e9, "the lease of the other has so much left"
    assert not leased.gone
    append(store, cache, 5)
    assert store.free_pages == 0
    with pytest.raises(CacheFull):
        append(store, cache, 1)
    store.truncate_one(cache, 15)
    append(store, cache, 1)
    assert cache.length(0) == 16


def test_what_the_pool_can_never_hold_is_no_load() -> None:
    store = store_of(4)
    cache = store.create(SHAPE, None, 0.0)
    with pytest.raises(InvalidRequest, match="at most 1024 bytes"):
        append(store, cache, 17)
    assert cache.users == 0


@pytest.mark.parametrize("length", [0, 1, 3, 4, 11, 16])
@pytest.mark.parametrize("is_shared", [False, True], ids=["its own", "shared"])
def test_what_a_cache_has_decides_nothing_of_what_the_pool_can_never_hold(length: int, is_shared: bool) -> None:
    """Neither room in its last page, nor that this is shared and has to be copied: an empty cache would be told the
    same.
    """
    store = store_of(4)
    cache = store.create(SHAPE, None, 0.0)
    append(store, cache, length)
    if is_shared:
        store.fork_one(cache, None, 0.0)
    if length:
        with pytest.raises(CacheFull):
            append(store, cache, 16)
    with pytest.raises(InvalidRequest, match="found 1280, in whole pages, for 17 tokens"):
        append(store, cache, 17)
    assert (cache.lengths, cache.users) == ([length], 0)


def test_all_or_none_is_promised() -> None:
    store = store_of(5)
    first, second, third = (store.create(SHAPE, None, 0.0) for _ in range(3))
    append(store, third, 1)
    with pytest.raises(CacheFull):
        store.reserve([(first, 0, 12), (second, 0, 8)], 0.0)
    assert (store.reserved_pages, first.users, second.users) == (0, 0, 0)
    reservation = store.reserve([(first, 0, 12), (second, 0, 4)], 0.0)
    assert store.reserved_pages == 4
    with pytest.raises(CacheFull):
        store.reserve([(third, 0, 4)], 0.0)
    store.place(reservation, 0.0)
    assert (first.lengths, second.lengths, store.reserved_pages) == ([12], [4], 0)
    with pytest.raises(ValueError, match="out of turn"):
        store.place(reservation, 0.0)
    store.cancel(reservation)
    store.cancel(reservation)
    assert (store.reserved_pages, store.free_pages) == (0, 0)


def test_no_fewer_tokens_than_none_are_appended() -> None:
    store = store_of(4)
    cache = store.create(SHAPE, None, 0.0)
    with pytest.raises(ValueError, match="cannot be appended"):
        store.reserve([(cache, 0, -1)], 0.0)


def test_those_who_wait_are_promised_the_pages_that_they_fill_together() -> None:
    """Sixteen single tokens fit exactly into four pages of four, however many of them wait; a seventeenth does not."""
    store = store_of(4)
    cache = store.create(SHAPE, None, 0.0)
    waiting = [store.reserve([(cache, 0, 1)], 0.0) for _ in range(16)]
    assert store.reserved_pages == 4
    with pytest.raises(CacheFull) as error:
        store.reserve([(cache, 0, 1)], 0.0)
    assert error.value.metadata == {"bound": "cache_bytes", "free_bytes": "0"}
    store.cancel(waiting.pop(3))
    waiting.append(store.reserve([(cache, 0, 1)], 0.0))
    for reservation in waiting:
        store.place(reservation, 0.0)
        store.cancel(reservation)
    assert (cache.lengths, store.free_pages, store.reserved_pages) == ([16], 0, 0)


def test_what_a_truncation_will_give_back_can_be_promised() -> None:
    """Behind it, as many pages again as the pool holds; but none that it does not free because a fork has them."""
    store = store_of(4)
    cache = store.create(SHAPE, None, 0.0)
    first, cut = store.reserve([(cache, 0, 16)], 0.0), store.wait_to_cut_one(cache, 0)
    second = store.reserve([(cache, 0, 16)], 0.0)
    assert store.reserved_pages == 4
    store.place(first, 0.0)
    store.cancel(first)
    store.truncate_one(cache, 0, cut)
    store.cancel(cut)
    store.place(second, 0.0)
    store.cancel(second)
    assert (cache.lengths, store.free_pages) == ([16], 0)
    waits = [store.wait_to_fork_one(cache), store.wait_to_cut_one(cache, 3)]
    with pytest.raises(CacheFull):
        store.reserve([(cache, 0, 1)], 0.0)
    for reservation in waits:
        store.cancel(reservation)


def test_what_a_truncation_gives_back_is_kept_for_those_who_wait_behind_it() -> None:
    """Others that arrive before their turn do not get it: what has been admitted does not fail for lack of room."""
    store = store_of(4)
    cache, other = (store.create(SHAPE, None, 0.0) for _ in range(2))
    append(store, cache, 16)
    cut, behind = store.wait_to_cut_one(cache, 4), store.reserve([(cache, 0, 12)], 0.0)
    assert store.reserved_pages == 0
    store.truncate_one(cache, 4, cut)
    store.cancel(cut)
    assert store.reserved_pages == 3
    with pytest.raises(CacheFull):
        store.reserve([(other, 0, 1)], 0.0)
    store.place(behind, 0.0)
    store.cancel(behind)
    assert (cache.lengths, other.lengths, store.reserved_pages) == ([16], [0], 0)


def test_who_appends_behind_a_fork_is_promised_the_copy_of_a_page() -> None:
    store = store_of(3)
    cache = store.create(SHAPE, None, 0.0)
    append(store, cache, 3)
    fork = store.wait_to_fork_one(cache)
    behind = store.reserve([(cache, 0, 2)], 0.0)
    assert store.reserved_pages == 2
    forked = store.fork_one(cache, None, 0.0, waited=fork)
    store.cancel(fork)
    assert store.place(behind, 0.0) == [Placement([(0, 1)], [(1, 3, 1), (2, 0, 1)])]
    store.cancel(behind)
    assert (forked.lengths, cache.lengths, store.free_pages) == ([3], [5], 0)


def test_what_was_not_foreseen_gets_what_there_is() -> None:
    """The first append fails, so the fork shares a partial page, which has to be copied: if a page is left, the second
    append gets it; if not, it has no effect.
    """
    for taken_by_others in (1, 2):
        store = store_of(4)
        cache, other = (store.create(SHAPE, None, 0.0) for _ in range(2))
        append(store, cache, 3)
        first, fork = store.reserve([(cache, 0, 1)], 0.0), store.wait_to_fork_one(cache)
        second = store.reserve([(cache, 0, 4)], 0.0)
        assert store.reserved_pages == 1, "behind a full page"
        append(store, other, 4 * taken_by_others)
        store.place(first, 0.0)
        store.undo(first)
        store.cancel(first)
        store.fork_one(cache, None, 0.0, waited=fork)
        store.cancel(fork)
        if taken_by_others == 2:
            with pytest.raises(CacheFull):
                store.place(second, 0.0)
        else:
            store.place(second, 0.0)
        store.cancel(second)
        assert cache.lengths == ([3] if taken_by_others == 2 else [7])
        assert store.reserved_pages == 0


def test_nothing_is_promised_to_what_will_not_happen() -> None:
    """It is a retry of an append that was carried out: recognising it is worth more than a page. If the first one is
    given up after all, there is as much room for the second.
    """
    store = store_of(1)
    cache = store.create(SHAPE, None, 0.0)
    first = store.reserve([(cache, 0, 4)], 0.0)
    again = store.reserve([(cache, 0, 4)], 0.0, foreseen=False)
    assert store.reserved_pages == 1
    store.cancel(first)
    store.place(again, 0.0)
    store.cancel(again)
    assert cache.lengths == [4]


def test_an_operation_out_of_turn_cannot_take_what_was_promised_to_others() -> None:
    store = store_of(4)
    cache = store.create(SHAPE, None, 0.0)
    first, second = (store.reserve([(cache, 0, tokens)], 0.0) for tokens in (3, 1))
    with pytest.raises(ValueError, match="out of turn"):
        store.place(second, 0.0)
    assert cache.length(0) == 0
    store.place(first, 0.0)
    store.place(second, 0.0)
    for reservation in (first, second):
        store.cancel(reservation)
    assert cache.length(0) == 4


def test_tokens_go_where_the_length_says_however_they_come() -> None:
    chunked, single = store_of(8), store_of(8)
    caches = [store.create(SHAPE, None, 0.0) for store in (chunked, single)]
    assert append(chunked, caches[0], 6) == Placement([], [(0, 0, 4), (1, 0, 2)])
    assert append(chunked, caches[0], 5) == Placement([], [(1, 2, 2), (2, 0, 3)])
    assert append(chunked, caches[0], 0) == Placement([], [])
    for _ in range(11):
        append(single, caches[1], 1)
    assert list(caches[0].pages(0)) == list(caches[1].pages(0)) == [0, 1, 2]


def test_a_fork_copies_one_page_when_either_goes_on() -> None:
    store = store_of(8)
    cache = store.create(SHAPE, None, 0.0)
    append(store, cache, 10)
    fork = store.fork_one(cache, 5.0, 0.0)
    assert (store.free_pages, store.shared_bytes_saved, fork.shared_bytes) == (5, 3 * PAGE_BYTES, 3 * PAGE_BYTES)
    placement = append(store, fork, 3)
    assert placement == Placement([(2, fork.pages(0)[2])], [(fork.pages(0)[2], 2, 2), (fork.pages(0)[3], 0, 1)])
    assert append(store, cache, 2) == Placement([], [(2, 2, 2)]), "it alone has the page now"
    assert list(cache.pages(0)) == [0, 1, 2]
    assert (store.shared_bytes_saved, cache.shared_bytes, cache.bytes, store.used_bytes) == (512, 512, 768, 1280)
    store.delete(cache)
    assert (store.free_pages, fork.shared_bytes, store.shared_bytes_saved) == (4, 0, 0)


def test_what_is_known_of_pages_is_known_until_they_change() -> None:
    """Also by a fork; an append that takes pages and gives them back changes them twice."""
    store = store_of(8)
    cache = store.create(SHAPE, None, 0.0)
    append(store, cache, 5)
    first = cache.table(0)
    append(store, cache, 2)
    fork = store.fork_one(cache, None, 0.0)
    assert cache.table(0) is fork.table(0) is first
    reservation = store.reserve([(fork, 0, 1)], 0.0)
    store.place(reservation, 0.0)
    assert fork.table(0).numbers == fork.pages(0) != first.numbers, "it has a copy of the last page"
    store.undo(reservation)
    store.cancel(reservation)
    assert fork.table(0).numbers == fork.pages(0) == first.numbers
    append(store, cache, 2)
    assert cache.table(0).numbers == cache.pages(0) != first.numbers, "another page has come"
    store.truncate_one(cache, 4)
    assert cache.table(0).numbers == cache.pages(0) == first.numbers[:1]
    assert list(first.numbers) == [0, 1], "whoever has it may still read it"


def test_a_page_is_held_until_its_copy_has_been_made() -> None:
    """Two forks copy the same last page: neither may write to it while the other's copy may be under way."""
    store = store_of(6)
    cache = store.create(SHAPE, None, 0.0)
    append(store, cache, 2)
    fork = store.fork_one(cache, None, 0.0)
    reservation = store.reserve([(fork, 0, 1)], 0.0)
    [placement] = store.place(reservation, 0.0)
    assert placement.copies == [(0, fork.pages(0)[0])]
    assert append(store, cache, 1).copies == [(0, cache.pages(0)[0])]
    assert store.free_pages == 3, "nobody has the page, but it is not free"
    store.cancel(reservation)
    assert store.free_pages == 4


def test_undone_appends_leave_nothing() -> None:
    store = store_of(8)
    cache = store.create(SHAPE, None, 0.0)
    append(store, cache, 6)
    fork = store.fork_one(cache, None, 0.0)
    reservation = store.reserve([(fork, 0, 7)], 0.0)
    store.place(reservation, 0.0)
    store.undo(reservation)
    store.undo(reservation)
    assert (list(fork.pages(0)), fork.lengths, store.tokens) == ([0, 1], [6], 12)
    store.cancel(reservation)
    assert (store.free_pages, store.reserved_pages, store.counts.appends, store.counts.appended_tokens) == (6, 0, 1, 6)
    reservation = store.reserve([(fork, 0, 1)], 0.0)
    store.place(reservation, 0.0)
    append(store, fork, 1)
    with pytest.raises(ValueError, match="out of turn"):
        store.undo(reservation)


def test_appends_are_known_while_they_are_there() -> None:
    """A truncation forgets what it cuts off, an undo restores what was known, and a fork begins with nothing."""
    store = store_of(8)
    cache = store.create(replace(SHAPE, layers=2), None, 0.0)

    def known(cache: Cache) -> list[list[int]]:
        return [[append_id for append_id in range(12) if cache.has_append(layer, append_id)] for layer in (0, 1)]

    reservation = store.reserve([(cache, 0, 3), (cache, 1, 2)], 0.0)
    store.place(reservation, 0.0, [7, 8])
    store.cancel(reservation)
    assert known(cache) == [[7], [8]]
    assert known(store.fork_one(cache, None, 0.0)) == [[], []]
    reservation = store.reserve([(cache, 0, 1)], 0.0)
    store.place(reservation, 0.0, [9])
    assert known(cache) == [[7, 9], [8]]
    store.undo(reservation)
    store.cancel(reservation)
    assert known(cache) == [[7], [8]], "as if it had never been"
    append(store, cache, 1, layer=1)
    assert known(cache) == [[7], [8]], "one without an id makes nobody forget"
    reservation = store.reserve([(cache, 1, 1)], 0.0)
    store.place(reservation, 0.0, [10])
    store.cancel(reservation)
    assert known(cache) == [[7], [8, 10]]
    store.truncate_one(cache, 3)
    assert known(cache) == [[7], [8]]
    store.truncate_one(cache, 2)
    assert known(cache) == [[], [8]]


def test_a_layer_remembers_sixteen_appends() -> None:
    store = store_of(8)
    cache = store.create(SHAPE, None, 0.0)
    for append_id in range(1, 19):
        reservation = store.reserve([(cache, 0, 1)], 0.0)
        store.place(reservation, 0.0, [append_id])
        store.cancel(reservation)
    assert [cache.has_append(0, append_id) for append_id in range(20)] == [False] * 3 + [True] * 16 + [False]
