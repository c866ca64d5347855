"""Evicts the caches whose lease has ended, some at a time, so that thousands of them do not keep the event loop.

In: a store and a clock. Out: nothing. Whoever needs the room of such a cache evicts it (`store.py`), and nobody finds
it any more; so nothing depends on this, but what it frees is seen to be free. On the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Final

from attnserve_server.caches.register import Register

SLICE_SECONDS: Final = 0.001
"""About how long caches are evicted before the loop turns to others. To free one takes some microseconds for each layer
and each page.
"""
PAUSE: Final = 9
"""How many times as long the loop then has for others."""
LONGEST_SECONDS: Final = 0.3
"""No slice counts for more: it may have taken longer only because the process was suspended meanwhile."""


class Expiry:
    """The end of leases, in one store."""

    def __init__(self, store: Register, clock: Callable[[], float] = monotonic) -> None:
        """`clock` is the one of the leases."""
        self._store = store
        self._clock = clock
        self._next: asyncio.TimerHandle | None = None
        """Evicts more."""

    def look(self) -> None:
        """Evicts all caches whose lease has ended: now, or if they are many, some of them later."""
        if self._next is None:
            self._evict()

    def _evict(self) -> None:
        self._next = None
        begin, now = perf_counter(), self._clock()
        while self._store.expire(now):
            if (took := perf_counter() - begin) >= SLICE_SECONDS:
                pause = PAUSE * min(took, LONGEST_SECONDS)
                self._next = asyncio.get_running_loop().call_later(pause, self._evict)
                return
