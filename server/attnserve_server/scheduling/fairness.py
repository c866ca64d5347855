"""Fair queueing: shares the device's time equally among the callers that have work waiting.

Each entry gets a virtual start time: now or, if that is later, when all that its caller sent before it is done, except
what has a lower priority. The virtual clock advances at the rate at which a caller is served its equal share, so
serving entries in the order of their start times is as if each caller had a slower device of its own. (Weighted fair
queueing: Demers, Keshav, Shenker 1989; by start times: Goyal, Vin, Cheng 1996.) Time is counted in work, in any unit:
if work turns out to be done faster or slower than expected, the order of these times stays the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Final

FORGOTTEN: Final = 256
"""How many callers are remembered before those that the virtual clock has passed are forgotten."""

_NOTHING: Final[Mapping[int, float]] = {}


class FairClock:
    """Virtual time, and up to when each caller has used its share."""

    def __init__(self) -> None:
        self._now = 0.0
        self._waiting: dict[Hashable, int] = {}
        self._until: dict[Hashable, dict[int, float]] = {}
        """For each caller and each of its priorities, when all that it sent with that priority or above is done."""
        self._prune_at = FORGOTTEN

    @property
    def callers(self) -> int:
        """How many callers have work waiting."""
        return len(self._waiting)

    def begin(self, caller: Hashable, priority: int) -> float:
        """The virtual time that the caller's next entry would get."""
        begin = self._now
        for level, done in self._until.get(caller, _NOTHING).items():
            if level >= priority and done > begin:
                begin = done
        return begin

    def enter(self, caller: Hashable, priority: int, work: float) -> float:
        """Counts in an entry that waits. Returns its virtual start time."""
        self._waiting[caller] = self._waiting.get(caller, 0) + 1
        begin = self.begin(caller, priority)
        until = self._until.setdefault(caller, {})
        until[priority] = begin + work
        for level in until:
            if level < priority:
                until[level] += work
        return begin

    def leave(self, caller: Hashable) -> None:
        """Counts out one of a caller's entries, which waits no longer, whether it runs or not."""
        left = self._waiting[caller] - 1
        if left:
            self._waiting[caller] = left
            return
        del self._waiting[caller]
        if not self._waiting:  # nobody waits for anybody: all start afresh
            self._until.clear()
            self._now = 0.0
        elif len(self._until) > self._prune_at:
            self._until = {each: until for each, until in self._until.items() if max(until.values()) > self._now}
            self._prune_at = max(FORGOTTEN, 2 * len(self._until))

    def served(self, work: float, callers: int) -> None:
        """Advances the clock by `work` that now runs, taken while that many callers had work waiting."""
        if self._waiting:
            self._now += work / callers
