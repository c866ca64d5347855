"""What a request has made is known by the request's id: it may be sent again, or given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from stores import SHAPE, append, expire_all, store_of

from attnserve_server.caches.cache import Cache
from attnserve_server.caches.register import GIVEN_UP_SECONDS, MAX_GIVEN_UP
from attnserve_server.errors import Cancelled, InvalidRequest


def test_a_request_that_is_sent_again_gets_the_cache_that_it_made() -> None:
    store = store_of(4)
    cache = store.create(SHAPE, 10.0, 0.0, "me", b"1")
    assert store.create(SHAPE, 10.0, 1.0, "me", b"1") is cache
    fork = store.fork_one(cache, 10.0, 1.0, b"2")
    assert store.fork_one(cache, 10.0, 2.0, b"2") is fork
    assert (store.counts.created, store.counts.forks, len(store)) == (1, 1, 2)
    others = [store.create(SHAPE, None, 2.0, owner, number) for owner, number in (("you", b"1"), (None, b"1"))]
    assert len({cache, fork, *others}) == 4
    with pytest.raises(InvalidRequest, match="request_id"):
        store.create(replace(SHAPE, head_dim=SHAPE.head_dim * 2), None, 2.0, "me", b"1")


def test_a_fork_that_is_sent_again_gets_the_fork_when_its_parent_is_gone() -> None:
    store = store_of(4)
    parent = store.create(SHAPE, None, 0.0, "me", b"1")
    fork = store.fork_one(parent, 10.0, 0.0, b"2")
    store.delete(parent)

    def made(now: float, owner: str = "me", request_id: bytes = b"2") -> Sequence[Cache] | None:
        return store.made_by(owner, request_id, now, parents=[parent.name])

    assert made(9.0) == [fork]
    assert made(9.0, owner="you") is None
    assert made(9.0, request_id=b"3") is None
    assert made(9.0, request_id=b"") is None
    assert made(10.0) is None, "its lease has ended"
    store.give_up("me", b"2", 11.0)
    with pytest.raises(Cancelled):
        made(12.0)


def test_an_id_that_made_something_else_makes_nothing() -> None:
    store = store_of(4)
    one, other = store.create(SHAPE, None, 0.0, "me", b"1"), store.create(SHAPE, None, 0.0, "me", b"2")
    store.fork_one(one, None, 0.0, b"3")
    for ask in (
        lambda: store.fork_one(other, None, 0.0, b"1"),
        lambda: store.fork_one(one, None, 0.0, b"1"),
        lambda: store.fork_one(other, None, 0.0, b"3"),
        lambda: store.create(SHAPE, None, 0.0, "me", b"3"),
    ):
        with pytest.raises(InvalidRequest, match="request_id"):
            ask()
    assert (store.counts.created, store.counts.forks, len(store)) == (2, 1, 3)


def test_a_request_that_is_sent_again_does_not_get_what_is_gone() -> None:
    store = store_of(4)
    deleted = store.create(SHAPE, None, 0.0, "me", b"1")
    store.delete(deleted)
    leased = store.create(SHAPE, 10.0, 1.0, "me", b"1")
    assert leased is not deleted
    successor = store.create(SHAPE, None, 11.0, "me", b"1")
    assert successor is not leased
    assert store.expire(11.0)
    assert store.create(SHAPE, None, 12.0, "me", b"1") is successor
    assert store.create(SHAPE, None, 12.0) is not store.create(SHAPE, None, 12.0), "no id, no memory"


def test_a_request_that_was_given_up_makes_nothing() -> None:
    """What it has made is deleted; if it arrives only now, or again, it makes nothing; other caches are unaffected."""
    store = store_of(4)
    made = store.create(SHAPE, None, 0.0, "me", b"1")
    yours = store.create(SHAPE, None, 0.0, "you", b"1")
    fork = store.fork_one(made, None, 0.0, b"2")
    for request_id in (b"1", b"2", b"3"):
        store.give_up("me", request_id, 1.0)
    assert (made.gone, fork.gone, yours.gone) == (True, True, False)
    other = store.create(SHAPE, None, 1.0, "me", b"4")
    for request_id in (b"1", b"3"):
        with pytest.raises(Cancelled):
            store.create(SHAPE, None, GIVEN_UP_SECONDS, "me", request_id)
        with pytest.raises(Cancelled):
            store.fork_one(other, None, GIVEN_UP_SECONDS, request_id)
    assert store.create(SHAPE, None, 2.0, "you", b"1") is yours
    assert store.list("me", 2.0) == [other]
    assert store.create(SHAPE, None, 1.0 + GIVEN_UP_SECONDS, "me", b"3") is not other


def test_requests_that_were_given_up_are_forgotten() -> None:
    """The oldest when there are too many to remember, and those past a certain age."""
    store = store_of(4, max_caches=10)
    for number in range(MAX_GIVEN_UP + 1):
        store.give_up(None, b"%d" % number, 0.0)
    assert store.create(SHAPE, None, 1.0, None, b"0") is not None
    with pytest.raises(Cancelled):
        store.create(SHAPE, None, 1.0, None, b"1")
    store.give_up(None, b"last", GIVEN_UP_SECONDS)
    assert len(store._given_up) == 1
    assert {owner: len(own) for owner, own in store._given_up_by.items()} == {None: 1}


def test_one_owner_does_not_make_others_requests_forgotten() -> None:
    store = store_of(4, max_caches=10)
    store.give_up("me", b"mine", 0.0)
    for number in range(2 * MAX_GIVEN_UP):
        store.give_up("you", b"%d" % number, 0.0)
    assert len(store._given_up) == MAX_GIVEN_UP
    with pytest.raises(Cancelled):
        store.create(SHAPE, None, 1.0, "me", b"mine")
    with pytest.raises(Cancelled):
        store.create(SHAPE, None, 1.0, "you", b"%d" % (2 * MAX_GIVEN_UP - 1))
    assert store.create(SHAPE, None, 1.0, "you", b"0") is not None
    store.give_up("another", b"last", 0.0)
    store.give_up("me", b"last", 0.0)
    with pytest.raises(Cancelled):  # whoever comes last, it is not that one's ids that are forgotten
        store.create(SHAPE, None, 1.0, "another", b"last")
    with pytest.raises(Cancelled):
        store.create(SHAPE, None, 1.0, "me", b"mine")


def test_a_request_that_is_given_up_again_is_remembered_from_then_on() -> None:
    """Longer than what was given up in the meantime."""
    store = store_of(4, max_caches=10)
    for request_id, now in ((b"twice", 0.0), (b"once", 100.0), (b"twice", 200.0)):
        store.give_up(None, request_id, now)
    store.give_up(None, b"last", 100.0 + GIVEN_UP_SECONDS)
    assert [request_id for _, request_id in store._given_up] == [b"twice", b"last"]
    with pytest.raises(Cancelled):
        store.create(SHAPE, None, 199.0 + GIVEN_UP_SECONDS, None, b"twice")


def test_nothing_is_kept_of_owners_who_have_nothing_left() -> None:
    store = store_of(16, max_caches=10)
    for owner in ("me", "you", None):
        cache = store.create(SHAPE, 60.0, 0.0, owner, b"made", "alias")
        append(store, cache, 5)
        fork = store.fork_one(cache, None, 0.0, b"forked")
        store.give_up(owner, b"given up", 0.0)
        store.delete(fork)
    expire_all(store, 60.0)
    store.give_up("another", b"last", GIVEN_UP_SECONDS)
    kept = {name: len(found) for name, found in vars(store).items() if isinstance(found, dict) and found}
    assert kept == {"_given_up": 1, "_given_up_by": 1}
    assert (len(store), store.free_pages, store.tokens) == (0, 16, 0)
