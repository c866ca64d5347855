"""Evicts the caches whose lease has ended, some at a time, so that thousands of them do not keep the event loop.

In: a store and a clock. Out: nothing. Whoever needs the room of such a cache evicts it (`store.py`), and nobody finds
it any more; so nothing depends on this, but what it frees is seen to be free. A scrape would otherwise find the caches
of all the time since the last one. On the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Final

from attnserve_server.caches.register import Register
from attnserve_server.host.loop_slices import LONGEST_SECONDS, SLICE_SECONDS

EVERY_S: Final = 1.0
"""How often it looks for them."""

PAUSE: Final = 9
"""How many times as long as caches were evicted the loop then has for others."""


class Expiry:
    """The end of leases, in one store."""

    def __init__(self, store: Register, clock: Callable[[], float] = monotonic) -> None:
        """`clock` is the one of the leases."""
        self._store = store
        self._clock = clock
        self._next: asyncio.TimerHandle | None = None
        """Evicts more."""
        self._next_look: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Looks again and again from now on."""
        self._next_look = asyncio.get_running_loop().call_later(EVERY_S, self.begin)
        self.look()

    def end(self) -> None:
        """Looks no more, and evicts no more."""
        for timer in (self._next, self._next_look):
            if timer is not None:
                timer.cancel()

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
