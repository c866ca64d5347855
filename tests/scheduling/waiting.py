"""Queue entries, work and queues for tests of the queue."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from attnserve_server.scheduling.batching import BatchQueue
from attnserve_server.scheduling.pace import Amount, Pace

AGING = 0.5
MAX_FLOPS = 100
MAX_REQUESTS = 4


@dataclass(eq=False)
class Entry:
    """A queue entry of plain data."""

    arrival: float = 0.0
    group: str = "a"
    kind: str = ""
    cost: int = 10
    received_bytes: int = 1
    priority: int = 0
    deadline: float = math.inf
    cancelled: bool = False
    caller: Hashable = None
    layer: str | None = None


def work(requests: int, flops: float, kind: str = "") -> Amount:
    """That many requests of that many FLOPs each."""
    amount = Amount()
    for _ in range(requests):
        amount.add(kind, flops)
    return amount


SECOND = 1000
"""FLOPs per second: a request takes only as long as its FLOPs do."""


def queue_of(
    *entries: Entry, max_cost: int = MAX_FLOPS, max_requests: int = MAX_REQUESTS, pace: Pace | None = None
) -> BatchQueue[Entry]:
    queue: BatchQueue[Entry] = BatchQueue(max_cost, max_requests, AGING, pace or Pace(1 / SECOND, 1e-12), None, 1)
    for entry in entries:
        queue.push(entry)
    return queue


def popped(queue: BatchQueue[Entry], now: float = 0.0) -> list[list[Entry]]:
    """The entries of all batches, batch by batch, until the queue is empty."""
    batches = []
    while queue.requests:
        batches.append(queue.pop(now).entries)
    return batches
