"""Which lease ended first, among any number of caches.

Leases are renewed far more often than they end, so a renewal touches nothing here: an entry says when a lease would
have ended, and is corrected when it comes to the front. Every operation takes amortised logarithmic time.
"""

from __future__ import annotations

import heapq
import math

from attnserve_server.caches.cache import Cache


class Leases:
    """The caches that have a lease, by its end."""

    def __init__(self) -> None:
        """No caches."""
        # (a time no later than the lease's end, order of entry, cache); exactly one for each cache in `_entered`.
        self._ends: list[tuple[float, int, Cache]] = []
        self._entered: set[Cache] = set()
        self._entries = 0

    def enter(self, cache: Cache) -> None:
        """Enters a cache, if it has a lease and is not entered already."""
        if cache.ttl is None or cache in self._entered:
            return
        self._entered.add(cache)
        self._entries += 1
        heapq.heappush(self._ends, (cache.expires, self._entries, cache))

    def leave(self, cache: Cache) -> None:
        """Removes a cache for good."""
        self._entered.discard(cache)
        if len(self._ends) > 2 * len(self._entered) + 64:
            self._ends = [entry for entry in self._ends if entry[2] in self._entered]
            heapq.heapify(self._ends)

    def first(self) -> Cache | None:
        """The cache not in use whose lease ends, or ended, first. Caches in use are removed: they are entered again
        when nothing holds them any more.
        """
        while self._ends:
            end, order, cache = self._ends[0]
            if cache not in self._entered:
                heapq.heappop(self._ends)
            elif cache.users:
                heapq.heappop(self._ends)
                self._entered.remove(cache)
            elif cache.expires > end:
                heapq.heapreplace(self._ends, (cache.expires, order, cache))
            else:
                return cache
        return None

    def next_end(self) -> float:
        """When the first lease ends; infinity if none does."""
        cache = self.first()
        return math.inf if cache is None else cache.expires
