"""The order in which operations use caches: that in which they were asked for, with readers side by side.

In: turns, each for one or more caches. Out: a call of a turn's `start` when its turn comes, or of its `expire` when its
deadline passes first. No I/O, and no clock but `time.monotonic` and `later`, which each client provides.

A turn enters the lines of all its caches at once, so that two operations on the same caches cannot deadlock.

An *interrupt*, here and in `transaction`, is an exception that a signal handler raises. It may come after any step, but
in the main thread only (see `_interrupts`); another thread can complete what it ends.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Final, Protocol

from attnserve._interrupts import DelayedInterrupt


class Timer(Protocol):
    """A scheduled call."""

    def cancel(self) -> object:
        """Cancels the call."""


class CacheLine:
    """The operations that use or wait for a cache, in the order in which they were asked for."""

    __slots__ = ("_turns",)

    def __init__(self) -> None:
        self._turns: deque[Turn] = deque()

    def enter(self, turn: Turn) -> None:
        """Adds a turn at the end."""
        self._turns.append(turn)

    def leave(self, turn: Turn) -> None:
        """Removes a turn, if it is here."""
        if turn in self._turns:
            self._turns.remove(turn)

    def has_in_front(self, turn: Turn) -> bool:
        """Whether a turn in this line may use the cache."""
        if len(self._turns) > 1 and turn is self._turns[-1] and not turn.alone:
            last = self._turns[-2]
            if last.called and not last.alone:  # a reader behind one whose turn has come: no need to go through all
                return True
        return turn in self.front()

    def followers(self, turn: Turn) -> list[Turn]:
        """The turns that may use the cache now that `turn` has left, and have not been called yet. If it was a reader,
        that is at most the first in line: no other reader waited for it in this line.
        """
        return [each for each in self.front(None if turn.alone else 1) if not each.called]

    def front(self, most: int | None = None) -> list[Turn]:
        """The turns that may use the cache: the first, and those right behind it as long as all are readers."""
        front: list[Turn] = []
        for turn in self._turns:
            if turn.left:
                continue
            if len(front) == most or (front and (turn.alone or front[0].alone)):
                break
            front.append(turn)
        return front


class Turn(ABC):
    """The place of an operation in the lines of its caches."""

    def __init__(self, lines: Sequence[CacheLine], alone: bool, deadline: float) -> None:
        self.lines: Final = lines
        """The lines of its caches, each once."""
        self.alone: Final = alone
        """Whether it needs exclusive use of its caches, because it changes them."""
        self.deadline: Final = deadline
        """When it stops waiting, in seconds of `time.monotonic`."""
        self.called = False
        """Whether the turn has come, so that it no longer waits."""
        self.left = False
        """Whether it is over."""

    @property
    def is_in_front(self) -> bool:
        """Whether it may use all its caches now."""
        return all(line.has_in_front(self) for line in self.lines)

    @abstractmethod
    def start(self) -> Callable[[], object] | None:
        """Called when the turn comes, from any thread. Returns a function for what is left to do and may take its time,
        to be called next, or None. Both are called again if an interrupt ended them.
        """

    @abstractmethod
    def expire(self) -> None:
        """Called if the deadline passes before the turn comes; `Turns.leave` must still be called."""


class Turns:
    """The turns of all caches of one client."""

    def __init__(self, later: Callable[[float, Callable[[], object]], Timer]) -> None:
        """`later` schedules a call after a number of seconds."""
        self._later = later
        self._lock = threading.Lock()
        self._waiting: set[Turn] = set()
        """The turns that wait and have a deadline."""
        self._ready: deque[Turn] = deque()
        """The turns that have been called, to be started in this order."""
        self._starter: int | None = None
        """The thread that starts them, if one does; it also starts those that become ready meanwhile."""
        self._timer: Timer | None = None
        self._due = inf
        """When the timer calls `_expire`."""

    def take(self, turn: Turn) -> None:
        """Enters a turn, which starts at once if it need not wait. If an interrupt ends this, `leave` must still be
        called.
        """
        with self._lock:
            for line in turn.lines:
                line.enter(turn)
            turn.called = starts = turn.is_in_front
            if not starts and turn.deadline < inf:
                self._waiting.add(turn)
                self._watch(turn.deadline)
        if starts and (rest := turn.start()) is not None:
            rest()

    def leave(self, turn: Turn) -> None:
        """Ends a turn, whether it has begun or not, and starts the turns that waited only for it."""
        turn.left = True
        try:
            self._call_followers(turn)
        except BaseException:  # an interrupt: another thread completes this
            with self._lock:
                if self._starter == threading.get_ident():
                    self._starter = None
            self._later(0.0, partial(self._call_followers, turn))
            raise

    def _call_followers(self, turn: Turn) -> None:
        """Starts the turns that waited for one that has left. Safe to repeat: what is done is not done again."""
        with self._lock:
            for line in turn.lines:
                line.leave(turn)
            for line in turn.lines:
                for follower in line.followers(turn):
                    if follower.is_in_front:
                        self._waiting.discard(follower)
                        self._ready.append(follower)
                        follower.called = True
            self._waiting.discard(turn)
            if not self._waiting:  # the timer would keep the client alive
                self._unwatch()
            if self._starter is not None or not self._ready:
                return
            self._starter = threading.get_ident()
        # In a loop, not by recursion: an operation that fails as it starts makes others ready, perhaps more than the
        # stack is deep.
        while (ready := self._next_ready()) is not None:
            rest = None
            try:
                with DelayedInterrupt():  # an interrupt is for the turn that leaves: others begin all the same
                    if not ready.left:
                        rest = ready.start()
                    self._ready.popleft()
            finally:
                if rest is not None:
                    self._finish(rest)

    def _finish(self, rest: Callable[[], object]) -> None:
        try:
            rest()
        except BaseException:  # an interrupt: as in `leave`
            self._later(0.0, rest)
            raise

    def _next_ready(self) -> Turn | None:
        with self._lock:
            if self._ready:
                return self._ready[0]
            self._starter = None
            return None

    def _watch(self, deadline: float) -> None:
        """Schedules `_expire` at a deadline, unless it is scheduled earlier. The lock must be held."""
        if deadline < self._due:
            # This may raise: then the old timer stays.
            timer = self._later(max(0.0, deadline - time.monotonic()), self._expire)
            self._unwatch()
            self._timer, self._due = timer, deadline

    def _unwatch(self) -> None:
        """Schedules nothing any more. The lock must be held."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._due = None, inf

    def _expire(self) -> None:
        with self._lock:
            now = time.monotonic()
            expired = [turn for turn in self._waiting if turn.deadline <= now]
            self._waiting.difference_update(expired)
            self._unwatch()  # the timer may be another: one that is cancelled too late still calls this
            if self._waiting:
                with suppress(RuntimeError):  # no thread can be started: the next turn that waits sets a timer
                    self._watch(min(turn.deadline for turn in self._waiting))
        for turn in expired:
            turn.expire()
