"""Forks have one list of pages, until one of them gets other pages."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from stores import SHAPE, append, store_of

from attnserve_server.caches.cache import Cache
from attnserve_server.caches.store import CacheStore

PAGES = 100
TOKENS = 41
"""The last of 11 pages of 4 tokens is not full."""


def test_a_fork_takes_no_memory_for_the_pages_of_its_parent() -> None:
    store = store_of(25_000)
    long = store.create(SHAPE, None, 0.0)
    append(store, long, 100_000)
    tracemalloc.start()
    try:
        fork = store.fork_one(long, None, 0.0)
        assert tracemalloc.get_traced_memory()[0] < 8192, "25,000 numbers of pages would take 100,000 bytes"
    finally:
        tracemalloc.stop()
    assert fork.table(0) is long.table(0), "whose addresses are then found once for both"


CHANGES: dict[str, Callable[[CacheStore, Cache], object]] = {
    "an append to a shared page": lambda store, cache: append(store, cache, 1),
    "an append of more pages": lambda store, cache: append(store, cache, 30),
    "a truncation": lambda store, cache: store.truncate_one(cache, 7),
    "to nothing": lambda store, cache: store.truncate_one(cache, 0),
    "a deletion": lambda store, cache: store.delete(cache),
}


@pytest.mark.parametrize("changed", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_one_changes_no_other(change: str, changed: int) -> None:
    store = store_of(PAGES)
    parent = store.create(SHAPE, None, 0.0)
    append(store, parent, TOKENS)
    family = [parent, store.fork_one(parent, None, 0.0)]
    family.append(store.fork_one(family[1], None, 0.0))
    before, table = parent.pages(0), parent.table(0)
    assert [each.shared_bytes for each in family] == 3 * [11 * store.page_bytes]
    CHANGES[change](store, family[changed])
    others = [each for each in family if each is not family[changed]]
    assert [each.pages(0) for each in others] == 2 * [before]
    assert [each.table(0) is table for each in others] == [True, True]
    assert family[changed].table(0).numbers == family[changed].pages(0)
    assert table.numbers == before
    assert [each.shared_bytes for each in others] == 2 * [11 * store.page_bytes]
    assert store.shared_bytes_saved == (11 + len(set(family[changed].pages(0)) & set(before))) * store.page_bytes

    store.delete(others[0])
    assert others[1].pages(0) == before
    assert others[1].shared_bytes == len(set(family[changed].pages(0)) & set(before)) * store.page_bytes
    store.delete(others[1])
    store.delete(family[changed])
    assert (store.free_pages, store.shared_bytes_saved, store.tokens) == (PAGES, 0, 0)


def test_what_is_shared_with_a_fork_alone_need_not_be_copied_once_that_is_gone() -> None:
    store = store_of(PAGES)
    parent = store.create(SHAPE, None, 0.0)
    append(store, parent, TOKENS)
    before = parent.pages(0)
    store.delete(store.fork_one(parent, None, 0.0))
    append(store, parent, 1)
    assert parent.table(0).numbers == parent.pages(0) == before
    assert store.free_pages == PAGES - 11
    append(store, parent, 4)
    assert parent.table(0).numbers == parent.pages(0) != before
