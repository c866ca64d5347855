"""All caches of a server: their names and owners, and which of them are evicted because their lease has ended.

In: caches; look-ups by owner, with the time. Out: caches, or NotFound. Pure: no torch, no clock, no waiting. What is in
a cache is the store's affair (`store.py`); here its pages are only released.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from attnserve_server.caches.cache import Cache, Origin
from attnserve_server.caches.counts import Counts, EvictionReason
from attnserve_server.caches.layer import CacheLayer, clear, pages_in
from attnserve_server.caches.leases import Leases
from attnserve_server.caches.shape import CacheShape
from attnserve_server.errors import Cancelled, InvalidRequest, NotFound, Overloaded
from attnserve_server.no_room import full, share_exceeded

MIN_RETRY_DELAY: Final = 0.05
MAX_RETRY_DELAY: Final = 10.0
NAME_BYTES: Final = 18
"""Random bytes in a name: more than anybody can guess, and 24 characters."""
GIVEN_UP_SECONDS: Final = 300.0
"""How long a request that was given up cannot make a cache: longer than a request is in transit."""
SHARE: Final = 8
"""A named caller may take a place if it has no more than this many times as many caches as are then left: eight ninths
of all if it is alone (as in `scheduling.admission`). The last place is for one who has none.
"""
MAX_GIVEN_UP: Final = 1 << 14
"""How many of these requests are remembered. Beyond that, the oldest is forgotten of the owner that has most."""


@dataclass(slots=True)
class _Made:
    """What a request has made: names, since a cache that is gone is not to be kept for the sake of the others."""

    names: tuple[str, ...]
    parents: tuple[str | None, ...]
    """What each was forked from."""
    left: int
    """How many still exist."""


class Register:
    """All caches, by their names. Times are seconds of one clock; a ttl of None is forever."""

    def __init__(self, page_bytes: int, max_caches: int) -> None:
        """No caches yet, and at most `max_caches`."""
        self.page_bytes = page_bytes
        self.max_caches = max_caches
        """The most caches that there may be."""
        self.counts = Counts()
        self.tokens = 0
        """The tokens of all layers of all caches; shared ones count once for each cache."""
        self._caches: dict[str, Cache] = {}
        self._owned: Counter[str | None] = Counter()
        """How many caches each owner has."""
        self._numbers: Counter[str | None] = Counter()
        """The number of the last cache that was made for each owner that has any."""
        self._pages: Counter[str | None] = Counter()
        """How many pages each owner's caches have, until they are freed; what they share counts for each."""
        self._made: dict[tuple[str | None, bytes], _Made] = {}
        """What a request has made, as long as some of it exists; by the owner and the request's id."""
        self._aliased: dict[tuple[str | None, str], Cache] = {}
        """Those that have an alias, by their owners and it."""
        self._given_up: OrderedDict[tuple[str | None, bytes], float] = OrderedDict()
        """Requests that must no longer make a cache, and until when that is remembered; in the order of these times."""
        self._given_up_by: dict[str | None, OrderedDict[bytes, None]] = {}
        """The same by their owners, in the same order."""
        self._leases = Leases()

    def __len__(self) -> int:
        """How many caches there are."""
        return len(self._caches)

    def get(self, name: str, now: float, owner: str | None) -> Cache:
        """The cache of that name. Raises NotFound if there is none, it has expired, or it is another owner's."""
        cache = self._caches.get(name)
        if cache is not None and cache.expired(now):
            self._evict(cache, "lease")
            cache = None
        if cache is None or cache.owner != owner:
            raise NotFound("cache", name, is_secret=True)
        return cache

    def list(self, owner: str | None, now: float, after: int = 0) -> Sequence[Cache]:
        """The caches of an owner with numbers above `after` that have not expired, by the time of their creation."""
        owned = (cache for cache in self._caches.values() if cache.owner == owner and cache.number > after)
        return [cache for cache in owned if not cache.expired(now)]

    def bytes_of_owners(self) -> Mapping[Hashable, int]:
        """The bytes of the caches of every owner that has any, until they are freed; what they share counts for each.
        Takes no longer for many caches.
        """
        return {owner: pages * self.page_bytes for owner, pages in self._pages.items()}

    def expire(self, now: float) -> bool:
        """Evicts the cache whose lease ended first. Returns whether there was one whose lease has ended. Nothing
        depends on this, but it frees pages sooner.
        """
        return self._evict_oldest(now, "lease")

    def delete(self, cache: Cache) -> None:
        """Deletes the cache: for callers at once; its pages are freed when nothing holds it any more."""
        if not cache.gone:
            self.counts.deletions += 1
            self._remove(cache)

    def give_up(self, owner: str | None, request_id: bytes, now: float) -> None:
        """Gives up what an owner's request makes or has made: that is deleted, and a request with that id that arrives
        later, whether sent before or sent again, makes nothing.
        """
        key = owner, request_id
        for name in self._made[key].names if key in self._made else ():
            if (made := self._caches.get(name)) is not None:
                self.delete(made)
        if key in self._given_up:
            self._forget(key)
        self._given_up[key] = now + GIVEN_UP_SECONDS
        self._given_up_by.setdefault(owner, OrderedDict())[request_id] = None
        while next(iter(self._given_up.values())) <= now:
            self._forget(next(iter(self._given_up)))
        if len(self._given_up) > MAX_GIVEN_UP:
            most = max(self._given_up_by, key=lambda each: len(self._given_up_by[each]))
            self._forget((most, next(iter(self._given_up_by[most]))))

    def _forget(self, given_up: tuple[str | None, bytes]) -> None:
        """Forgets that a request was given up."""
        owner, request_id = given_up
        del self._given_up[given_up]
        own = self._given_up_by[owner]
        del own[request_id]
        if not own:
            del self._given_up_by[owner]

    def made_by(
        self,
        owner: str | None,
        request_id: bytes,
        now: float,
        *,
        shape: CacheShape | None = None,
        parents: Sequence[str | None] = (None,),
    ) -> Sequence[Cache] | None:
        """The caches that an owner's request has already made, unless none of them exists any more: one of this shape,
        or forks of the caches of these names, for which `shape` is None. Raises Cancelled if the request was given up,
        NotFound if only some of them exist, and InvalidRequest if one of this id made something else.
        """
        if self._given_up.get((owner, request_id), now) > now:
            raise Cancelled
        made = self._made.get((owner, request_id))
        if made is None:
            return None
        found = {name: self._caches.get(name) for name in made.names}
        caches = [cache for cache in found.values() if cache is not None and not cache.expired(now)]
        if not caches:
            return None
        if made.parents != tuple(parents) or shape not in (caches[0].shape, None):
            raise InvalidRequest("request_id", "one of this request alone", "that of another, which made a cache")
        if len(caches) < len(found):
            name = next(name for name, cache in found.items() if cache is None or cache.expired(now))
            raise NotFound("cache", name, is_secret=True)
        return caches

    def aliased(self, owner: str | None, alias: str, now: float, shape: CacheShape) -> Cache | None:
        """The cache to which an owner has given an alias, with its lease renewed; None if there is none, or it has
        expired. Raises InvalidRequest if it has another shape.
        """
        cache = self._aliased.get((owner, alias))
        if cache is None:
            return None
        if cache.expired(now):
            self._evict(cache, "lease")
            return None
        if cache.shape != shape:
            own, others = shape.differences(cache.shape)
            raise InvalidRequest("alias", f"that of a cache with {own}", f"that of one with {others}")
        cache.renew(now)
        return cache

    def hold(self, cache: Cache, now: float) -> None:
        """Holds the cache for an operation in flight, until `release`. Raises NotFound if the cache is gone."""
        self._require(cache)
        cache.users += 1
        cache.renew(now)

    def release(self, cache: Cache, now: float) -> None:
        """Ends one `hold` of the cache, and renews its lease."""
        cache.renew(now)
        self._let_go(cache)

    def _make_room(self, caches: int, owner: str | None, now: float) -> None:
        """Makes sure that so many caches more may exist. Raises Overloaded."""
        while True:
            left = self.max_caches - len(self._caches) - caches
            """How many are left then."""
            has_its_share = owner is not None and self._owned[owner] + caches - 1 > SHARE * left
            if left >= 0 and not has_its_share:
                return
            if not self._evict_oldest(now, "caches"):
                told = full if left < 0 else share_exceeded
                raise Overloaded(told("caches", self.max_caches, self._retry_delay(now)))

    def _enter(
        self,
        shape: CacheShape,
        layers: Sequence[CacheLayer],
        ttl: float | None,
        now: float,
        origin: Origin,
    ) -> Cache:
        name = secrets.token_urlsafe(NAME_BYTES)
        self._numbers[origin.owner] += 1
        cache = Cache(name, self._numbers[origin.owner], origin, shape, self.page_bytes, layers, ttl, now)
        self._caches[cache.name] = cache
        self._owned[cache.owner] += 1
        if cache.alias:
            self._aliased[cache.owner, cache.alias] = cache
        self._leases.enter(cache)
        return cache

    def _note(self, made: Sequence[Cache]) -> None:
        """Takes note of all that one request has made."""
        if made[0].request_id:
            names, parents = tuple(cache.name for cache in made), tuple(cache.parent for cache in made)
            self._made[made[0].owner, made[0].request_id] = _Made(names, parents, len(made))

    def _require(self, cache: Cache) -> None:
        if cache.gone:
            raise NotFound("cache", cache.name, is_secret=True)

    def _evict_oldest(self, now: float, reason: EvictionReason) -> bool:
        """Evicts the cache whose lease ended first. Returns whether there was an expired one."""
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
        self._owned[cache.owner] -= 1
        if not self._owned[cache.owner]:
            del self._owned[cache.owner], self._numbers[cache.owner]
        made = self._made.get((cache.owner, cache.request_id))
        if made is not None and cache.name in made.names:  # or else the id has made others since
            made.left -= 1
            if not made.left:
                del self._made[cache.owner, cache.request_id]
        if cache.alias:
            del self._aliased[cache.owner, cache.alias]
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
        self.tokens -= sum(cache.lengths)
        self._count_pages(cache.owner, -pages_in(cache.layers))
        clear(cache.layers)
        # They are all the same now, and one is less for those who may refer to it for long, as kept requests do.
        cache.layers = [cache.layers[0]] * len(cache.layers)

    def _count_pages(self, owner: str | None, more: int) -> None:
        """Takes note that an owner's caches have more pages than before, or fewer."""
        if more:
            self._pages[owner] += more
            if not self._pages[owner]:
                del self._pages[owner]

    def _retry_delay(self, now: float) -> float:
        """Seconds until the next lease ends, within bounds: room may come sooner, by an undone append or a deletion."""
        return min(max(self._leases.next_end() - now, MIN_RETRY_DELAY), MAX_RETRY_DELAY)
