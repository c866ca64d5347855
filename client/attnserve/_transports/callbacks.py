"""Futures that call others back, settled where nobody else is kept waiting: whoever is called may wait for anything.

In: futures and their outcomes, from threads that have other things to do. Out: settled futures, one after the other, in
the order in which they came. The thread is there as long as there is something to settle.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from attnserve._transports.thread_future import CallFuture


class Callbacks:
    """The futures that are to be settled by a thread of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: deque[tuple[CallFuture[Any, Any], Any]] = deque()
        self._running = False

    def settle(self, future: CallFuture[Any, Any], outcome: Any) -> None:
        """Has a future get its outcome."""
        with self._lock:
            self._due.append((future, outcome))
            if self._running:
                return
            self._running = True
        try:
            threading.Thread(target=self._run, name="attnserve-callbacks", daemon=True).start()
        except RuntimeError:  # there is no thread to be had: here, then
            self._run()

    def _run(self) -> None:
        while (due := self._next()) is not None:
            future, outcome = due
            future.settle(outcome)
            del due, future, outcome  # nothing of it is to be kept while the next is settled

    def _next(self) -> tuple[CallFuture[Any, Any], Any] | None:
        with self._lock:
            if self._due:
                return self._due.popleft()
            self._running = False
            return None
