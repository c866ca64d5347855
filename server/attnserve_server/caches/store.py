"""The caches of a server: where their tokens are, and who gets room. Decides; never touches the memory.

In: operations with the time at which they happen. Out: caches, placements of tokens in pages, and errors. Pure: no
torch, no clock, no waiting. Not to be called by several threads at once.

The life of an append: `reserve` on admission, which promises the pages that it needs; `hold` for as long as it may read
its caches; `place` at its turn and, if its computation fails, `undo` before another operation on the caches has its
turn; `cancel` once nothing of it is in flight, and `release`. Truncations and forks wait in the same queue
(`wait_to_cut`, `wait_to_fork`). Operations on one cache run in the order of their arrival: so what each will find is
known when it arrives, and pages are promised to all waiting operations together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

from attnserve_server.caches.cache import Cache, Origin
from attnserve_server.caches.changes import Change, Cut, Grow, Share
from attnserve_server.caches.errors import CacheFull
from attnserve_server.caches.layer import CacheLayer, Placement, cut, pages_in
from attnserve_server.caches.pool import PageAllocator
from attnserve_server.caches.register import Register
from attnserve_server.caches.reservation import OfEachLayer, Reservation, place, undo
from attnserve_server.caches.shape import CacheShape
from attnserve_server.errors import LIMIT_EXCEEDED, InvalidRequest
from attnserve_server.host.cpus import CACHE_LINE

MOST_TRUNCATIONS: Final = 16
"""How many truncations a cache remembers."""
C = TypeVar("C", bound=Change)


class Truncation(NamedTuple):
    """What is to become of one cache."""

    cache: Cache
    length: int
    """How many tokens each of its layers keeps."""
    truncation_id: int
    """The id by which a resend is recognised; 0 if it has none."""


class CacheStore(Register):
    """All caches, and the pages that they share. Times are seconds of one clock; a ttl of None is forever."""

    def __init__(self, pool_bytes: int, page_bytes: int, max_caches: int, max_layers: int) -> None:
        """An empty pool of as many whole pages as fit. Raises ValueError if pages would not be aligned."""
        if page_bytes < 1 or page_bytes % CACHE_LINE:
            raise ValueError(f"a page has a multiple of {CACHE_LINE} bytes, not {page_bytes}")
        super().__init__(page_bytes, max_caches)
        self._allocator = PageAllocator(pool_bytes // page_bytes)
        self._max_layers = max_layers

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
    def free_bytes(self) -> int:
        """The bytes of the pages that are free and not promised: what is left for others."""
        return self._allocator.available * self.page_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes of the pages that caches hold; shared pages count once."""
        return self._allocator.used * self.page_bytes

    @property
    def shared_bytes_saved(self) -> int:
        """How many more bytes caches would hold if they shared nothing."""
        return self._allocator.saved * self.page_bytes

    def create(self, shape: CacheShape, ttl: float | None, now: float, origin: Origin) -> Cache:
        """An empty cache, or the one that a request with this id has already made, or that has this alias. Raises
        Overloaded if there are `max_caches` already, or the owner has its share of them; Cancelled if the request was
        given up; and InvalidRequest if a page cannot hold a token, there would be too many layers, or the id or the
        alias belongs to something else.
        """
        owner = origin.owner
        if (made := self.made_by(owner, origin.request_id, now, shape=shape)) is not None:
            return made[0]
        if origin.alias and (found := self.aliased(owner, origin.alias, now, shape)) is not None:
            return found
        if shape.layers > self._max_layers:
            most = f"at most {self._max_layers}"
            raise InvalidRequest("layers", most, shape.layers, LIMIT_EXCEEDED, limit="max_cache_layers")
        tokens_per_page = shape.tokens_per_page(self.page_bytes)
        self._make_room(1, owner, now)
        layers = [CacheLayer(self._allocator, tokens_per_page) for _ in range(shape.layers)]
        cache = self._enter(shape, layers, ttl, now, origin)
        self._note((cache,))
        self.counts.created += 1
        return cache

    def fork(
        self,
        caches: Sequence[Cache],
        ttls: Sequence[float | None],
        now: float,
        request_id: bytes,
        waited: Reservation[Share] | None,
    ) -> Sequence[Cache]:
        """Other caches of the same owner that share these ones' content, as often as each is given, or those that a
        request with this id has already made. `waited` comes from `wait_to_fork`. Raises Overloaded, Cancelled and
        InvalidRequest as `create` does, and NotFound if a cache is gone, unless the fork has waited since before that.
        """
        owner = caches[0].owner
        if (made := self.made_by(owner, request_id, now, parents=[cache.name for cache in caches])) is not None:
            return made
        for cache in caches if waited is None else ():
            self._require(cache)
        for cache in caches:
            cache.users += 1
        try:
            # Before the layers are forked: pages held for a refused fork would never be freed.
            self._make_room(len(caches), owner, now)
        finally:
            for cache in caches:
                self.release(cache, now)
        if waited is not None:
            waited.wait_no_more()
        forks = [self._fork(cache, ttl, now, request_id) for cache, ttl in zip(caches, ttls, strict=True)]
        self._note(forks)
        return forks

    def _fork(self, cache: Cache, ttl: float | None, now: float, request_id: bytes) -> Cache:
        layers = [layer.fork() for layer in cache.layers]
        self._settle(cache.layers)
        fork = self._enter(cache.shape, layers, ttl, now, Origin(cache.owner, request_id, cache.name))
        self.tokens += sum(fork.lengths)
        self._count_pages(fork.owner, pages_in(layers))
        self.counts.forks += 1
        return fork

    def truncate(self, truncations: Sequence[Truncation], waited: Reservation[Cut] | None) -> None:
        """Truncates the layers of caches that have more tokens than these are to have. `waited` comes from
        `wait_to_cut`.

        Raises InvalidRequest, and changes nothing, if no layer of a cache has that many.
        """
        for index, (cache, length, _) in enumerate(truncations):
            if length > (longest := max(cache.lengths)):
                expected = f"at most {longest}, which the cache has"
                raise InvalidRequest(f"truncations[{index}].length", expected, length)
        if waited is not None:
            waited.wait_no_more()
        for cache, length, truncation_id in truncations:
            self._truncate(cache, length, truncation_id)

    def _truncate(self, cache: Cache, length: int, truncation_id: int) -> None:
        before = pages_in(cache.layers)
        self.tokens -= sum(max(0, layer.length - length) for layer in cache.layers)
        cut(cache.layers, length)
        self._count_pages(cache.owner, pages_in(cache.layers) - before)
        self._settle(cache.layers)
        if truncation_id:
            cache.truncations = (truncation_id, *cache.truncations[: MOST_TRUNCATIONS - 1])
        self.counts.truncations += 1

    def reserve(
        self, appends: Iterable[tuple[Cache, int, int]], now: float, foreseen: bool, source: str
    ) -> Reservation[Grow]:
        """Queues appends of so many tokens to layers of caches, each layer once, and promises pages to all of them or
        to none. `source` is the request's field with the tokens.

        Each layer is promised what all operations waiting for it take together, if each succeeds. If one does not, the
        others need no more pages where all are appends; behind forks and truncations they may, and these are sought at
        their turn. Appends that are not `foreseen` to succeed are promised nothing.

        Evicts expired caches, oldest first, if room is short. Raises CacheFull if that is not enough, InvalidRequest if
        the pool could never hold it, and NotFound if a cache is gone.
        """
        caches: set[Cache] = set()
        changes: list[tuple[CacheLayer, Grow]] = []
        for cache, index, tokens in appends:
            self._require(cache)
            if tokens < 0:
                raise ValueError(f"{tokens} tokens cannot be appended")
            caches.add(cache)
            changes.append((cache.layers[index], Grow(tokens)))
        reservation = self._open(caches, changes, source)
        if foreseen:
            # A page promised for a copy is one too many once nobody else holds the original any more.
            self._settle(reservation.layers)
            reservation.wait()
            try:
                lacking = self._promise(reservation, now)
            except InvalidRequest:
                self.cancel(reservation)
                raise
            if lacking:
                self.cancel(reservation)  # first: that may give pages back
                raise self._full(lacking, now)
        return reservation

    def wait_to_cut(self, truncations: Sequence[Truncation], foreseen: bool) -> Reservation[Cut]:
        """Queues truncations of caches, each of them once, unless one is foreseen to fail. Raises NotFound if one of
        them is gone.
        """
        for cache, _, _ in truncations:
            self._require(cache)
        changes = OfEachLayer([(cache, Cut(length)) for cache, length, _ in truncations])
        reservation = self._open({cache for cache, _, _ in truncations}, changes)
        if foreseen:
            reservation.wait()
        return reservation

    def wait_to_fork(self, caches: Collection[Cache]) -> Reservation[Share]:
        """Queues forks of caches, each of them once. Raises NotFound if a cache is gone."""
        for cache in caches:
            self._require(cache)
        share = Share()
        reservation = self._open(set(caches), OfEachLayer([(cache, share) for cache in caches]))
        reservation.wait()
        return reservation

    def place(self, reservation: Reservation[Grow], now: float, append_ids: Sequence[int]) -> Sequence[Placement]:
        """Extends layers by the reserved tokens, at their turn, and says where the tokens go. `append_ids` are the ids
        by which resends of the appends are recognised; 0 for one that has none.

        The caller copies and writes before anything reads them. Raises CacheFull, and changes nothing, if they need
        more pages than was foreseen and too few are free. Raises ValueError if it is not their turn.
        """
        if not reservation.is_open or reservation.placed or not reservation.has_turn:
            raise ValueError("an append is placed out of turn")
        if not reservation.in_line:
            reservation.wait(first=True)
        layers = reservation.layers
        if lacking := self._promise(reservation, now):
            reservation.wait_no_more()  # first: that may give pages back
            self._settle(layers)
            raise self._full(lacking, now)
        reservation.wait_no_more()
        before = pages_in(layers)
        placements = place(reservation, append_ids)
        self._count_pages(reservation.owner, pages_in(layers) - before)
        self._settle(layers)
        self.tokens += sum(append.tokens for _, append in reservation.changes)
        return placements

    def undo(self, reservation: Reservation[Grow]) -> None:
        """Takes back the appends that were placed: the layers are as they were before.

        Raises ValueError if another operation has changed them since.
        """
        if not reservation.placed:
            return
        layers = reservation.layers
        before = pages_in(layers)
        undo(reservation)
        self._count_pages(reservation.owner, pages_in(layers) - before)
        self._settle(layers)
        self.tokens -= sum(append.tokens for _, append in reservation.changes)

    def cancel(self, reservation: Reservation[Change]) -> None:
        """Ends a reservation, whatever became of it. Appends that were placed stay."""
        if not reservation.is_open:
            return
        reservation.is_open = False
        if reservation.in_line:
            reservation.wait_no_more()
            self._settle(reservation.layers)
        if reservation.placed:
            for _, append in reservation.changes:
                assert isinstance(append, Grow)
                if append.copied is not None:
                    self._allocator.release([append.copied])
                self.counts.appends += append.tokens > 0
                self.counts.appended_tokens += append.tokens
        for cache in reservation.caches:
            self._let_go(cache)

    def _open(self, caches: set[Cache], changes: Iterable[tuple[CacheLayer, C]], source: str = "") -> Reservation[C]:
        for cache in caches:
            cache.users += 1
        return Reservation(caches, changes, source)

    def _promise(self, reservation: Reservation[Grow], now: float) -> int:
        """Makes sure that all operations waiting for the layers of a reservation are promised the pages they need.
        Returns how many pages are lacking for that, and then promises none. Raises InvalidRequest if the pool could
        never hold what the reservation appends.
        """
        changes = reservation.changes
        while True:
            more = [layer.coming_pages - layer.promised for layer, _ in changes]
            needed = sum(more)
            available = self._allocator.available
            if needed <= available:
                break
            alone = sum(layer.pages_of(append.tokens) for layer, append in changes)
            if alone > self._allocator.pages:
                tokens = sum(append.tokens for _, append in changes)
                raise InvalidRequest(
                    reservation.source,
                    f"at most {self.pool_bytes} bytes to append, the whole pool of the caches",
                    f"{alone * self.page_bytes}, in whole pages, for {tokens} tokens",
                    LIMIT_EXCEEDED,
                    limit="cache_bytes",
                )
            # An evicted cache may have shared a last page, which then need not be copied: so needs are recounted.
            if not self._evict_oldest(now, "pages"):
                return needed - available
        if any(more):
            self._allocator.reserve(needed)
            for (layer, _), pages in zip(changes, more, strict=True):
                layer.promised += pages
        return 0

    def _full(self, lacking: int, now: float) -> CacheFull:
        """The error of an append for which so many pages are lacking."""
        return CacheFull(self.free_bytes + lacking * self.page_bytes, self.free_bytes, self._retry_delay(now))

    def _settle(self, layers: Iterable[CacheLayer]) -> None:
        """Adjusts what is promised for layers to what waiting operations now need, as far as pages are available."""
        for layer in layers:
            if layer.promised or layer.is_waited_for:
                more = min(layer.coming_pages - layer.promised, self._allocator.available)
                self._allocator.reserve(more)
                layer.promised += more
