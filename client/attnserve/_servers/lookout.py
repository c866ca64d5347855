"""Looks, again and again, which servers there are: in a thread of its own, because looking may take its time.

In: what says which there are, and how often to ask it. Out: its answers, to whoever wants them. Asked to, it looks at
once, but not more often than once a second.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

LEAST_PAUSE: Final = 1.0

logger = logging.getLogger("attnserve")


class Lookout:
    """A thread that looks which servers there are."""

    def __init__(
        self, look_up: Callable[[], Sequence[str]], interval: float, deliver: Callable[[Sequence[str]], object]
    ) -> None:
        """`deliver` is called in the thread, every `interval` seconds and whenever it is asked to look."""
        self._look_up = look_up
        self._interval = interval
        self._deliver = deliver
        self._asked = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="attnserve-lookout", daemon=True).start()

    def ask(self) -> None:
        """Has it look soon."""
        self._asked.set()

    def close(self) -> None:
        """Ends it; what it delivers afterwards must not matter."""
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
            except Exception as error:  # those that are known are used on
                logger.warning("the servers could not be looked up: %s", error)
            if self._closed.wait(min(LEAST_PAUSE, self._interval)):
                return
