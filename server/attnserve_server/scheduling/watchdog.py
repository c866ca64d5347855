"""A thread that sees to it that nobody waits for ever: for a batch that does not end, or a loop that does not turn.

In: the engine, and how long the device may take beyond what its work accounts for. Out: nothing as long as all is well.
A batch that is stuck beside the loop fails the engine, which tells all callers. Where the loop itself is stuck, by a
batch that runs on it or by a bug, nobody can be told anything but by the end of the process.

Time is counted in beats, of which a process that is suspended has none: it is not stuck when it goes on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from attnserve_server.scheduling.engine import Engine

logger = logging.getLogger(__name__)

BEATS: Final = 20
"""How often it looks within the time that it allows."""
LONGEST_BEAT_S: Final = 5.0
SLOWEST_FLOPS: Final = 1e8
"""What any device computes in a second, whatever is asked: a tenth of what one slow core does with narrow heads."""
FAILED: Final = 4
"""The exit status of a server whose device failed."""


def end(why: str) -> None:
    """Ends the process at once, whatever it does."""
    logger.critical("%s; ending, so that it is started again", why)
    logging.shutdown()
    os._exit(FAILED)


class Watchdog:
    """Watches an engine from its start on. Made on the engine's loop; `patience` is in seconds."""

    def __init__(self, engine: Engine, patience: float, end: Callable[[str], object] = end) -> None:
        self._engine = engine
        self._patience = patience
        self._end = end
        self._beat_s = min(patience / BEATS, LONGEST_BEAT_S)
        self._loop = asyncio.get_running_loop()
        # Told by when it began: a batch holds messages, results and layers, and is not to live until the next beat.
        self._oldest: float | None = None
        self._batch_beats = 0
        self._unanswered = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="attnserve-watchdog", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._beat_s):
            if self._unanswered * self._beat_s > self._patience:
                self._end(f"the event loop has been stuck for {self._patience:g} s")
                return
            self._unanswered += 1
            try:
                self._loop.call_soon_threadsafe(self._beat)
            except RuntimeError:
                return  # the loop is closed

    def _beat(self) -> None:
        """On the loop: it turns, and the oldest batch that runs is looked at."""
        self._unanswered = 0
        worker = self._engine.worker
        oldest = worker.runs[0].begin if worker.runs else None
        self._batch_beats = self._batch_beats + 1 if oldest == self._oldest else 0
        self._oldest = oldest
        allowed = self._patience + worker.cost / SLOWEST_FLOPS  # what it has beside that may be computed first
        if oldest is not None and self._batch_beats * self._beat_s > allowed:
            self._engine.fail(f"a batch has been computed for more than {allowed:.3g} s, and counts as stuck")
