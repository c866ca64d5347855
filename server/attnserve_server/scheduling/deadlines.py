"""Whether a request can be answered before its deadline at the measured rate: one that cannot is refused at once.

In: a request, what waits before it, and when the device will be free. Out: nothing, or the error. No clock.
"""

from __future__ import annotations

from typing import Final

from attnserve_server.errors import DeadlineUnreachable
from attnserve_server.scheduling.batching import BatchQueue
from attnserve_server.scheduling.entry import Entry
from attnserve_server.scheduling.pace import Pace

TRIAL_PAUSE: Final = 9
"""An idle device tries a request that should be too late by the measured rate, if the last trial ended this many times
its own duration ago: at most a tenth of the device's time goes into replies that nobody may wait for."""


class Deadlines:
    """The deadlines of one engine's requests. Times are those of `Entry`."""

    def __init__(self, queue: BatchQueue[Entry], pace: Pace) -> None:
        self._queue = queue
        self._pace = pace
        self._trying = False
        self._next_trial = 0.0

    def check(self, entry: Entry, free_at: float | None) -> bool:
        """Raises DeadlineUnreachable if an entry, and what is due before it, should take longer than its caller waits,
        as far as is known. `free_at` is when the device should be done with what it has; None if it has nothing.

        Such an entry with nothing before it is still computed now and then: nothing else would correct a wrong rate.
        Returns whether this is such a trial: once it has been admitted, `begin_trial` takes note of it.
        """
        now = entry.arrival + entry.decode
        least = self._pace.least_seconds_of(entry.kind, entry.cost)
        left = entry.deadline - now
        if free_at is None and not self._queue.requests:
            if least <= left:
                return False
            if now >= self._next_trial:
                return True
            raise DeadlineUnreachable(least, left)
        if free_at is not None:
            least += max(0.0, free_at - now)
        if least + self._queue.least_seconds <= left:  # the usual case; does not look at all waiting entries
            return False
        least += self._queue.least_seconds_before(entry.caller, entry.priority)
        if least > left:
            raise DeadlineUnreachable(least, left)
        return False

    def begin_trial(self, entry: Entry) -> None:
        """Takes note that an entry will be computed as a trial."""
        least = self._pace.least_seconds_of(entry.kind, entry.cost)
        self._trying, self._next_trial = True, entry.arrival + entry.decode + TRIAL_PAUSE * least

    def computed(self, now: float, seconds: float) -> None:
        """Takes note that a batch was computed by `now`, in `seconds`: the trial, if there was one."""
        if self._trying:
            self._trying, self._next_trial = False, now + TRIAL_PAUSE * seconds
