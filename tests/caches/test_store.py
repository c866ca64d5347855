"""Which caches exist: by name and owner, for how long, how many; and that longer ones cost no more to operate on."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import FrameType

import pytest
from stores import SHAPE, append, extents_of, store_of

from attnserve_server.caches.cache import Cache
from attnserve_server.caches.errors import CacheFull
from attnserve_server.caches.shape import CacheShape
from attnserve_server.errors import InvalidRequest, NotFound, Overloaded


def test_pages_must_be_aligned() -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        store_of(10, 1, page_bytes=100)


def test_names_are_long_and_never_the_same() -> None:
    store = store_of(0, max_caches=1000)
    names = {store.create(SHAPE, None, 0.0).name for _ in range(1000)}
    assert len(names) == 1000
    assert min(map(len, names)) >= 22, "at least 128 random bits"


def test_a_cache_is_its_owners() -> None:
    store = store_of(4)
    mine, yours = store.create(SHAPE, None, 0.0, "me"), store.create(SHAPE, None, 0.0, "you")
    assert store.get(mine.name, 0.0, "me") is mine
    assert store.list("me", 0.0) == [mine]
    assert store.list(None, 0.0) == []
    for owner in ("you", None):
        with pytest.raises(NotFound):
            store.get(mine.name, 0.0, owner)
    fork = store.fork_one(yours, None, 1.0)
    assert fork.owner == "you"
    assert store.list("you", 1.0) == [yours, fork]


def test_use_renews_a_lease_and_nothing_else_does() -> None:
    store = store_of(4)
    cache = store.create(SHAPE, 10.0, 0.0)
    store.get(cache.name, 9.0)
    store.list(None, 9.0)
    assert cache.expires == 10.0
    store.hold(cache, 9.0)
    assert store.get(cache.name, 100.0) is cache, "it is in use"
    store.release(cache, 100.0)
    assert store.get(cache.name, 109.0) is cache
    with pytest.raises(NotFound):
        store.get(cache.name, 110.0)
    assert store.counts.evictions == {"lease": 1, "pages": 0, "caches": 0}
    with pytest.raises(NotFound):
        store.hold(cache, 110.0)
    with pytest.raises(NotFound):
        store.reserve([(cache, 0, 1)], 110.0)
    with pytest.raises(NotFound):
        store.fork_one(cache, None, 110.0)


def test_a_renewed_lease_does_not_hide_one_that_has_ended() -> None:
    store = store_of(2)
    renewed, left = store.create(SHAPE, 10.0, 0.0), store.create(SHAPE, 12.0, 0.0)
    append(store, left, 8)
    store.hold(renewed, 9.0)
    store.release(renewed, 9.0)
    append(store, renewed, 8, now=12.0)
    assert left.gone


def test_a_cache_without_a_ttl_stays() -> None:
    store = store_of(4)
    cache = store.create(SHAPE, None, 0.0)
    assert store.list(None, 1e12) == [cache]


def test_expired_caches_make_room_oldest_first_and_only_as_far_as_needed() -> None:
    store = store_of(6)
    caches = [store.create(SHAPE, ttl, 0.0) for ttl in (30.0, 10.0, 20.0, 90.0)]
    for cache in caches[:3]:
        append(store, cache, 8)
    held = caches[1]
    store.hold(held, 5.0)
    new = store.create(SHAPE, None, 50.0)
    append(store, new, 8, now=50.0)
    assert caches[2].gone
    assert not caches[0].gone, "the other had expired before it"
    assert not held.gone, "its lease has ended as well, but it is in use"
    append(store, new, 8, now=50.0)
    assert caches[0].gone
    with pytest.raises(CacheFull):
        append(store, new, 1, now=50.0)
    assert not held.gone
    store.release(held, 50.0)
    append(store, new, 4, now=60.0)
    assert held.gone
    assert store.counts.evictions == {"lease": 0, "pages": 3, "caches": 0}
    assert store.list(None, 60.0) == [caches[3], new]


def test_there_are_as_many_caches_as_there_may_be() -> None:
    store = store_of(4, max_caches=2)
    lasting = store.create(SHAPE, None, 0.0)
    leased = store.create(SHAPE, 3.0, 0.0)
    for another in (lambda: store.create(SHAPE, None, 1.0), lambda: store.fork_one(lasting, None, 1.0)):
        with pytest.raises(Overloaded) as error:
            another()
        assert (error.value.bound, error.value.retry_delay) == ("caches", 2.0), "the lease has so much left"
    fork = store.fork_one(lasting, None, 3.0)
    assert leased.gone
    assert store.list(None, 3.0) == [lasting, fork]
    assert store.counts.evictions["caches"] == 1


def test_a_named_caller_leaves_room_for_another() -> None:
    """The first takes all that it can get, then the second; each still gets one when the other gives some up."""
    store = store_of(4, max_caches=100)
    first: list[Cache] = []
    second: list[Cache] = []
    for owner, caches in (("first", first), ("second", second)):

        def take_all(owner: str = owner, caches: list[Cache] = caches) -> None:
            while True:
                forks = len(caches) % 2
                made = store.fork_one(caches[0], None, 0.0) if forks else store.create(SHAPE, None, 0.0, owner)
                caches.append(made)

        with pytest.raises(Overloaded, match="its share") as error:
            take_all()
        assert error.value.bound == "caches"
    assert (len(first), len(second)) == (89, 9)
    for cache in first[:50]:
        store.delete(cache)
    assert store.create(SHAPE, None, 0.0, "first").owner == "first"
    assert store.create(SHAPE, None, 0.0, "second").owner == "second"
    leased = store_of(4, max_caches=10)
    for _ in range(9):
        leased.create(SHAPE, 1.0, 0.0, "first")
    assert len(leased) == 9
    with pytest.raises(Overloaded, match="its share"):
        leased.create(SHAPE, 1.0, 0.5, "first")
    assert leased.create(SHAPE, 1.0, 1.0, "first"), "what has expired makes room"


def test_callers_without_a_name_share_all_room() -> None:
    store = store_of(4, max_caches=10)
    for _ in range(10):
        store.create(SHAPE, None, 0.0)
    with pytest.raises(Overloaded) as error:
        store.create(SHAPE, None, 0.0)
    assert error.value.reason == "OVERLOADED"


def test_a_fork_does_not_take_the_room_of_what_it_forks() -> None:
    store = store_of(4, max_caches=1)
    cache = store.create(SHAPE, 3.0, 0.0)
    with pytest.raises(Overloaded):
        store.fork_one(cache, None, 2.0)
    with pytest.raises(Overloaded):
        store.fork_one(cache, None, 100.0)
    assert not cache.gone


def test_a_deleted_cache_is_there_until_nothing_holds_it() -> None:
    store = store_of(4)
    cache = store.create(SHAPE, None, 0.0)
    append(store, cache, 9)
    reservation = store.reserve([(cache, 0, 1)], 0.0)
    store.hold(cache, 0.0)
    store.delete(cache)
    store.delete(cache)
    with pytest.raises(NotFound):
        store.get(cache.name, 0.0)
    store.place(reservation, 0.0)
    assert cache.length(0) == 10
    store.cancel(reservation)
    assert store.free_pages == 1
    store.release(cache, 0.0)
    assert (store.free_pages, store.tokens, len(store), store.counts.deletions) == (4, 0, 0, 1)


def test_truncation_cuts_every_layer_off() -> None:
    store = store_of(16)
    cache = store.create(CacheShape(1, 8, 8, 3, "float32"), None, 0.0)
    for layer, tokens in enumerate((9, 2, 5)):
        append(store, cache, tokens, layer)
    with pytest.raises(InvalidRequest, match="at most 9"):
        store.truncate_one(cache, 10)
    store.truncate_one(cache, 4)
    assert cache.lengths == [4, 2, 4]
    assert [len(cache.pages(layer)) for layer in range(3)] == [1, 1, 1]
    assert (store.tokens, store.free_pages, store.counts.truncations) == (10, 13, 1)
    store.truncate_one(cache, 0)
    assert (cache.lengths, cache.bytes, store.free_pages) == ([0, 0, 0], 0, 16)


def calls_of(operation: Callable[[], object]) -> int:
    """How many functions an operation calls, in Python and in C."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        operation()
    finally:
        sys.setprofile(None)
    return count


