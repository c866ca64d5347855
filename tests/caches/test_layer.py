"""What one layer of a cache foresees of the changes that wait for it, and which appends it remembers."""

from __future__ import annotations

import tracemalloc

import pytest

from attnserve_server.caches.changes import Cut, Grow
from attnserve_server.caches.layer import MOST_APPENDS, CacheLayer
from attnserve_server.caches.pool import PageAllocator


@pytest.fixture
def layer() -> CacheLayer:
    return CacheLayer(PageAllocator(20), tokens_per_page=4)


def append(layer: CacheLayer, tokens: int, append_id: int = 0) -> None:
    pages = layer.pages_for(tokens)
    layer._allocator.reserve(pages)
    layer.promised += pages
    layer.append(tokens, append_id)


def test_what_comes_after_a_truncation_is_counted_from_there(layer: CacheLayer) -> None:
    append(layer, 10)
    assert (layer.coming_length, layer.coming_pages) == (10, 0)
    layer.wait(Grow(3))
    assert (layer.coming_length, layer.coming_pages) == (13, 1)
    layer.wait(cut := Cut(5))
    layer.wait(Grow(4))
    assert (layer.coming_length, layer.coming_pages) == (9, 1)
    layer.wait_no_more(cut)
    assert (layer.coming_length, layer.coming_pages) == (17, 2)


def test_an_append_that_is_undone_makes_no_other_forgotten(layer: CacheLayer) -> None:
    for append_id in range(1, MOST_APPENDS + 1):
        append(layer, 1, append_id)
    before = layer.appends
    append(layer, 1, MOST_APPENDS + 1)
    assert not layer.has_append(1), "it is remembered no longer"
    layer.restore(MOST_APPENDS, None, before)
    assert [layer.has_append(append_id) for append_id in (1, MOST_APPENDS, MOST_APPENDS + 1)] == [True, True, False]


def test_an_empty_layer_takes_little_memory() -> None:
    """Also after changes have waited for it. A server may have millions."""
    allocator, change, count = PageAllocator(1), Cut(0), 1000
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        layers = [CacheLayer(allocator, 4) for _ in range(count)]
        for layer in layers:
            layer.wait(change)
            layer.wait_no_more(change)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / count <= 125
