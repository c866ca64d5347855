"""Functions that are to run later, all in one thread: thousands of calls may wait for their next attempt.

In: delays and functions, which must not block. Out: their calls, in the order in which they are due. The thread lives
until the last of them is due, or until the timers are closed.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count

from attnserve._interrupts import DelayedInterrupt


class Timer:
    """A function that is to run. Any thread may cancel it, even a finalizer that interrupts whatever holds a lock."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[], object]) -> None:
        self.function: Callable[[], object] | None = function

    def cancel(self) -> None:
        """Keeps it from running, unless it has begun."""
        self.function = None


class Timers:
    """What is to run, and the thread that runs it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Timer]] = []
        self._numbers = count()
        self._running = False

    def later(self, seconds: float, function: Callable[[], object]) -> Timer:
        """Runs a function after some seconds. RuntimeError if there is no thread for it."""
        timer = Timer(function)
        entry = time.monotonic() + seconds, next(self._numbers), timer
        with DelayedInterrupt(), self._changed:
            heapq.heappush(self._due, entry)
            if self._running:
                if self._due[0] is entry:
                    self._changed.notify()
                return timer
            self._running = True
            try:
                threading.Thread(target=self._run, name="attnserve-timers", daemon=True).start()
            except BaseException:
                self._running = False
                self._due.remove(entry)
                raise
        return timer

    def close(self) -> None:
        """Keeps everything from running that has not begun."""
        with DelayedInterrupt(), self._changed:
            self._due.clear()
            self._changed.notify()

    def _run(self) -> None:
        while (timer := self._next()) is not None:
            if (function := timer.function) is not None:
                function()
            del timer, function  # keep nothing alive while waiting for the next

    def _next(self) -> Timer | None:
        """Waits until the next timer is due, and returns it; it may be cancelled by then. None if none is left."""
        with self._changed:
            while self._due:
                due, _, timer = self._due[0]
                left = due - time.monotonic()
                if left <= 0 or timer.function is None:
                    heapq.heappop(self._due)
                    return timer
                del timer
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            self._running = False
            return None
