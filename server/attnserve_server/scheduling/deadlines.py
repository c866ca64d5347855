"""Whether a request can be answered before its deadline, by the measured rate: what cannot is refused at once.

In: a request, what waits before it, and until when the device is busy. Out: nothing, or the error. No clock.
"""

from __future__ import annotations

from typing import Final

from attnserve_server.errors import DeadlineUnreachable
from attnserve_server.scheduling.batching import BatchQueue
from attnserve_server.scheduling.entry import Entry
from attnserve_server.scheduling.pace import Pace

TRIAL_PAUSE: Final = 9
"""What should be too late by the measured rate is tried, on an idle device, so many times as long after the last trial
as that took: a tenth of the device's time at most goes into what may be for nobody."""


class Deadlines:
    """The deadlines of one engine's requests. Times are those of `Entry`."""

    def __init__(self, queue: BatchQueue[Entry], pace: Pace) -> None:
        self._queue = queue
        self._pace = pace
        self._trying = False
        self._next_trial = 0.0

    def check(self, entry: Entry, free_at: float | None) -> None:
        """Raises DeadlineUnreachable if what is due before an entry, and the entry itself, should take longer than its
        caller waits, as far as is known. `free_at` is when the device should have computed what it computes now; None
        if that is nothing.

        What nothing is before is computed now and then all the same: nothing else would mend a rate that is wrong.
        """
        now = entry.arrival + entry.decode
        least = self._pace.least_seconds_of(entry.kind, entry.cost)
        left = entry.deadline - now
        if free_at is None and not self._queue.requests:
            if least <= left:
                return
            if now >= self._next_trial:
                self._trying, self._next_trial = True, now + TRIAL_PAUSE * least
                return
            raise DeadlineUnreachable(least, left)
        if free_at is not None:
            least += max(0.0, free_at - now)
        if least + self._queue.least_seconds <= left:  # most often, and without looking at all that waits
            return
        least += self._queue.least_seconds_before(entry.caller, entry.priority)
        if least > left:
            raise DeadlineUnreachable(least, left)

    def computed(self, now: float, seconds: float) -> None:
        """Something has been computed, by now, in so many seconds: what was tried, if anything was."""
        if self._trying:
            self._trying, self._next_trial = False, now + TRIAL_PAUSE * seconds
