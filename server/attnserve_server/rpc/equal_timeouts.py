"""Timeouts of one length on one timer.

In: something to await. Out: its result, or TimeoutError. What began first is late first, so that one timer, for the
first of them, is enough. If each call had a timer of its own, to set it and to cancel it (as nearly all would be) would
take as long as all else that a call does before its message comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class EqualTimeouts:
    """Any number of timeouts of so many seconds; None is no bound. Lives on the event loop that it is first used on."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._begun: dict[asyncio.Timeout, float] = {}
        """When each began (seconds of the loop's clock), the earliest first."""
        self._timer: asyncio.TimerHandle | None = None

    async def of(self, awaitable: Awaitable[T]) -> T:
        """The result of what is awaited. Raises TimeoutError if that takes too long, and cancels it."""
        if self.seconds is None:
            return await awaitable
        async with asyncio.timeout(None) as timeout:
            loop = asyncio.get_running_loop()
            self._begun[timeout] = loop.time()
            if self._timer is None:
                self._timer = loop.call_later(self.seconds, self._end_late, self.seconds, loop)
            try:
                return await awaitable
            finally:
                self._begun.pop(timeout, None)

    def _end_late(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        """Ends what is late, and comes again when the next one may be."""
        self._timer = None
        while self._begun:
            timeout, begun = next(iter(self._begun.items()))
            if begun + seconds > loop.time():
                self._timer = loop.call_at(begun + seconds, self._end_late, seconds, loop)
                break
            del self._begun[timeout]
            timeout.reschedule(begun)
