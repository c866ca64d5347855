"""Measures how long batches took, from which it is estimated how long others will take.

In: computed batches, each with the time that counts for it (`Worker.free`). Out: what the measured rate learns, and
what counts towards callers' shares. No clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnserve_server.scheduling.batching import Batch, BatchQueue
    from attnserve_server.scheduling.deadlines import Deadlines
    from attnserve_server.scheduling.entry import Entry
    from attnserve_server.scheduling.pace import Pace


class BatchTimes:
    """The batches of one engine, one after the other."""

    def __init__(self, queue: BatchQueue[Entry], pace: Pace, deadlines: Deadlines) -> None:
        self._queue = queue
        self._pace = pace
        self._deadlines = deadlines
        self._open: tuple[Batch[Entry], float, float | None] | None = None
        """The last batch with its begin and its end, as `end` got them; None once that has been learnt from."""

    def end(self, batch: Batch[Entry], begin: float, end: float | None) -> None:
        """A batch has been computed. `end` is None if another begins as soon as the loop gets to it: what the loop does
        before that then counts as part of this batch's time.
        """
        self.learn(begin)  # the batch before, if that is still open
        self._open = batch, begin, end

    def end_failed(self, batch: Batch[Entry], begin: float, end: float) -> None:
        """A batch has been computed, but not as a whole. Its time teaches nothing, but counts towards its callers'
        shares.
        """
        self._queue.end(batch, end - begin)

    def learn(self, now: float | None = None) -> None:
        """Learns how long the last batch took. `now` is when the next one begins, which ends a batch that had no end
        yet.
        """
        if self._open is None:
            return
        batch, begin, own_end = self._open
        end = now if own_end is None else own_end
        if end is not None:
            self._open = None
            self._pace.learn(batch.work, end - begin)
            self._queue.end(batch, end - begin)
            self._deadlines.computed(batch, end, end - begin)
