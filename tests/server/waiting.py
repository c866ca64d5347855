"""What waits in a queue, in tests of the queue."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from attnserve_server.batching import BatchQueue

AGING = 0.5
MAX_FLOPS = 100
MAX_REQUESTS = 4


@dataclass(eq=False)
class Entry:
    """Plain data."""

    arrival: float = 0.0
    group: str = "a"
    cost: int = 10
    received_bytes: int = 1
    priority: int = 0
    deadline: float = math.inf
    cancelled: bool = False
    caller: Hashable = None
    seconds: float = 0.0


def queue_of(*entries: Entry, max_cost: int = MAX_FLOPS, max_requests: int = MAX_REQUESTS) -> BatchQueue[Entry]:
    queue: BatchQueue[Entry] = BatchQueue(max_cost, max_requests, AGING)
    for entry in entries:
        queue.push(entry)
    return queue
