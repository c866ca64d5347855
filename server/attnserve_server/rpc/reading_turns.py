"""Turns at reading messages, so that nobody keeps the event loop from others: neither a caller with many streams, nor
many callers together.

In: streams and calls that have a message to read. Out: when they may. Messages are read for about `SLICE_SECONDS`, of
whichever callers. Then the loop turns before more are read, for whoever needs little of it: a unary call takes ten
turns or so, from the connection to the reply, and a new stream nearly as many.

Who reads next is the caller that has read least lately: all streams and calls of one caller together get what one
stream gets.
(By start times, as in `scheduling.fairness`.) No gRPC, no clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from heapq import nsmallest
from itertools import islice
from typing import Final
from weakref import WeakValueDictionary

from attnserve_server.host.loop_slices import LONGEST_SECONDS, SLICE_SECONDS

TURNS: Final = 3
"""How often the loop turns for each slice that was read: a message that is read as a whole may take several."""
MOST_KEPT: Final = 64
"""How many callers without streams are remembered, with what they have read."""
CALLED: Final = 16
"""How many of those in line are called at a time, so that several with little to read are done in one turn of the loop.
"""


class _Place:
    """A place in line."""

    __slots__ = ("call",)

    call: asyncio.Future[None]
    """Done once it is called. Known when it waits."""


class ReadingTurn:
    """The turns of one caller. Its streams `wait` unless it `is_free`, `begin` to read a message, and `end` that. Its
    unary calls `wait` if it `is_ahead`; if they may take long, unless it `is_free`; and those that did are `read`.
    """

    def __init__(self, turns: ReadingTurns) -> None:
        self._turns = turns
        self._reading = False
        self._line: deque[_Place] = deque()
        self.until = 0.0
        """Up to when, in virtual time, it has used its share of the loop."""

    @property
    def is_free(self) -> bool:
        """Whether a message that has arrived may be read at once."""
        return not (self._reading or self._line) and self._turns.lets_in(self)

    @property
    def is_ahead(self) -> bool:
        """Whether it has had more of the loop than others, who are to have some now."""
        return self.until > self._turns.now and not self.is_free

    def read(self, seconds: float) -> None:
        """A message has been read as a whole, without `begin` and `end`: the loop has not turned meanwhile."""
        self._turns.begins(self)
        self._turns.took(self, seconds)
        self._turns.keep(self)

    def begin(self) -> None:
        """A message is being read from now on; `end` follows."""
        self._reading = True
        self._turns.begins(self)

    async def wait(self) -> None:
        """Waits until a message may be read, which is to be begun at once."""
        place = _Place()
        self._line.append(place)
        await self._wait(place, is_reading=False)

    def is_over(self, seconds: float) -> bool:
        """Whether to `pause`, after reading for so long since the loop last turned."""
        return self._turns.are_over(seconds)

    async def pause(self, seconds: float) -> None:
        """Lets the loop turn for others while a message is being read, which has taken so long since the loop last
        turned. The caller's other messages wait.
        """
        place = _Place()
        self._line.appendleft(place)
        self._turns.took(self, seconds)
        await self._wait(place, is_reading=True)

    async def _wait(self, place: _Place, *, is_reading: bool) -> None:
        """Waits in line until it is this place's turn, and leaves the line. `is_reading` says for whom it is: whoever
        pauses, or the next one.
        """
        self._turns.enter(self)
        try:
            while True:
                place.call = asyncio.get_running_loop().create_future()
                await place.call
                if self._reading is is_reading and self._turns.are_open and self._line[0] is place:
                    return
        finally:
            self._line.remove(place)
            if not self._line:
                self._turns.leave(self)

    def end(self, seconds: float) -> None:
        """A message has been read, which has taken so long since it began, or since the loop last turned meanwhile."""
        self._reading = False
        self._turns.took(self, seconds)

    def call(self, most: int) -> None:
        """Calls the first in line, at most so many. Nobody follows one who pauses."""
        for place in islice(self._line, 1 if self._reading else most):
            if not place.call.done():
                place.call.set_result(None)


class ReadingTurns:
    """The turns of all callers."""

    def __init__(self) -> None:
        self._by_share: WeakValueDictionary[Hashable, ReadingTurn] = WeakValueDictionary()
        self._waiting: dict[ReadingTurn, None] = {}
        """Those with streams in line."""
        self._spent = 0.0
        """How long messages have been read since the loop turned."""
        self._left = 0
        """How often the loop still has to turn before more are read."""
        self.now = 0.0
        """Virtual time: the start of whoever began last."""
        self._kept: deque[ReadingTurn] = deque(maxlen=MOST_KEPT)
        self._next: asyncio.Handle | None = None
        """Calls `_turned`. There is one for as long as anybody is in line, or may not read."""

    def of(self, share: Hashable) -> ReadingTurn:
        """The turns of one caller, for a stream or a call of it to keep."""
        turn = self._by_share.get(share)
        if turn is None:
            turn = self._by_share[share] = ReadingTurn(self)
        return turn

    @property
    def are_open(self) -> bool:
        """Whether anybody may read before the loop turns."""
        return not self._left

    def lets_in(self, turn: ReadingTurn) -> bool:
        """Whether a caller who is not in line may read at once: not if it has read more than those who are."""
        return self.are_open and (not self._waiting or turn.until <= self.now)

    def begins(self, turn: ReadingTurn) -> None:
        """A caller begins to read."""
        turn.until = self.now = max(turn.until, self.now)

    def keep(self, turn: ReadingTurn) -> None:
        """Remembers a caller for a while, though it may have no stream."""
        self._kept.append(turn)

    def are_over(self, seconds: float) -> bool:
        """Whether the loop has to turn once somebody has read for so long, beside what others read before."""
        return self._spent + seconds >= SLICE_SECONDS

    def took(self, turn: ReadingTurn, seconds: float) -> None:
        """A caller has read for so long."""
        seconds = min(seconds, LONGEST_SECONDS)
        turn.until += seconds
        self._spent += seconds
        if self.are_over(0.0):
            self._left = max(1, self._left, int(TURNS * self._spent / SLICE_SECONDS))
        # Little counts on when the loop has turned, which costs less than to take note of each turn.
        if self._spent > SLICE_SECONDS / 8:
            self._go_on()

    def enter(self, turn: ReadingTurn) -> None:
        """A stream of a caller is in line."""
        self._waiting[turn] = None
        self._go_on()

    def leave(self, turn: ReadingTurn) -> None:
        """No stream of a caller is in line any more."""
        del self._waiting[turn]

    def _go_on(self) -> None:
        """Has `_turned` called when the loop has turned."""
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turned)

    def _turned(self) -> None:
        """The loop has turned: once it has done so often enough, calls those who are next in line."""
        self._next = None
        self._spent = 0.0
        if self._left:
            self._left -= 1
        if self.are_open:
            next_ones = nsmallest(CALLED, self._waiting, key=lambda each: each.until)
            for turn in next_ones:
                turn.call(CALLED // len(next_ones))
        if self._waiting or self._left:
            self._go_on()
