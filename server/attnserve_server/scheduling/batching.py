"""What runs together, and when: a queue of plain data, without a clock, torch or gRPC.

Entries of one *group* can run in one batch. The next batch begins with the entry that is due first and takes others of
its group, wherever they are in the queue, until the batch is full by cost, count or bytes. Entries that nobody waits
for any more never reach a batch.

When an entry is due depends on how long the device works for its caller (`fairness.py`), so that no caller waits for
all that another has sent. Each level of priority makes an entry due earlier, by the virtual time that passes while the
device works `aging` seconds for the present callers. So a higher priority goes first, and yet nothing waits forever. A
low priority waits longer while callers leave: by the logarithm of their number at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, Generic, Protocol, TypeVar

from attnserve_server.scheduling.by_priority import ByPriority, Placed
from attnserve_server.scheduling.fairness import FairClock, Place
from attnserve_server.scheduling.pace import Amount, Pace

MOST_SKIPPED: Final = 64
"""`_first` may hold this many places, beside two for each entry, before those that are out of date are removed."""

MUCH_LONGER: Final = 1.5
"""If a batch takes this many times as long as it should have, and `MUCH_LONGER_SECONDS` longer, its callers' waiting
entries are placed anew.
"""
MUCH_LONGER_SECONDS: Final = 0.005
"""For less, placing them anew is not worth the work."""


class Waiting(Protocol):
    """What the queue must know of an entry: times in seconds on one clock, costs in FLOPs."""

    @property
    def group(self) -> Hashable:
        """Equal for entries that one batch can hold."""

    @property
    def layer(self) -> str | None:
        """The name of the layer that it applies, if any."""

    @property
    def kind(self) -> str:
        """The kind of work: how long work takes is learnt per kind."""

    @property
    def cost(self) -> int:
        """What it costs to run."""

    @property
    def received_bytes(self) -> int:
        """What it holds in memory."""

    @property
    def priority(self) -> int:
        """Higher goes first."""

    @property
    def caller(self) -> Hashable:
        """Whose it is: callers have equal shares."""

    @property
    def arrival(self) -> float:
        """When it came."""

    @property
    def deadline(self) -> float:
        """When its caller stops waiting; infinity for never."""

    @property
    def cancelled(self) -> bool:
        """Whether its caller has stopped waiting."""


E = TypeVar("E", bound=Waiting)


@dataclass(slots=True)
class Batch(Generic[E]):
    """What to run now, and what came out of the queue without running."""

    entries: list[E] = field(default_factory=list)
    cost: int = 0
    work: Amount = field(default_factory=Amount)
    """The work of its entries, by kind."""
    charges: dict[tuple[Hashable, int], float] = field(default_factory=dict)
    """How long the entries of each caller and priority should take, in seconds."""
    callers: int = 1
    """How many callers had something waiting when it was taken out of the queue."""
    cancelled: list[E] = field(default_factory=list)
    expired: list[E] = field(default_factory=list)


class BatchQueue(Generic[E]):
    """The waiting entries, and the decision which of them run next."""

    def __init__(
        self,
        max_cost: int,
        max_requests: int,
        aging: float,
        pace: Pace,
        max_batch_bytes: int | None,
        layer_discount: int,
    ) -> None:
        """No batch exceeds these bounds, unless it has one entry. `layer_discount` FLOPs of a layer count as one."""
        self._max_cost = max_cost
        self._max_requests = max_requests
        self._aging = aging
        self._pace = pace
        self._max_batch_bytes = max_batch_bytes
        self._layer_discount = layer_discount
        self._filling = 0
        """What all entries together count towards the cost of a batch (`_share`)."""
        self._fairness = FairClock()
        self._groups: dict[Hashable, ByPriority[E]] = {}
        """The entries of each group, by priority, virtual start time and the order of pushes."""
        self._first: ByPriority[Hashable] = ByPriority()
        """The groups, by the place of their first entry of each priority. When that entry is no longer the first of its
        group, its place stays here for a while, and is skipped.
        """
        self._pushes = itertools.count()
        self._work = Amount()
        self.requests = 0
        self.bytes = 0
        self.cost = 0

    @property
    def least_seconds(self) -> float:
        """The least time that running what waits takes, as far as is known."""
        return self._pace.least_seconds(self._work)

    def push(self, entry: E) -> None:
        """Takes an entry."""
        priority, group = entry.priority, entry.group
        seconds = self._pace.seconds_of(entry.kind, entry.cost)
        placed = Placed(self._fairness.enter(entry.caller, priority, seconds), next(self._pushes), entry, seconds)
        waiting = self._groups.get(group)
        if waiting is None:
            waiting = self._groups[group] = ByPriority()
        if waiting.push(priority, placed):
            self._first.push(priority, Placed(placed.begin, placed.number, group))
        self._work.add(entry.kind, entry.cost)
        self.requests += 1
        self.bytes += entry.received_bytes
        self.cost += entry.cost
        self._filling += self._share(entry)

    @property
    def is_full(self) -> bool:
        """Whether what waits would fill a batch if it were all of one group."""
        return self._fullness(self.requests, self._filling, self.bytes) >= 1.0

    def oldest_arrival(self) -> float | None:
        """When the longest-waiting entry arrived; None if nothing waits. Looks at all waiting entries."""
        return min((placed.item.arrival for group in self._groups.values() for _, placed in group), default=None)

    def least_seconds_before(self, caller: Hashable, priority: int) -> float:
        """The least time that it takes to run what is due before this caller's next entry with this priority. Looks at
        all waiting entries.
        """
        level = self._level()
        due = self._fairness.begin(caller, priority) - priority * level
        before = Amount()
        for group in self._groups.values():
            for its_priority, placed in group:
                if placed.begin - its_priority * level <= due:
                    before.add(placed.item.kind, placed.item.cost)
        return self._pace.least_seconds(before)

    def pop(self, now: float) -> Batch[E]:
        """Takes the next batch out of the queue. It has no entries if nothing is left to run; else, `end` follows."""
        batch: Batch[E] = Batch()
        level = self._level()
        while self._groups and not batch.entries:
            priority = self._first.first_priority(level)
            first = self._first.pop(priority)
            group = first.item
            waiting = self._groups.get(group)
            head = None if waiting is None else waiting.head(priority)
            if waiting is not None and head is not None and head.number == first.number:
                for changed in self._fill(batch, waiting, level, now):
                    if (head := waiting.head(changed)) is not None:
                        self._first.push(changed, Placed(head.begin, head.number, group))
                if not waiting:
                    del self._groups[group]
        most = 2 * self.requests + MOST_SKIPPED if self.requests else 0
        if len(self._first) > most:
            self._find_first()
        return batch

    def end(self, batch: Batch[E], seconds: float | None) -> None:
        """Takes note that a batch which had entries is over. `seconds` is how long it took; that counts towards its
        callers' shares, whatever it should have taken. None if nothing of it has run.
        """
        self._fairness.end_run(batch.charges, batch.callers, seconds)
        expected = sum(batch.charges.values())
        if (
            self.requests
            and seconds is not None
            and seconds > max(MUCH_LONGER * expected, expected + MUCH_LONGER_SECONDS)
        ):
            self._begin_later({caller for caller, _ in batch.charges})

    def _begin_later(self, callers: set[Hashable]) -> None:
        """Places the waiting entries of callers anew, because something of theirs took much longer than it should have.
        Entries like it will take longer, too, but have been placed as if they did not. Looks at all waiting entries.
        """
        waiting = sorted((placed for group in self._groups.values() for _, placed in group), key=attrgetter("number"))
        begins: dict[int, tuple[float, float]] = {}
        for caller in callers:
            own = [placed for placed in waiting if placed.item.caller == caller]
            seconds = [self._pace.seconds_of(placed.item.kind, placed.item.cost) for placed in own]
            places = [
                Place(placed.item.priority, placed.begin, placed.seconds, now)
                for placed, now in zip(own, seconds, strict=True)
            ]
            later = zip(self._fairness.begin_later(caller, places), seconds, strict=True)
            begins |= zip([placed.number for placed in own], later, strict=True)
        self._groups.clear()
        for placed in waiting:
            begin, now = begins.get(placed.number, (placed.begin, placed.seconds))
            its_group = self._groups.setdefault(placed.item.group, ByPriority())
            its_group.push(placed.item.priority, Placed(begin, placed.number, placed.item, now))
        self._find_first()

    def drop_cancelled(self) -> list[E]:
        """Takes out all entries that have been cancelled. Looks at all waiting entries."""
        cancelled = [placed for group in self._groups.values() for _, placed in group if placed.item.cancelled]
        if not cancelled:
            return []
        dropped = [placed.item for placed in cancelled]
        for group in {entry.group for entry in dropped}:
            left: ByPriority[E] = ByPriority()
            for priority, placed in self._groups.pop(group):
                if not placed.item.cancelled:
                    left.push(priority, placed)
            if left:
                self._groups[group] = left
        for placed in cancelled:
            self._waive(placed)
            self._forget(placed.item)
        self._find_first()
        return dropped

    def _find_first(self) -> None:
        """Makes `_first` anew, without the places that are out of date: their turn to be skipped may never come."""
        self._first.clear()
        for group, waiting in self._groups.items():
            for priority, head in waiting.heads():
                self._first.push(priority, Placed(head.begin, head.number, group))

    def _level(self) -> float:
        """How much earlier a level of priority makes an entry due, in virtual time: that is slower than the device's
        time by the number of callers.
        """
        return self._aging / max(1, self._fairness.callers)

    def _fill(self, batch: Batch[E], waiting: ByPriority[E], level: float, now: float) -> set[int]:
        """Fills a batch from the group whose entry is due first. If nobody waits for that entry, only it is taken out.
        Returns the priorities of what has been taken out.
        """
        callers, seconds, filling, size = self._fairness.callers, 0.0, 0, 0
        charges, most, changed = batch.charges, self._max_batch_bytes, set()
        while waiting and len(batch.entries) < self._max_requests:
            priority = waiting.first_priority(level)
            head = waiting.head(priority)
            assert head is not None
            entry = head.item
            gone = batch.cancelled if entry.cancelled else batch.expired if entry.deadline <= now else None
            if gone is None and batch.entries:
                if filling + self._share(entry) > self._max_cost:
                    break
                if most is not None and size + entry.received_bytes > most:
                    break
            waiting.pop(priority)
            changed.add(priority)
            if gone is not None:
                self._waive(head)
            elif not batch.entries:
                self._fairness.begin_run()  # before the entry leaves: the clock must not start afresh
            self._forget(entry)
            if gone is None:
                batch.entries.append(entry)
                batch.cost += entry.cost
                filling += self._share(entry)
                size += entry.received_bytes
                batch.work.add(entry.kind, entry.cost)
                whose = entry.caller, priority
                charges[whose] = charges.get(whose, 0.0) + head.seconds
                seconds += head.seconds
            else:
                gone.append(entry)
                if not batch.entries:  # now another group may be first
                    break
        if batch.entries:
            batch.callers = callers
            self._fairness.served(seconds, callers)
            self._pace.formed(self._fullness(len(batch.entries), filling, size) / len(batch.entries))
        return changed

    def _fullness(self, requests: int, filling: int, size: int) -> float:
        """The part of a batch that so much fills, by the bound of which it takes most; 1 if it exceeds a bound."""
        by_bytes = 0.0 if self._max_batch_bytes is None else size / self._max_batch_bytes
        return min(1.0, max(requests / self._max_requests, filling / self._max_cost, by_bytes))

    def _waive(self, placed: Placed[E]) -> None:
        """Takes note that an entry, which is still counted, will not run."""
        self._fairness.waive(placed.item.caller, placed.item.priority, placed.seconds)

    def _forget(self, entry: E) -> None:
        self._fairness.leave(entry.caller)
        self._work.remove(entry.kind, entry.cost)
        self.requests -= 1
        self.bytes -= entry.received_bytes
        self.cost -= entry.cost
        self._filling -= self._share(entry)

    def _share(self, entry: E) -> int:
        """What an entry counts towards the cost of a batch."""
        return entry.cost if self._layer_discount == 1 or entry.layer is None else entry.cost // self._layer_discount
