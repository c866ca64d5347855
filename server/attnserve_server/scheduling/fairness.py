"""Fair queueing: shares the device's time equally among the callers that have work waiting.

Each entry gets a virtual start time: when all is done that its caller sent before with the same or a higher priority,
or now if that is later. The virtual clock advances at the rate at which a caller with an equal share is served. So
serving entries in the order of their start times is as if each caller had a slower device of its own. (Weighted fair
queueing: Demers, Keshav, Shenker 1989; by start times: Goyal, Vin, Cheng 1996.) Time is counted in seconds of the
device: at first those that an entry should take and, once its batch has run, those that it did take. So nobody gains by
sending what takes longer than it seems.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Final, NamedTuple

FORGOTTEN: Final = 256
"""How many callers are remembered before those that the virtual clock has passed are forgotten."""

_NOTHING: Final[Mapping[int, float]] = {}


class Place(NamedTuple):
    """A waiting entry: its priority, its virtual start time, and how long it should take, by what was known `before`
    and by what is known now.
    """

    priority: int
    begin: float
    before: float
    seconds: float


class FairClock:
    """Virtual time, and up to when each caller has used its share."""

    def __init__(self) -> None:
        self._now = 0.0
        self._waiting: dict[Hashable, int] = {}
        self._running = 0
        """How many batches run: `begin_run` to `end_run`."""
        self._until: dict[Hashable, dict[int, float]] = {}
        """For each caller and each of its priorities, when all that it sent with that priority or above is done."""
        self._prune_at = FORGOTTEN

    @property
    def callers(self) -> int:
        """How many callers have work waiting."""
        return len(self._waiting)

    def begin(self, caller: Hashable, priority: int) -> float:
        """The virtual start time that the caller's next entry of this priority would get."""
        begin = self._now
        for level, done in self._until.get(caller, _NOTHING).items():
            if level >= priority and done > begin:
                begin = done
        return begin

    def enter(self, caller: Hashable, priority: int, seconds: float) -> float:
        """Counts in an entry that waits, and should take that long. Returns its virtual start time."""
        self._waiting[caller] = self._waiting.get(caller, 0) + 1
        begin = self.begin(caller, priority)
        until = self._until.setdefault(caller, {})
        until[priority] = begin + seconds
        for level in until:
            if level < priority:
                until[level] += seconds
        return begin

    def begin_later(self, caller: Hashable, waiting: Iterable[Place]) -> list[float]:
        """Places the waiting entries of a caller anew, because it has used more than it should have, and they should
        take other times than was known before. `waiting` has all of them, in the order in which they came. Returns
        their virtual start times, none of which is earlier than it was.
        """
        places = list(waiting)
        if not places:
            return []
        until = dict(self._until.get(caller, _NOTHING))
        for place in places:
            for level in until:
                if level <= place.priority:
                    until[level] -= place.before
        begins = []
        for place in places:
            begin = max([place.begin, *(done for level, done in until.items() if level >= place.priority)])
            begins.append(begin)
            until[place.priority] = begin + place.seconds
            for level in until:
                if level < place.priority:
                    until[level] += place.seconds
        self._until[caller] = until
        return begins

    def leave(self, caller: Hashable) -> None:
        """Counts out one of a caller's entries, which waits no longer, whether it runs or not."""
        left = self._waiting[caller] - 1
        if left:
            self._waiting[caller] = left
            return
        del self._waiting[caller]
        if not self._waiting and not self._running:
            self._start_afresh()
        elif len(self._until) > self._prune_at:
            self._until = {each: until for each, until in self._until.items() if max(until.values()) > self._now}
            self._prune_at = max(FORGOTTEN, 2 * len(self._until))

    def waive(self, caller: Hashable, priority: int, seconds: float) -> None:
        """Charges nothing for a waiting entry that will not run; it should have taken that long."""
        self._correct(caller, priority, -seconds)

    def begin_run(self) -> None:
        """A batch begins to run, whose entries leave. The clock does not start afresh before `end_run`."""
        self._running += 1

    def served(self, seconds: float, callers: int) -> None:
        """Advances the clock for a batch that begins and should take that long. When it was taken out of the queue,
        that many callers had work waiting.
        """
        self._now += seconds / callers

    def end_run(self, charges: Mapping[tuple[Hashable, int], float], callers: int, seconds: float | None) -> None:
        """Takes note that a batch is over. Corrects the clock, and what callers have used, by how long it took; not at
        all if that is None. `charges` is how long each caller's entries of each priority should have taken; `callers`
        is as in `served`.
        """
        self._running -= 1
        expected = sum(charges.values())
        if seconds is not None and expected > 0.0:
            self._now += (seconds - expected) / callers
            for (caller, priority), charge in charges.items():
                self._correct(caller, priority, charge * (seconds / expected - 1.0))
        if not self._waiting and not self._running:
            self._start_afresh()

    def _correct(self, caller: Hashable, priority: int, more: float) -> None:
        """Counts that much more as used by a caller. If it has been forgotten since, it had used nothing in advance."""
        until = self._until.get(caller)
        if until is None:
            if more > 0.0:
                self._until[caller] = {priority: self._now + more}
            return
        for level in until:
            if level <= priority:
                until[level] += more

    def _start_afresh(self) -> None:
        """Forgets what everybody has used: nothing waits or runs, so that nobody waits for anybody."""
        self._until.clear()
        self._now = 0.0
