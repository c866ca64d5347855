"""Turns at reading messages, so that nobody keeps the event loop from others: neither a caller with many streams, nor
many callers together.

In: streams that have a message to read. Out: when they may. Between two turns of the loop, messages are read for about
`MAX_TURN_SECONDS` in all. Then the loop turns for whoever needs little of it, as long as somebody does, but not for
longer than was read: a unary call takes ten turns or so, from the connection to the reply, and a new stream nearly as
many.

Who reads next is the caller that has read least lately: all streams of one caller together get what one stream gets.
(By start times, as in `scheduling.fairness`.) The next message of a stream comes some turns after the last, so those
who have read much more than others wait some turns for these, too. No gRPC.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from heapq import nsmallest
from math import inf
from time import perf_counter
from typing import Final
from weakref import WeakValueDictionary

MAX_TURN_SECONDS: Final = 0.005
"""About how long messages are read before the loop turns for others."""
TURNS: Final = 128
"""How often the loop turns for others while none has anything to do, at some microseconds each: they may be about to,
as when a thread of gRPC's is at work for them. Beside callers who send tiny calls without end, others had about half as
many answers with 16 turns.
"""
BUSY_SECONDS: Final = 0.00005
"""A turn of the loop that takes longer is one in which somebody had something to do."""
AHEAD_SECONDS: Final = MAX_TURN_SECONDS / 20
"""Those who have read so much more than others wait for these. Less is chance."""
CALLED: Final = 16
"""How many of those in line are called at a time, so that several with little to read are done in one turn of the loop.
"""


class _Place:
    """A place in line."""

    __slots__ = ("call",)

    def __init__(self) -> None:
        self.call: asyncio.Future[None] | None = None


class ReadingTurn:
    """The turns of one caller. Its streams `wait` unless it `is_free`, `begin` to read a message, and `end` that."""

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
            if is_reading:
                await asyncio.sleep(0)
            while self._reading is not is_reading or not self._turns.admits(self) or self._line[0] is not place:
                place.call = asyncio.get_running_loop().create_future()
                await place.call
        finally:
            self._line.remove(place)
            if not self._line:
                self._turns.leave(self)

    def end(self, seconds: float) -> None:
        """A message has been read, which has taken so long since it began, or since the loop last turned meanwhile."""
        self._reading = False
        self._turns.took(self, seconds)

    def call(self, most: int) -> int:
        """Calls the first in line, at most so many; returns how many that are. Nobody follows one who pauses."""
        called = 0
        for place in self._line:
            if called == (1 if self._reading else most):
                break
            called += 1
            if place.call is not None and not place.call.done():
                place.call.set_result(None)
        return called


class ReadingTurns:
    """The turns of all callers."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._by_share: WeakValueDictionary[Hashable, ReadingTurn] = WeakValueDictionary()
        self._waiting: dict[ReadingTurn, None] = {}
        """Those with streams in line."""
        self._horizon = inf
        """Up to when, in virtual time, those who may read now have used their shares."""
        self._spent = 0.0
        self._left = 0
        """How often the loop still has to turn, with nothing to do, before more callers may read."""
        self._since = self._turned_at = 0.0
        """Since when it turns for others, and when it turned last."""
        self._read = False
        """Whether a message was read since then."""
        self._now = 0.0
        """Virtual time: the start of whoever began last."""
        self._furthest = 0.0
        """The latest time up to which anybody has used its share."""
        self._next: asyncio.Handle | None = None

    def of(self, share: Hashable) -> ReadingTurn:
        """The turns of one caller, for a stream of it to keep."""
        turn = self._by_share.get(share)
        if turn is None:
            turn = self._by_share[share] = ReadingTurn(self)
        return turn

    def lets_in(self, turn: ReadingTurn) -> bool:
        """Whether a caller who is not in line may read at once: not if it has read more than those who are."""
        return self.admits(turn) and (not self._waiting or turn.until <= self._now)

    def admits(self, turn: ReadingTurn) -> bool:
        """Whether a caller may read once it is first in line: not if it is the turn of those who have read less."""
        return turn.until <= self._horizon

    def begins(self, turn: ReadingTurn) -> None:
        """A caller begins to read."""
        turn.until = self._now = max(turn.until, self._now)

    def are_over(self, seconds: float) -> bool:
        """Whether the loop has to turn once somebody has read for so long, beside what others read before."""
        return self._spent + seconds >= MAX_TURN_SECONDS

    def took(self, turn: ReadingTurn, seconds: float) -> None:
        """A caller has read for so long."""
        turn.until += seconds
        self._furthest = max(self._furthest, turn.until)
        self._spent += seconds
        self._read = True
        if self._spent >= MAX_TURN_SECONDS:
            self._admit(-inf)
            self._since = self._turned_at
        # What little has been read counts on in the next turn, which costs less than taking note of each turn.
        if self._spent > MAX_TURN_SECONDS / 8:
            self._go_on()

    def enter(self, turn: ReadingTurn) -> None:
        """A stream of a caller is in line."""
        self._waiting[turn] = None
        self._go_on()

    def leave(self, turn: ReadingTurn) -> None:
        """No stream of a caller is in line any more."""
        del self._waiting[turn]

    def _go_on(self) -> None:
        """Has `_turned` called when the loop has turned; again and again while anybody is in line, or may not read."""
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turned)

    def _turned(self) -> None:
        """The loop has turned: calls those in line who may read, and lets more callers read if it has turned often
        enough.
        """
        self._next = None
        self._spent = 0.0
        if not self._call() and self._horizon < inf:
            self._count()
        if self._waiting or self._horizon < inf:
            self._go_on()

    def _count(self) -> None:
        """Counts the turns of the loop in which nobody in line may read."""
        now = self._clock()
        # Whoever had something to do may soon have more to do, such as to read the next message.
        if (self._read or now - self._turned_at > BUSY_SECONDS) and now - self._since < MAX_TURN_SECONDS:
            self._left = TURNS
        self._read = False
        self._turned_at = now
        self._left -= 1
        if self._left == 0:
            self._admit(self._next_horizon() if self._horizon == -inf else inf)

    def _next_horizon(self) -> float:
        """Up to when those may read who have read less than others."""
        least = max(min((turn.until for turn in self._waiting), default=inf), self._now) + AHEAD_SECONDS
        ahead = min((turn.until for turn in self._waiting if turn.until > least), default=self._furthest)
        return ahead - AHEAD_SECONDS if ahead > least else inf

    def _call(self) -> int:
        """Calls some of those in line, of those who may read now; returns how many."""
        left = CALLED
        for turn in nsmallest(CALLED, self._waiting, key=lambda each: each.until):
            if not left or turn.until > self._horizon:
                break
            left -= turn.call(left)
        return CALLED - left

    def _admit(self, horizon: float) -> None:
        """Lets only those up to there, in virtual time, read until the loop has turned often enough."""
        self._horizon = horizon
        self._left = TURNS
        self._turned_at = self._clock()
