"""The event loop of a server, which measures how much of its time it is busy.

In: nothing. Out: a loop for `asyncio.Runner`. All requests are decoded and encoded on it, and small ones computed: once
it is busy all of the time, further requests wait in their connections, where no queue sees them.
"""

from __future__ import annotations

import asyncio
import selectors
from time import perf_counter


class EventLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop for sockets, with a clock."""

    def __init__(self) -> None:
        self._waits = _Selector()
        super().__init__(self._waits)
        self._made = perf_counter()

    @property
    def busy_seconds(self) -> float:
        """The time since the loop was made in which it did not wait for events. Read on the loop."""
        return perf_counter() - self._made - self._waits.seconds


class _Selector(selectors.DefaultSelector):
    """Waits for sockets, and adds up for how long, at a cost of 0.3 us each time that the loop turns."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        begin = perf_counter()
        ready = super().select(timeout)
        self.seconds += perf_counter() - begin
        return ready
