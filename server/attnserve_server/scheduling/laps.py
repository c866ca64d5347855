"""How long batches took, for those who foresee by it how long others will take.

In: batches that have been computed, each with the time that the device was busy by it alone: since it began or, where
it was given to the device while another computed, since that one ended. Out: what the measured rate learns. No clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnserve_server.scheduling.deadlines import Deadlines
    from attnserve_server.scheduling.pace import Amount, Pace


class Laps:
    """The batches of one engine, one after the other."""

    def __init__(self, pace: Pace, deadlines: Deadlines) -> None:
        self._pace = pace
        self._deadlines = deadlines
        self._open: tuple[Amount, float, float | None] | None = None

    def end(self, work: Amount, begin: float, end: float | None) -> None:
        """A batch has been computed. `end` is None if another begins as soon as the loop can have it do so: what the
        loop does before is then part of what a batch takes.
        """
        self.learn(begin)  # of one before, should nobody have come to it
        self._open = work, begin, end

    def learn(self, now: float | None = None) -> None:
        """Takes notice of how long the last batch took: if the next one begins now, with what the loop did before."""
        if self._open is None:
            return
        work, begin, own_end = self._open
        end = now if own_end is None else own_end
        if end is not None:
            self._open = None
            self._pace.learn(work, end - begin)
            self._deadlines.computed(end, end - begin)
