"""Whose work is next: shares the device's time equally among the callers that have work waiting.

Each entry gets a virtual time at which it may begin: now, or when what its caller has sent before it is done, if that
is later; what has a lower priority is not before it. The virtual clock advances as fast as a caller with its equal
share is served, so that entries in the order of their times are served as if each caller had a slower device of its
own. (Weighted fair queueing: Demers, Keshav, Shenker 1989; by start times: Goyal, Vin, Cheng 1996.) Time is counted in
work, of whatever unit: how fast work is done may turn out differently from what was thought, and changes no order.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Final

FORGOTTEN: Final = 256
"""How many callers that have nothing waiting are remembered before those are forgotten that may be."""

_NOTHING: Final[Mapping[int, float]] = {}


class FairClock:
    """Virtual time, and until when each caller has had its share."""

    def __init__(self) -> None:
        self._now = 0.0
        self._waiting: dict[Hashable, int] = {}
        self._until: dict[Hashable, dict[int, float]] = {}
        """For each caller, when all is done that it has sent with one of its priorities or above."""
        self._prune_at = FORGOTTEN

    @property
    def callers(self) -> int:
        """How many have work waiting."""
        return len(self._waiting)

    def begin(self, caller: Hashable, priority: int) -> float:
        """The virtual time that the caller's next entry would get."""
        begin = self._now
        for level, done in self._until.get(caller, _NOTHING).items():
            if level >= priority and done > begin:
                begin = done
        return begin

    def enter(self, caller: Hashable, priority: int, work: float) -> float:
        """Takes notice of work that waits. Returns its virtual time."""
        self._waiting[caller] = self._waiting.get(caller, 0) + 1
        begin = self.begin(caller, priority)
        until = self._until.setdefault(caller, {})
        until[priority] = begin + work
        for level in until:
            if level < priority:
                until[level] += work
        return begin

    def leave(self, caller: Hashable) -> None:
        """Takes notice that one of a caller's entries waits no longer, whether it runs or not."""
        left = self._waiting[caller] - 1
        if left:
            self._waiting[caller] = left
            return
        del self._waiting[caller]
        if not self._waiting:  # nobody has to wait for anybody: all begin anew
            self._until.clear()
            self._now = 0.0
        elif len(self._until) > self._prune_at:
            self._until = {each: until for each, until in self._until.items() if max(until.values()) > self._now}
            self._prune_at = max(FORGOTTEN, 2 * len(self._until))

    def served(self, work: float, callers: int) -> None:
        """Takes notice that so much work runs, taken while so many callers had work waiting."""
        if self._waiting:
            self._now += work / callers
