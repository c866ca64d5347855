"""Stores of caches, which allocate no memory, and appends to their caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attnserve_server.caches.cache import Cache, Origin
from attnserve_server.caches.changes import Cut, Grow, Share
from attnserve_server.caches.free_extents import FreeExtents
from attnserve_server.caches.layer import Placement
from attnserve_server.caches.reservation import Reservation
from attnserve_server.caches.shape import CacheShape
from attnserve_server.caches.store import CacheStore, Truncation

SHAPE = CacheShape(num_kv_heads=1, head_dim=8, value_dim=8, layers=1, dtype="float32")
PAGE_BYTES = 256
"""Four tokens of SHAPE."""
MAX_LAYERS = 256
"""The most layers of a cache."""


class Store(CacheStore):
    """A store whose operations are, unless a test says otherwise, nobody's, without ids, foreseen to succeed, and
    carried out without having waited.
    """

    def create(  # type: ignore[override]
        self,
        shape: CacheShape,
        ttl: float | None,
        now: float,
        owner: str | None = None,
        request_id: bytes = b"",
        alias: str = "",
    ) -> Cache:
        return super().create(shape, ttl, now, Origin(owner, request_id, alias=alias))

    def get(self, name: str, now: float, owner: str | None = None) -> Cache:
        return super().get(name, now, owner)

    def fork_one(
        self,
        cache: Cache,
        ttl: float | None,
        now: float,
        request_id: bytes = b"",
        waited: Reservation[Share] | None = None,
    ) -> Cache:
        [fork] = self.fork([cache], [ttl], now, request_id, waited)
        return fork

    def truncate_one(
        self, cache: Cache, length: int, waited: Reservation[Cut] | None = None, truncation_id: int = 0
    ) -> None:
        self.truncate([Truncation(cache, length, truncation_id)], waited)

    def reserve(
        self, appends: Iterable[tuple[Cache, int, int]], now: float, foreseen: bool = True, source: str = "key"
    ) -> Reservation[Grow]:
        return super().reserve(appends, now, foreseen, source)

    def wait_to_cut_one(self, cache: Cache, length: int, foreseen: bool = True) -> Reservation[Cut]:
        return self.wait_to_cut([Truncation(cache, length, 0)], foreseen)

    def wait_to_fork_one(self, cache: Cache) -> Reservation[Share]:
        return self.wait_to_fork([cache])

    def place(self, reservation: Reservation[Grow], now: float, append_ids: Sequence[int] = ()) -> Sequence[Placement]:
        return super().place(reservation, now, append_ids or [0] * len(reservation.changes))


def store_of(pages: int, max_caches: int = 100, *, page_bytes: int = PAGE_BYTES, max_layers: int = MAX_LAYERS) -> Store:
    """An empty store."""
    return Store(pages * page_bytes, page_bytes, max_caches, max_layers)


def extents_of(free: FreeExtents) -> list[range]:
    """The extents of free pages, in the order of their pages."""
    return [range(*bounds) for bounds in sorted(free._ends.items())]


def append(store: Store, cache: Cache, tokens: int, layer: int = 0, now: float = 0.0) -> Placement:
    """An append from its admission to its end."""
    reservation = store.reserve([(cache, layer, tokens)], now)
    [placement] = store.place(reservation, now)
    store.cancel(reservation)
    return placement


def expire_all(store: CacheStore, now: float) -> None:
    """Evicts every cache whose lease has ended by then."""
    while store.expire(now):
        pass
