"""A thread that makes sure that nobody waits forever, for a batch that does not end or an event loop that is stuck.

In: the engine, and how long the device may take beyond what its work accounts for. Out: nothing as long as all is well.
A batch that is stuck in a thread fails the engine, which tells all callers. If the loop itself is stuck, because of a
batch that runs on it or a bug, only the end of the process can tell callers.

Time is counted in beats. A suspended process has none, so that it does not count as stuck when it resumes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from attnserve_server.exit_statuses import DEVICE_FAILED

if TYPE_CHECKING:
    from attnserve_server.scheduling.engine import Engine

logger = logging.getLogger(__name__)

BEATS: Final = 20
"""How often it checks within the time that it allows."""
LONGEST_BEAT_S: Final = 5.0
SLOWEST_FLOPS: Final = 1e8
"""FLOP/s that any device reaches on any request: a tenth of what one slow core does with narrow heads."""

LAST_WORDS_S: Final = 1.0
"""How long the end waits until the log says why."""


def end(why: str) -> None:
    """Ends the process at once, whatever it is doing, and whatever keeps the log from being written."""
    try:
        saying = threading.Thread(target=_say, args=(why,), name="attnserve-last-words", daemon=True)
        saying.start()
        saying.join(LAST_WORDS_S)
    finally:
        os._exit(DEVICE_FAILED)


def _say(why: str) -> None:
    logger.critical("%s; ending, so that it is started again", why)
    logging.shutdown()


class Watchdog:
    """Watches an engine. Made on the engine's loop; `patience` is in seconds."""

    def __init__(self, engine: Engine, patience: float, end: Callable[[str], object] = end) -> None:
        self._engine = engine
        self._patience = patience
        self._end = end
        self._beat_s = min(patience / BEATS, LONGEST_BEAT_S)
        self._loop = asyncio.get_running_loop()
        # Of the oldest batch, only its start time: a batch holds messages, results and layers, and must not be kept
        # until the next beat.
        self._oldest: float | None = None
        self._batch_beats = 0
        self._unanswered = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="attnserve-watchdog", daemon=True)

    def start(self) -> None:
        """Starts watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stops watching."""
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
        """On the loop, which is therefore not stuck: checks the oldest running batch."""
        self._unanswered = 0
        worker = self._engine.worker
        oldest = worker.runs[0].begin if worker.runs else None
        self._batch_beats = self._batch_beats + 1 if oldest == self._oldest else 0
        self._oldest = oldest
        allowed = self._patience + worker.cost / SLOWEST_FLOPS  # others may be computed before the oldest
        if oldest is not None and self._batch_beats * self._beat_s > allowed:
            self._engine.fail(f"a batch has been computed for more than {allowed:.3g} s, and counts as stuck")
