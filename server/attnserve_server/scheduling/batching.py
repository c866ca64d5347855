"""What runs together, and when: a queue of plain data, without a clock, torch or gRPC.

Entries of one *group* can run in one batch. The next batch begins with the entry that is due first and takes others of
its group, wherever they are in the queue, until the batch is full by cost, count or bytes. When an entry is due depends
on what its caller already has waiting (`fairness`), so that no caller waits for all that another has sent; each
priority level makes it due earlier by the work that the device does in `aging` seconds: a higher priority goes first,
and nothing waits forever. Entries that nobody waits for any more never reach a batch.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from attnserve_server.scheduling.fairness import FairClock
from attnserve_server.scheduling.pace import Amount, Pace


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
    cancelled: list[E] = field(default_factory=list)
    expired: list[E] = field(default_factory=list)


class BatchQueue(Generic[E]):
    """The waiting entries, and the decision which of them run next."""

    def __init__(
        self,
        max_cost: int,
        max_requests: int,
        aging: float,
        pace: Pace | None = None,
        max_batch_bytes: int | None = None,
        layer_discount: int = 1,
    ) -> None:
        """No batch exceeds these bounds unless it is of one entry. So many operations of a layer count as one."""
        self._max_cost = max_cost
        self._max_requests = max_requests
        self._aging = aging
        self._pace = pace or Pace()
        self._max_batch_bytes = max_batch_bytes
        self._layer_discount = layer_discount
        self._filling = 0
        self._fairness = FairClock()
        self._groups: dict[Hashable, list[tuple[float, int, E]]] = {}
        """A heap for each group: when an entry is due, its number in the order of pushes, and the entry."""
        self._first: list[tuple[float, int, Hashable]] = []
        """A heap of the groups by their first entries; those that are no longer first stay in it, and are skipped."""
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
        begin = self._fairness.enter(entry.caller, priority, self._pace.work(entry.cost))
        item = (begin - self._advantage(priority), next(self._pushes), entry)
        waiting = self._groups.setdefault(group, [])
        heapq.heappush(waiting, item)
        if waiting[0] is item:
            heapq.heappush(self._first, (item[0], item[1], group))
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
        return min((item[2].arrival for group in self._groups.values() for item in group), default=None)

    def least_seconds_before(self, caller: Hashable, priority: int) -> float:
        """The least time that running takes for those waiting entries that are due before this caller's next one with
        this priority. Looks at all waiting entries.
        """
        due = self._fairness.begin(caller, priority) - self._advantage(priority)
        before = Amount()
        for group in self._groups.values():
            for item in group:
                if item[0] <= due:
                    before.add(item[2].kind, item[2].cost)
        return self._pace.least_seconds(before)

    def pop(self, now: float) -> Batch[E]:
        """Takes the next batch out of the queue; it has no entries if nothing is left to run."""
        batch: Batch[E] = Batch()
        while self._groups and not batch.entries:
            _, number, group = heapq.heappop(self._first)
            waiting = self._groups.get(group)
            if waiting is not None and waiting[0][1] == number:
                self._fill(batch, waiting, now)
                if waiting:
                    heapq.heappush(self._first, (waiting[0][0], waiting[0][1], group))
                else:
                    del self._groups[group]
        if not self.requests:
            self._first.clear()
        return batch

    def drop_cancelled(self) -> list[E]:
        """Takes out all entries that have been cancelled. Looks at all waiting entries."""
        dropped: list[E] = []
        for group, waiting in list(self._groups.items()):
            gone = [item[2] for item in waiting if item[2].cancelled]
            if not gone:
                continue
            dropped += gone
            waiting[:] = [item for item in waiting if not item[2].cancelled]
            heapq.heapify(waiting)
            if not waiting:
                del self._groups[group]
        if not dropped:
            return dropped
        for entry in dropped:
            self._forget(entry)
        self._first = [(waiting[0][0], waiting[0][1], group) for group, waiting in self._groups.items()]
        heapq.heapify(self._first)
        return dropped

    def _advantage(self, priority: int) -> float:
        """How much earlier a priority makes an entry due: virtual time is slower by as many callers as there are."""
        return priority * self._pace.work_of(self._aging) / max(1, self._fairness.callers) if priority else 0.0

    def _fill(self, batch: Batch[E], waiting: list[tuple[float, int, E]], now: float) -> None:
        """Fills a batch from the group whose entry is due first; takes out only that entry if nobody waits for it."""
        callers, work, filling, size = self._fairness.callers, 0.0, 0, 0
        most = self._max_batch_bytes
        while waiting and len(batch.entries) < self._max_requests:
            entry = waiting[0][2]
            gone = batch.cancelled if entry.cancelled else batch.expired if entry.deadline <= now else None
            if gone is None and batch.entries:
                if filling + self._share(entry) > self._max_cost:
                    break
                if most is not None and size + entry.received_bytes > most:
                    break
            heapq.heappop(waiting)
            self._forget(entry)
            if gone is None:
                batch.entries.append(entry)
                batch.cost += entry.cost
                filling += self._share(entry)
                size += entry.received_bytes
                batch.work.add(entry.kind, entry.cost)
                work += self._pace.work(entry.cost)
            else:
                gone.append(entry)
                if not batch.entries:  # now another group may be first
                    break
        self._fairness.served(work, callers)
        if batch.entries:
            self._pace.formed(self._fullness(len(batch.entries), filling, size) / len(batch.entries))

    def _fullness(self, requests: int, filling: int, size: int) -> float:
        """The part of a batch that so much fills, by the bound that it is nearest to; 1 for what exceeds one."""
        by_bytes = 0.0 if self._max_batch_bytes is None else size / self._max_batch_bytes
        return min(1.0, max(requests / self._max_requests, filling / self._max_cost, by_bytes))

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
