"""Whether a request can be answered before its deadline at the measured rate: one that cannot is refused at once.

In: a request, what waits before it, and when the device will be free. Out: nothing, or the error. No clock.
"""

from __future__ import annotations

from typing import Final
from weakref import ref

from attnserve_server.errors import DeadlineUnreachable
from attnserve_server.scheduling.admission import Admission
from attnserve_server.scheduling.batching import Batch, BatchQueue
from attnserve_server.scheduling.entry import Entry

TRIAL_PAUSE: Final = 9
"""A request that should be too late by the measured rate is computed all the same, as a trial, if the last trial ended
this many times its own duration ago. So at most a tenth of the device's time goes into replies that may be too late."""


class Deadlines:
    """The deadlines of one engine's requests. Times are those of `Entry`."""

    def __init__(self, queue: BatchQueue[Entry], admission: Admission) -> None:
        self._queue = queue
        self._admission = admission
        self._pace = admission.pace
        self._trial: ref[Entry] | None = None
        """The last trial, until it has been computed. It may end without that, and its message may be large: so this
        does not keep it.
        """
        self._next_trial = 0.0

    def check(self, entry: Entry, free_at: float | None) -> bool:
        """Raises DeadlineUnreachable if an entry, and what is due before it, should take longer than its caller waits,
        as far as is known. `free_at` is when the device should be done with what it has; None if it has nothing.

        Now and then, such an entry is computed all the same, if its own turn should come in time and nothing of its
        kind is in flight: nothing else would correct a wrong rate. Returns whether this is such a trial: once it has
        been admitted, `begin_trial` takes note of it.
        """
        now = entry.arrival + entry.decode
        own = self._pace.least_seconds_of(entry.kind, entry.cost)
        before = 0.0 if free_at is None else max(0.0, free_at - now)
        left = entry.deadline - now
        if own + before + self._queue.least_seconds <= left:  # the usual case; does not look at all waiting entries
            return False
        before += self._queue.least_seconds_before(entry.caller, entry.priority)
        if own + before <= left:
            return False
        if before > left or now < self._next_trial or self._admission.awaits(entry.kind):
            raise DeadlineUnreachable(own + before, left)
        return True

    def begin_trial(self, entry: Entry) -> None:
        """Takes note that an entry will be computed as a trial."""
        least = self._pace.least_seconds_of(entry.kind, entry.cost)
        self._trial, self._next_trial = ref(entry), entry.arrival + entry.decode + TRIAL_PAUSE * least

    def computed(self, batch: Batch[Entry], now: float, seconds: float) -> None:
        """Takes note that a batch was computed by `now`, in `seconds`."""
        if self._trial is None:
            return
        trial = self._trial()
        if trial in batch.entries:
            self._next_trial = now + TRIAL_PAUSE * seconds * trial.cost / max(1, batch.cost)
            self._trial = None
        elif trial is None or trial.answered:  # its turn came too late: it has not been computed
            self._trial = None
