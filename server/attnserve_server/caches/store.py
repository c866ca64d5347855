"""The caches of a server: what there is, where its tokens are, and who gets room. Decides; never touches the memory.

In: operations with the time at which they happen. Out: caches, placements of tokens in pages, and errors. Pure: no
torch, no clock, no waiting. Not to be called by several threads at once.

The life of an operation that appends: `reserve` when it is admitted, which promises the pages that it may need;
`hold` for as long as it may read its caches; `append` at its turn, and where its computation fails `undo`, before
another operation on the caches has its turn; `cancel` when nothing of it is under way, and `release`. Operations on
one cache have their turns in the order in which they reserved or held it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Final

from attnserve_server.caches.cache import Cache
from attnserve_server.caches.counts import Counts, EvictionReason
from attnserve_server.caches.errors import CacheFull
from attnserve_server.caches.layer import CacheLayer, Placement
from attnserve_server.caches.leases import Leases
from attnserve_server.caches.pool import PageAllocator
from attnserve_server.caches.reservation import Append, Reservation
from attnserve_server.caches.shape import BLOCK_ALIGNMENT, CacheShape
from attnserve_server.errors import LIMIT_EXCEEDED, InvalidRequest, NotFound, Overloaded, RequestError

__all__ = ["CacheStore", "Placement", "Reservation"]

MIN_RETRY_DELAY: Final = 0.05
MAX_RETRY_DELAY: Final = 10.0
MAX_LAYERS: Final = 256
NAME_BYTES: Final = 18
"""Random bytes in a name: more than anybody can guess, and 24 characters."""


class CacheStore:
    """All caches, and the pages that they share. Times are seconds of one clock; a ttl of None is forever."""

    def __init__(self, pool_bytes: int, page_bytes: int, max_caches: int, max_layers: int = MAX_LAYERS) -> None:
        """An empty pool of as many whole pages as fit. Raises ValueError if pages would not be aligned."""
        if page_bytes < 1 or page_bytes % BLOCK_ALIGNMENT:
            raise ValueError(f"a page has a multiple of {BLOCK_ALIGNMENT} bytes, not {page_bytes}")
        self.page_bytes = page_bytes
        self.counts = Counts()
        self.tokens = 0
        """The tokens of all layers of all caches; those that are shared count for each."""
        self._allocator = PageAllocator(pool_bytes // page_bytes)
        self.max_caches = max_caches
        """The most that there may be."""
        self._max_layers = max_layers
        self._caches: dict[str, Cache] = {}
        self._made: dict[tuple[str | None, bytes], Cache] = {}
        """By their owners and the ids of the requests that made them."""
        self._leases = Leases()

    def __len__(self) -> int:
        """How many caches there are."""
        return len(self._caches)

    @property
    def pool_bytes(self) -> int:
        """The bytes of all pages."""
        return self._allocator.pages * self.page_bytes

    @property
    def free_pages(self) -> int:
        """Pages that nothing holds; some of them may be promised."""
        return self._allocator.free

    @property
    def reserved_pages(self) -> int:
        """Free pages that are promised to appends in flight."""
        return self._allocator.reserved

    @property
    def used_bytes(self) -> int:
        """The bytes of the pages that caches hold; what is shared counts once."""
        return self._allocator.used * self.page_bytes

    @property
    def shared_bytes_saved(self) -> int:
        """The bytes more that caches would hold, if they shared nothing."""
        return self._allocator.saved * self.page_bytes

    def create(
        self, shape: CacheShape, ttl: float | None, now: float, owner: str | None = None, request_id: bytes = b""
    ) -> Cache:
        """An empty cache, or the one that a request of this id has made before. Raises Overloaded if there are as many
        as there may be, and InvalidRequest if a page cannot hold a token, it would have too many layers, or the id is
        another request's.
        """
        if (made := self._made_by(owner, request_id, shape, now)) is not None:
            return made
        if shape.layers > self._max_layers:
            raise InvalidRequest("layers", f"at most {self._max_layers}", shape.layers, LIMIT_EXCEEDED)
        tokens_per_page = shape.tokens_per_page(self.page_bytes)
        self._make_room_for_one(now)
        layers = [CacheLayer(self._allocator, tokens_per_page) for _ in range(shape.layers)]
        cache = self._enter(shape, layers, ttl, now, owner, request_id)
        self.counts.created += 1
        return cache

    def fork(self, cache: Cache, ttl: float | None, now: float, request_id: bytes = b"") -> Cache:
        """Another cache of the same owner with the same content, which they share, or the one that a request of this id
        has made before. Raises Overloaded and InvalidRequest as `create` does, and NotFound if the cache is gone.
        """
        if (made := self._made_by(cache.owner, request_id, cache.shape, now)) is not None:
            return made
        self.hold(cache, now)
        try:
            # Before the layers are forked: pages held for a cache that is refused would never be free again.
            self._make_room_for_one(now)
        finally:
            self.release(cache, now)
        layers = [layer.fork() for layer in cache.layers]
        fork = self._enter(cache.shape, layers, ttl, now, cache.owner, request_id)
        self.tokens += sum(fork.lengths)
        self.counts.forks += 1
        return fork

    def get(self, name: str, now: float, owner: str | None = None) -> Cache:
        """The cache of that name. Raises NotFound if it is not there, not any more, or another owner's."""
        cache = self._caches.get(name)
        if cache is not None and cache.expired(now):
            self._evict(cache, "lease")
            cache = None
        if cache is None or cache.owner != owner:
            raise NotFound("cache", name)
        return cache

    def list(self, owner: str | None, now: float) -> Sequence[Cache]:
        """The caches of an owner, by the time of their creation."""
        self.expire(now)
        return [cache for cache in self._caches.values() if cache.owner == owner]

    def expire(self, now: float) -> None:
        """Evicts every cache whose lease has ended. Nothing depends on it, but the pages are free the sooner."""
        while self._evict_oldest(now, "lease"):
            pass

    def delete(self, cache: Cache) -> None:
        """The cache is gone: for callers at once, its pages when nothing holds it any more."""
        if not cache.gone:
            self.counts.deletions += 1
            self._remove(cache)

    def hold(self, cache: Cache, now: float) -> None:
        """An operation in flight uses the cache, until it releases it. Raises NotFound if the cache is gone."""
        self._require(cache)
        cache.users += 1
        cache.renew(now)

    def release(self, cache: Cache, now: float) -> None:
        """An operation that held the cache is over."""
        cache.renew(now)
        self._let_go(cache)

    def truncate(self, cache: Cache, length: int) -> None:
        """Cuts layers off that have more than `length` tokens. Raises InvalidRequest if none has as many."""
        if length > (longest := max(cache.lengths)):
            raise InvalidRequest("length", f"at most {longest}, the tokens of the longest layer", length)
        for layer in cache.layers:
            if layer.length > length:
                self.tokens -= layer.length - length
                layer.truncate(length)
        self.counts.truncations += 1

    def reserve(self, appends: Iterable[tuple[Cache, int, int]], now: float) -> Reservation:
        """Promises the pages for appends of so many tokens to layers of caches: to all of them or to none.

        A cache that no operation holds is promised what the append takes as it stands now. Otherwise its length may be
        another when the turn comes, and its last page shared: then it is promised the most that the append can take.
        Evicts expired caches, oldest first, if room is short. Raises CacheFull if that is not enough, InvalidRequest if
        the pool could never hold it, and NotFound if a cache is gone.
        """
        wanted: dict[tuple[Cache, int], Append] = {}
        for cache, index, tokens in appends:
            self._require(cache)
            if tokens < 0:
                raise ValueError(f"{tokens} tokens cannot be appended")
            wanted.setdefault((cache, index), Append(0)).tokens += tokens
        caches = {cache for cache, _ in wanted}
        idle = {cache for cache in caches if not cache.users}
        for cache in caches:
            cache.users += 1
        try:
            pages = self._make_room(wanted, idle, now)
        except RequestError:
            for cache in caches:
                self._let_go(cache)
            raise
        self._allocator.reserve(pages)
        return Reservation(wanted, pages)

    def append(self, cache: Cache, layer: int, tokens: int, reservation: Reservation) -> Placement:
        """Makes the layer longer by so many tokens, which were reserved, and says where they go.

        The caller copies and writes before anything reads them. Raises ValueError if they were not reserved.
        """
        placement = reservation.append(cache, layer, tokens)
        self.tokens += tokens
        return placement

    def undo(self, reservation: Reservation) -> None:
        """Takes the appends back that were made of the reservation: the layers are as they were before.

        Raises ValueError if another operation has changed them since.
        """
        self.tokens -= reservation.undo()

    def cancel(self, reservation: Reservation) -> None:
        """Ends a reservation: what is left of it is free for others. Appends that were made stay."""
        if not reservation.is_open:
            return
        reservation.is_open = False
        self._allocator.unreserve(reservation.pages)
        for append in reservation.appends.values():
            if append.copied is not None:
                self._allocator.release([append.copied])
            self.counts.appends += append.appended > 0
            self.counts.appended_tokens += append.appended
        for cache in reservation.caches:
            self._let_go(cache)

    def _make_room(self, wanted: dict[tuple[Cache, int], Append], idle: set[Cache], now: float) -> int:
        """How many pages the appends need, when there are so many."""
        while True:
            layers = [(cache, cache.layers[index], append.tokens) for (cache, index), append in wanted.items()]
            exact = sum(layer.pages_for(tokens) for _, layer, tokens in layers)
            if exact > self._allocator.pages:
                raise InvalidRequest(
                    "", f"at most {self.pool_bytes} bytes to append", exact * self.page_bytes, LIMIT_EXCEEDED
                )
            # What is evicted may have shared a last page, which then need not be copied: so needs are counted again.
            needed = sum(
                layer.pages_for(tokens) if cache in idle else layer.most_pages_for(tokens)
                for cache, layer, tokens in layers
            )
            available = self._allocator.available
            if needed <= available:
                return needed
            if not self._evict_oldest(now, "pages"):
                raise CacheFull(needed * self.page_bytes, available * self.page_bytes, self._retry_delay(now))

    def _make_room_for_one(self, now: float) -> None:
        while len(self._caches) >= self.max_caches:
            if not self._evict_oldest(now, "caches"):
                raise Overloaded("caches", self.max_caches, self._retry_delay(now))

    def _made_by(self, owner: str | None, request_id: bytes, shape: CacheShape, now: float) -> Cache | None:
        """The cache that an owner's request has made, if it is there and of that shape."""
        made = self._made.get((owner, request_id))
        if made is None or made.expired(now):
            return None
        if made.shape != shape:
            raise InvalidRequest("request_id", "one of this request alone", "that of another, which made a cache")
        return made

    def _enter(
        self,
        shape: CacheShape,
        layers: Sequence[CacheLayer],
        ttl: float | None,
        now: float,
        owner: str | None,
        request_id: bytes,
    ) -> Cache:
        cache = Cache(secrets.token_urlsafe(NAME_BYTES), owner, shape, self.page_bytes, layers, ttl, now, request_id)
        self._caches[cache.name] = cache
        if request_id:
            self._made[owner, request_id] = cache
        self._leases.enter(cache)
        return cache

    def _require(self, cache: Cache) -> None:
        if cache.gone:
            raise NotFound("cache", cache.name)

    def _evict_oldest(self, now: float, reason: EvictionReason) -> bool:
        """Whether there was an expired cache to evict."""
        cache = self._leases.first()
        if cache is None or not cache.expired(now):
            return False
        self._evict(cache, reason)
        return True

    def _evict(self, cache: Cache, reason: EvictionReason) -> None:
        self.counts.evictions[reason] += 1
        self._remove(cache)

    def _remove(self, cache: Cache) -> None:
        cache.gone = True
        del self._caches[cache.name]
        if self._made.get((cache.owner, cache.request_id)) is cache:
            del self._made[cache.owner, cache.request_id]
        self._leases.leave(cache)
        if not cache.users:
            self._free(cache)

    def _let_go(self, cache: Cache) -> None:
        cache.users -= 1
        if cache.users:
            return
        if cache.gone:
            self._free(cache)
        else:
            self._leases.enter(cache)

    def _free(self, cache: Cache) -> None:
        for layer in cache.layers:
            self.tokens -= layer.length
            layer.truncate(0)

    def _retry_delay(self, now: float) -> float:
        """Seconds until the next lease ends, within bounds: an append in flight may be undone sooner, or deleted."""
        return min(max(self._leases.next_end() - now, MIN_RETRY_DELAY), MAX_RETRY_DELAY)
