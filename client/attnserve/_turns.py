"""In which order operations use caches: in that in which they were asked for, those that only read side by side.

In: turns, each for one or many caches. Out: the call of a turn's `start` when it has come, or of its `expire` when it
has not in time. No I/O and no clock but `later`, which both clients bring.

A turn enters the lines of all its caches at once, so that two operations over the same caches never wait for each
other.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Final, Protocol


class Timer(Protocol):
    """A call that is yet to be made."""

    def cancel(self) -> object:
        """Leaves it out."""


class Line:
    """The operations that use a cache, or wait for it."""

    __slots__ = ("_alone", "_users", "_waiting")

    def __init__(self) -> None:
        self._users = 0
        self._alone = False
        self._waiting: deque[Turn] = deque()

    def enter(self, turn: Turn) -> bool:
        """Takes a turn. Whether it may use the cache at once."""
        if self._waiting or not self._has_room(turn):
            self._waiting.append(turn)
            return False
        self._admit(turn)
        return True

    def leave(self, turn: Turn) -> list[Turn]:
        """Forgets a turn that used the cache or waited for it. Returns those that may use it from now on."""
        if self in turn.blocked_by:
            self._waiting.remove(turn)
        else:
            self._users -= 1
        admitted = []
        while self._waiting and self._has_room(self._waiting[0]):
            admitted.append(self._waiting.popleft())
            self._admit(admitted[-1])
        return admitted

    def _has_room(self, turn: Turn) -> bool:
        return not self._users or not (self._alone or turn.alone)

    def _admit(self, turn: Turn) -> None:
        self._users += 1
        self._alone = turn.alone


class Turn(ABC):
    """The place of an operation in the lines of its caches."""

    __slots__ = ("alone", "blocked_by", "deadline", "lines")

    def __init__(self, lines: Sequence[Line], alone: bool, deadline: float) -> None:
        self.lines: Final = lines
        """The lines of its caches, each once."""
        self.alone: Final = alone
        """Whether it must have its caches for itself: it changes them."""
        self.deadline: Final = deadline
        """Until when it waits, in seconds of `time.monotonic`."""
        self.blocked_by: set[Line] = set()
        """The lines in which it waits."""

    @abstractmethod
    def start(self) -> None:
        """Called when the turn has come, from any thread."""

    @abstractmethod
    def expire(self) -> None:
        """Called when the deadline has passed before that; the turn is then still to be left."""


class Turns:
    """The turns of all caches of one client."""

    def __init__(self, later: Callable[[float, Callable[[], object]], Timer]) -> None:
        """`later` makes a call after so many seconds."""
        self._later = later
        self._lock = threading.Lock()
        self._waiting: set[Turn] = set()
        self._ready: deque[Turn] = deque()
        self._starting = False
        self._timer: Timer | None = None
        self._due = inf

    def take(self, turn: Turn) -> None:
        """Enters a turn; it starts at once if nothing is before it."""
        with self._lock:
            turn.blocked_by = {line for line in turn.lines if not line.enter(turn)}
            waits = bool(turn.blocked_by)
            if waits and turn.deadline < inf:
                self._waiting.add(turn)
                self._watch(turn.deadline)
        if not waits:
            turn.start()

    def leave(self, turn: Turn) -> None:
        """Ends a turn, begun or not, and starts those that waited for it alone."""
        with self._lock:
            for line in turn.lines:
                for follower in line.leave(turn):
                    follower.blocked_by.discard(line)
                    if not follower.blocked_by:
                        self._waiting.discard(follower)
                        self._ready.append(follower)
            self._waiting.discard(turn)
            if not self._waiting and self._timer is not None:  # it would keep the client alive
                self._timer.cancel()
                self._timer, self._due = None, inf
            if self._starting or not self._ready:
                return
            self._starting = True
        self._start_ready()

    def _start_ready(self) -> None:
        """Starts what is ready, one after the other: an operation that fails as it starts makes others ready, and of
        those there may be more than a stack is deep.
        """
        try:
            while (turn := self._next_ready()) is not None:
                turn.start()
        except BaseException:  # an interrupt
            with self._lock:
                self._starting = False
            raise

    def _next_ready(self) -> Turn | None:
        with self._lock:
            if self._ready:
                return self._ready.popleft()
            self._starting = False
            return None

    def _watch(self, deadline: float) -> None:
        """Has `_expire` called at a deadline, if not before. With the lock held."""
        if deadline < self._due:
            if self._timer is not None:
                self._timer.cancel()
            self._due = deadline
            self._timer = self._later(max(0.0, deadline - time.monotonic()), self._expire)

    def _expire(self) -> None:
        with self._lock:
            now = time.monotonic()
            expired = [turn for turn in self._waiting if turn.deadline <= now]
            self._waiting.difference_update(expired)
            self._timer, self._due = None, inf
            if self._waiting:
                self._watch(min(turn.deadline for turn in self._waiting))
        for turn in expired:
            turn.expire()
