"""Stores of few pages, and appends to their caches."""

from __future__ import annotations

from attnserve_server.caches.cache import Cache
from attnserve_server.caches.free_extents import FreeExtents
from attnserve_server.caches.shape import CacheShape
from attnserve_server.caches.store import CacheStore, Placement

SHAPE = CacheShape(num_kv_heads=1, head_dim=8, value_dim=8, layers=1, dtype="float32")
PAGE_BYTES = 256
"""Four tokens of SHAPE."""


def store_of(pages: int, max_caches: int = 100) -> CacheStore:
    return CacheStore(pages * PAGE_BYTES, PAGE_BYTES, max_caches)


def extents_of(free: FreeExtents) -> list[range]:
    """The extents of free pages, in the order of their pages."""
    return [range(*bounds) for bounds in sorted(free._ends.items())]


def append(store: CacheStore, cache: Cache, tokens: int, layer: int = 0, now: float = 0.0) -> Placement:
    """An append from its admission to its end."""
    reservation = store.reserve([(cache, layer, tokens)], now)
    [placement] = store.place(reservation, now)
    store.cancel(reservation)
    return placement
