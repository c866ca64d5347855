"""Turns at reading messages: all streams of one caller together get what one stream gets, so that a caller with many of
them does not keep the event loop from others.

In: streams that have a message to read. Out: when they may. Whoever reads for long lets the loop turn in between, and
the caller's other streams wait for as long as that takes. No gRPC, no clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from typing import Final
from weakref import WeakValueDictionary

MAX_TURN_SECONDS: Final = 0.005
"""About how long one caller's messages are read before the loop turns to others' messages and replies."""

CALLED: Final = 8
"""How many of those in line are called at a time, so that several with little to read are done in one turn of the loop.
"""


class _Place:
    """A place in line."""

    __slots__ = ("call",)

    def __init__(self) -> None:
        self.call: asyncio.Future[None] | None = None


class ReadingTurn:
    """The turns of one caller. Its streams `wait` unless it `is_free`, `begin` to read a message, and `end` that."""

    def __init__(self) -> None:
        self.is_free = True
        """Whether a message that has arrived may be read at once."""
        self._reading = False
        self._spent = 0.0
        self._line: deque[_Place] = deque()
        self._is_over = False
        """Whether the loop has to turn before more is read."""
        self._next: asyncio.Handle | None = None

    def begin(self) -> None:
        """A message is being read from now on; `end` follows."""
        self._reading = True
        self.is_free = False

    async def wait(self) -> None:
        """Waits until a message may be read, which is to be begun at once."""
        place = _Place()
        self._line.append(place)
        try:
            while self._reading or self._is_over or self._line[0] is not place:
                place.call = asyncio.get_running_loop().create_future()
                await place.call
        except asyncio.CancelledError:
            if self._next is None and not self._reading:  # it may have been called: now others are, if there are any
                self._call_soon()
            raise
        finally:
            self._line.remove(place)

    def end(self, begin: float, now: float) -> None:
        """A message has been read. `begin` is when that began, or when the loop turned last meanwhile."""
        self._reading = False
        self._spent += now - begin
        self._is_over = self._spent >= MAX_TURN_SECONDS
        if (self._is_over or self._line) and self._next is None:
            self._call_soon()
        self.is_free = not (self._is_over or self._line)

    def _call_soon(self) -> None:
        self._next = asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """The loop has turned: calls those who are next in line."""
        self._next = None
        self._is_over = False
        self._spent = 0.0
        for place, _ in zip(self._line, range(CALLED), strict=False):
            if place.call is not None and not place.call.done():
                place.call.set_result(None)
        self.is_free = not (self._reading or self._line)


class ReadingTurns:
    """The turns of all callers."""

    def __init__(self) -> None:
        self._by_share: WeakValueDictionary[Hashable, ReadingTurn] = WeakValueDictionary()

    def of(self, share: Hashable) -> ReadingTurn:
        """The turns of one caller, for a stream of it to keep."""
        turn = self._by_share.get(share)
        if turn is None:
            turn = self._by_share[share] = ReadingTurn()
        return turn
