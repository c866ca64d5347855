"""Pages promised to appends: who gets them, where tokens go, and what is left of an append that is taken back."""

from __future__ import annotations

import pytest
from google.rpc import error_details_pb2
from stores import PAGE_BYTES, SHAPE, append, store_of

from attnserve_server.caches.errors import CacheFull
from attnserve_server.caches.shape import CacheShape
from attnserve_server.caches.store import Placement
from attnserve_server.errors import InvalidRequest


def test_a_full_pool_says_how_much_is_free_and_when_to_retry() -> None:
    store = store_of(4)
    cache = store.create(SHAPE, None, 0.0)
    append(store, cache, 11)
    leased = store.create(SHAPE, 2.0, 0.0)
    with pytest.raises(CacheFull) as error:
        append(store, cache, 6, now=0.5)
    assert error.value.metadata == {"free_bytes": "256"}
    details = error.value.details()
    assert isinstance(details[1], error_details_pb2.RetryInfo)
    assert details[1].retry_delay.ToNanoseconds() == 1.5e9, "the lease of the other has so much left"
    assert not leased.gone
    append(store, cache, 5)
    assert store.free_pages == 0
    with pytest.raises(CacheFull):
        append(store, cache, 1)
    store.truncate(cache, 15)
    append(store, cache, 1)
    assert cache.length(0) == 16


def test_what_the_pool_can_never_hold_is_no_load() -> None:
    store = store_of(4)
    cache = store.create(SHAPE, None, 0.0)
    with pytest.raises(InvalidRequest, match="at most 1024 bytes"):
        append(store, cache, 17)
    assert cache.users == 0


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
    store.append(first, 0, 5, reservation)
    assert store.reserved_pages == 2, "it may append in parts"
    store.append(first, 0, 7, reservation)
    store.cancel(reservation)
    store.cancel(reservation)
    assert (store.reserved_pages, store.free_pages) == (0, 1)
    with pytest.raises(ValueError, match="not reserved"):
        store.append(second, 0, 4, reservation)


def test_no_more_is_appended_than_was_promised() -> None:
    store = store_of(4)
    cache = store.create(CacheShape(1, 8, 8, 2, "float32"), None, 0.0)
    reservation = store.reserve([(cache, 0, 3)], 0.0)
    for layer, tokens in ((0, 4), (1, 1), (0, -1)):
        with pytest.raises(ValueError, match="not reserved"):
            store.append(cache, layer, tokens, reservation)
    with pytest.raises(ValueError, match="cannot be appended"):
        store.reserve([(cache, 0, -1)], 0.0)


def test_what_waits_behind_other_operations_is_promised_the_most_that_it_can_take() -> None:
    """The first append fails, then the cache is forked: the second then has to copy a page, and has the room for it."""
    store = store_of(3)
    cache = store.create(SHAPE, None, 0.0)
    append(store, cache, 3)
    first = store.reserve([(cache, 0, 1)], 0.0)
    assert store.reserved_pages == 0, "there is room in the last page"
    second = store.reserve([(cache, 0, 2)], 0.0)
    assert store.reserved_pages == 2
    store.append(cache, 0, 1, first)
    store.undo(first)
    store.cancel(first)
    fork = store.fork(cache, None, 0.0)
    assert store.append(cache, 0, 2, second) == Placement([(0, 1)], [(1, 3, 1), (2, 0, 1)])
    store.cancel(second)
    assert (fork.lengths, cache.lengths, store.free_pages) == ([3], [5], 0)


def test_an_operation_out_of_turn_cannot_take_what_was_promised_to_others() -> None:
    store = store_of(4)
    cache = store.create(SHAPE, None, 0.0)
    append(store, cache, 3)
    reservation = store.reserve([(cache, 0, 1)], 0.0)
    store.fork(cache, None, 0.0)
    with pytest.raises(ValueError, match="out of turn"):
        store.append(cache, 0, 1, reservation)
    assert cache.length(0) == 3


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
    fork = store.fork(cache, 5.0, 0.0)
    assert (store.free_pages, store.shared_bytes_saved, fork.shared_bytes) == (5, 3 * PAGE_BYTES, 3 * PAGE_BYTES)
    placement = append(store, fork, 3)
    assert placement == Placement([(2, fork.pages(0)[2])], [(fork.pages(0)[2], 2, 2), (fork.pages(0)[3], 0, 1)])
    assert append(store, cache, 2) == Placement([], [(2, 2, 2)]), "it alone has the page now"
    assert list(cache.pages(0)) == [0, 1, 2]
    assert (store.shared_bytes_saved, cache.shared_bytes, cache.bytes, store.used_bytes) == (512, 512, 768, 1280)
    store.delete(cache)
    assert (store.free_pages, fork.shared_bytes, store.shared_bytes_saved) == (4, 0, 0)


def test_a_page_is_held_until_its_copy_has_been_made() -> None:
    """Two forks copy the same last page: neither may write to it while the other's copy may be under way."""
    store = store_of(6)
    cache = store.create(SHAPE, None, 0.0)
    append(store, cache, 2)
    fork = store.fork(cache, None, 0.0)
    reservation = store.reserve([(fork, 0, 1)], 0.0)
    assert store.append(fork, 0, 1, reservation).copies == [(0, fork.pages(0)[0])]
    assert append(store, cache, 1).copies == [(0, cache.pages(0)[0])]
    assert store.free_pages == 3, "nobody has the page, but it is not free"
    store.cancel(reservation)
    assert store.free_pages == 4


def test_undone_appends_leave_nothing() -> None:
    store = store_of(8)
    cache = store.create(SHAPE, None, 0.0)
    append(store, cache, 6)
    fork = store.fork(cache, None, 0.0)
    reservation = store.reserve([(fork, 0, 7)], 0.0)
    store.append(fork, 0, 3, reservation)
    store.append(fork, 0, 4, reservation)
    store.undo(reservation)
    store.undo(reservation)
    assert (list(fork.pages(0)), fork.lengths, store.tokens) == ([0, 1], [6], 12)
    store.cancel(reservation)
    assert (store.free_pages, store.reserved_pages, store.counts.appends, store.counts.appended_tokens) == (6, 0, 1, 6)
    reservation = store.reserve([(fork, 0, 1)], 0.0)
    store.append(fork, 0, 1, reservation)
    append(store, fork, 1)
    with pytest.raises(ValueError, match="out of turn"):
        store.undo(reservation)
