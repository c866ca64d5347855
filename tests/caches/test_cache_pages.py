"""Caches listed in pages: each once, in the order of their creation, whatever comes and goes meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import grpc
import pytest
from caller import Caller
from stores import SHAPE, store_of

if TYPE_CHECKING:
    from tests.conftest import Server


@pytest.fixture
def caller(start_server: Callable[..., Server]) -> Iterator[Caller]:
    """A caller of a server that has no caches yet."""
    with grpc.insecure_channel(start_server("--device", "cpu").address) as channel:
        yield Caller(channel)


def pages_of(caller: Caller, size: int, between: Callable[[int], object] = lambda number: None) -> list[list[str]]:
    """The names of the caches in each page; `between` is called after each of them, with its number."""
    pages: list[list[str]] = []
    token = ""
    while True:
        listed = caller.list(page_size=size, page_token=token)
        pages.append([cache.name for cache in listed.caches])
        if not (token := listed.next_page_token):
            return pages
        between(len(pages))


def test_pages_are_as_large_as_asked_for_and_in_order(caller: Caller) -> None:
    assert pages_of(caller, 3) == [[]]
    names = [caller.create() for _ in range(7)]
    assert pages_of(caller, 3) == [names[:3], names[3:6], names[6:]]
    assert pages_of(caller, 7) == pages_of(caller, 0) == pages_of(caller, 2**32 - 1) == [names]


def test_what_goes_between_two_pages_moves_no_other(caller: Caller) -> None:
    """Also the cache at which the next page would begin, or after which it begins."""
    names = [caller.create() for _ in range(9)]
    going = {1: names[2:4], 2: names[:1]}
    found = pages_of(caller, 3, lambda number: caller.delete(*going[number]))
    assert found == [names[:3], names[4:7], names[7:]]


def test_what_is_made_between_two_pages_is_in_the_last(caller: Caller) -> None:
    names = [caller.create() for _ in range(4)]
    found = pages_of(caller, 3, lambda number: names.append(caller.create()))
    assert found == [names[:3], names[3:]]


def test_no_reply_has_more_than_a_thousand(caller: Caller) -> None:
    names = [caller.create(1, 1) for _ in range(1001)]
    listed = caller.list()
    assert ([cache.name for cache in listed.caches], listed.next_page_token != "") == (names[:1000], True)
    [last] = caller.list(page_size=2000, page_token=listed.next_page_token).caches
    assert last.name == names[1000]


def test_a_pages_token_tells_nothing_of_others() -> None:
    """Each owner's caches are counted by themselves, and anew when there are none."""
    store = store_of(4)
    for owner in ("you", None, "you"):
        store.create(SHAPE, None, 0.0, owner)
    mine = [store.create(SHAPE, None, 0.0, "me") for _ in range(2)]
    assert [cache.number for cache in mine] == [1, 2]
    assert store.list("me", 0.0, after=1) == mine[1:]
    for cache in mine:
        store.delete(cache)
    assert store.create(SHAPE, None, 0.0, "me").number == 1