def test_100_000_appends_take_as_long_at_the_end_as_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the functions called nor the pages looked at grow with the length."""
    store = store_of(25_000)
    cache = store.create(SHAPE, None, 0.0)
    touched = 0

    def thousand() -> None:
        for _ in range(1000):
            append(store, cache, 1)

    def watched(pages: list[int]) -> None:
        nonlocal touched
        touched += len(pages)
        release(pages)

    first = calls_of(thousand)
    release = store._allocator.release
    monkeypatch.setattr(store._allocator, "release", watched)
    for _ in range(98):
        thousand()
    last = calls_of(thousand)
    assert cache.length(0) == 100_000
    assert last < 1.1 * first
    assert touched == 0, "appending lets go of nothing"
    assert all(after == before + 1 for before, after in pairwise(cache.pages(0)))


def test_a_long_cache_is_forked_in_as_many_steps_as_an_empty_one() -> None:
    store = store_of(25_000)
    empty, long = (store.create(SHAPE, None, 0.0) for _ in range(2))
    append(store, long, 100_000)
    assert calls_of(lambda: store.fork_one(long, None, 0.0)) == calls_of(lambda: store.fork_one(empty, None, 0.0))


def test_the_pages_of_all_layers_are_counted_and_released_together() -> None:
    """There may be thousands of caches to list or to drop, each with hundreds of layers."""
    store = store_of(400)
    caches = [store.create(replace(SHAPE, layers=layers), None, 0.0) for layers in (1, 101)]
    for cache in caches:
        for layer in range(cache.shape.layers):
            append(store, cache, 5, layer)
    few, many = (calls_of(lambda cache=cache: cache.shared_bytes) for cache in caches)
    assert many == few
    few, many = (calls_of(lambda cache=cache: store.delete(cache)) for cache in caches)
    assert many - few <= 15 * 100, "what finding and joining free extents takes"
    assert (store.free_pages, store.tokens) == (400, 0)
    assert extents_of(store._allocator._extents) == [range(400)]


def test_leases_that_are_over_are_forgotten() -> None:
    store = store_of(0, max_caches=10)
    for time in range(10_000):
        store.delete(store.create(SHAPE, 1e9, float(time)))
    assert len(store._leases._ends) < 100


def test_the_lease_that_ended_first_is_known_when_others_are_forgotten() -> None:
    store = store_of(0, max_caches=1000)
    drawn = random.Random(0)
    caches = [store.create(SHAPE, float(ttl), 0.0) for ttl in drawn.sample(range(1, 1000), 300)]
    for cache in caches[:250]:
        store.delete(cache)
    for cache in sorted(caches[250:], key=lambda cache: cache.expires):
        assert store._leases.first() is cache
        store.delete(cache)


def test_caches_of_too_many_layers() -> None:
    limited = store_of(4, 10, max_layers=3)
    limited.create(CacheShape(1, 8, 8, 3, "float32"), None, 0.0)
    with pytest.raises(InvalidRequest, match=r"at most 3 \(max_cache_layers\), found 4") as error:
        limited.create(CacheShape(1, 8, 8, 4, "float32"), None, 0.0)
    assert (error.value.field, error.value.reason) == ("layers", "LIMIT_EXCEEDED")
    assert len(limited) == 1
