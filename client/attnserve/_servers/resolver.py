"""Looks up a client's servers at intervals, in a thread of its own, because a look-up may block.

In: the look-up function, and the interval. Out: its results, passed to a callback. It can be asked to look at once, but
always pauses between looks, for a second or for the interval if that is shorter.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from attnserve._interrupts import DelayedInterrupt

LEAST_PAUSE: Final = 1.0

logger = logging.getLogger("attnserve")


class Resolver:
    """A thread that looks up which servers there are."""

    def __init__(
        self, look_up: Callable[[], Sequence[str]], interval: float, deliver: Callable[[Sequence[str]], object]
    ) -> None:
        """`deliver` gets each result, in the thread: every `interval` seconds and whenever `ask` is called."""
        self._look_up = look_up
        self._interval = interval
        self._deliver = deliver
        self._asked = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="attnserve-resolver", daemon=True).start()

    def ask(self) -> None:
        """Asks for a look-up soon."""
        with DelayedInterrupt():  # an event that is interrupted may keep its lock
            self._asked.set()

    def close(self) -> None:
        """Ends the thread; one more result may still be delivered, and must be ignored."""
        with DelayedInterrupt():
            self._closed.set()
            self._asked.set()

    def _run(self) -> None:
        while True:
            self._asked.wait(self._interval)
            self._asked.clear()
            if self._closed.is_set():
                return
            try:
                self._deliver(self._look_up())
            except BaseException as error:  # whatever the caller's function raises; the known servers stay in use
                logger.warning("the servers could not be looked up: %r", error)
            if self._closed.wait(min(LEAST_PAUSE, self._interval)):
                return
