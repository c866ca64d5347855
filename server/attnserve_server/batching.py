"""What runs together, and when: a queue of plain data, without a clock, torch or gRPC.

Entries of one *group* can run in one batch. The next batch begins with the entry that is due first and takes others of
its group, wherever they stand in the queue, until the batch is full by cost or count. An entry is due at its arrival,
less `aging` seconds for each level of its priority: so a higher priority goes first, oldest first within one, and
nothing waits forever. Entries that nobody waits for any more never reach a batch.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What the queue must know of an entry: times in seconds of one clock, costs in FLOPs."""

    @property
    def group(self) -> Hashable:
        """Equal for entries that one batch can hold."""

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
    cancelled: list[E] = field(default_factory=list)
    expired: list[E] = field(default_factory=list)


class BatchQueue(Generic[E]):
    """Entries that wait, and the decision which of them run next."""

    def __init__(self, max_cost: int, max_requests: int, aging: float) -> None:
        self._max_cost = max_cost
        self._max_requests = max_requests
        self._aging = aging
        self._lanes: dict[Hashable, dict[int, deque[E]]] = {}
        self._first: list[tuple[float, int, E]] = []
        """A heap of those that are, or were, first in their lanes, by when they are due."""
        self._pushes = itertools.count()
        self.requests = 0
        self.bytes = 0
        self.cost = 0

    def push(self, entry: E) -> None:
        """Appends an entry."""
        lanes = self._lanes.setdefault(entry.group, {})
        lane = lanes.get(entry.priority)
        if lane is None:
            lane = lanes[entry.priority] = deque()
        lane.append(entry)
        if len(lane) == 1:
            self._now_first(entry)
        self.requests += 1
        self.bytes += entry.received_bytes
        self.cost += entry.cost

    @property
    def is_full(self) -> bool:
        """Whether a batch could be filled, were everything that waits of one group."""
        return self.cost >= self._max_cost or self.requests >= self._max_requests

    def oldest_arrival(self) -> float | None:
        """When the entry came that has waited longest; None if nothing waits."""
        return min((lane[0].arrival for lanes in self._lanes.values() for lane in lanes.values()), default=None)

    def pop(self, now: float) -> Batch[E]:
        """Takes the next batch out of the queue; without entries if nothing is left to run."""
        batch: Batch[E] = Batch()
        while self._lanes and not batch.entries:
            _, _, entry = heapq.heappop(self._first)
            lane = self._lanes.get(entry.group, {}).get(entry.priority)
            if lane is not None and lane[0] is entry:
                self._fill(batch, entry.group, now)
        return batch

    def _now_first(self, entry: E) -> None:
        """Says that an entry is first in its lane."""
        heapq.heappush(self._first, (self._due(entry), next(self._pushes), entry))

    def _due(self, entry: E) -> float:
        return entry.arrival - entry.priority * self._aging

    def _fill(self, batch: Batch[E], group: Hashable, now: float) -> None:
        lanes, taken_from = self._lanes[group], set()
        while lanes and len(batch.entries) < self._max_requests:
            lane = min(lanes.values(), key=lambda lane: self._due(lane[0]))
            entry = lane[0]
            gone = batch.cancelled if entry.cancelled else batch.expired if entry.deadline <= now else None
            if gone is None and batch.entries and batch.cost + entry.cost > self._max_cost:
                break
            lane.popleft()
            taken_from.add(entry.priority)
            if not lane:
                del lanes[entry.priority]
            self.requests -= 1
            self.bytes -= entry.received_bytes
            self.cost -= entry.cost
            if gone is not None:
                gone.append(entry)
            else:
                batch.entries.append(entry)
                batch.cost += entry.cost
        for priority in taken_from & lanes.keys():
            self._now_first(lanes[priority][0])
        if not lanes:
            del self._lanes[group]
