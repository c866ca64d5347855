"""Settles those futures that have callbacks. It has a thread of its own for this, since a callback may block.

In: futures and their outcomes, from threads that have other things to do. Out: settled futures, one after the other, in
the order in which they came. The thread lives as long as there is something to settle.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from attnserve._interrupts import DelayedInterrupt
from attnserve._transports.thread_future import CallFuture


class Callbacks:
    """A queue of futures to settle, and the thread that settles them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: deque[tuple[CallFuture[Any, Any], Any]] = deque()
        self._running = False

    def settle(self, future: CallFuture[Any, Any], outcome: Any) -> None:
        """Queues a future to be settled with its outcome."""
        with DelayedInterrupt():
            with self._lock:
                self._due.append((future, outcome))
                if self._running:
                    return
                self._running = True
            try:
                threading.Thread(target=self._run, name="attnserve-callbacks", daemon=True).start()
                return
            except RuntimeError:  # no thread can be started: settle it here
                pass
        self._run()

    def _run(self) -> None:
        while (due := self._next()) is not None:
            future, outcome = due
            future.settle(outcome)
            del due, future, outcome  # keep nothing alive while the next one is settled

    def _next(self) -> tuple[CallFuture[Any, Any], Any] | None:
        with self._lock:
            if self._due:
                return self._due.popleft()
            self._running = False
            return None
