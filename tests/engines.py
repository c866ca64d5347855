"""Engines, and the admissions and queues that they are made of, with as many bounds as a test is about."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from attnserve_server.scheduling.admission import Admission
from attnserve_server.scheduling.batching import BatchQueue
from attnserve_server.scheduling.engine import Engine
from attnserve_server.scheduling.entry import Entry
from attnserve_server.scheduling.pace import Pace

if TYPE_CHECKING:
    from attnserve_server.devices import Device
    from attnserve_server.observability.metrics import Metrics


class OpenAdmission(Admission):
    """An admission to a queue of any length, of requests that are, unless a test says otherwise, of one kind, with
    replies of any length.
    """

    def __init__(
        self,
        max_requests: int,
        max_bytes: int,
        max_flops: int,
        max_reply_bytes: int | None = None,
        max_queue_time: float = 0.0,
    ) -> None:
        most = max_bytes if max_reply_bytes is None else max_reply_bytes
        super().__init__(max_requests, max_bytes, max_flops, most, max_queue_time)

    def admit(self, caller: Hashable, size: int, flops: int, reply_bytes: int = 0, kind: str = "") -> None:
        super().admit(caller, size, flops, reply_bytes, kind)

    def recount(
        self, caller: Hashable, before: tuple[int, int], now: tuple[int, int], reply_bytes: int, kind: str = ""
    ) -> None:
        super().recount(caller, before, now, reply_bytes, kind)

    def computed(self, caller: Hashable, size: int, flops: int, kind: str = "") -> None:
        super().computed(caller, size, flops, kind)


def batch_queue(
    max_cost: int = 10**12, max_requests: int = 64, aging: float = 0.1, pace: Pace | None = None
) -> BatchQueue[Entry]:
    """A queue for a CPU: batches have any number of bytes, and operations of layers count as others do."""
    return BatchQueue(max_cost, max_requests, aging, pace or Pace(), None, 1)


def engine_of(
    device: Device, queue: BatchQueue[Entry], admission: Admission, metrics: Metrics, max_wait: float = 0.0
) -> Engine:
    """An engine that records no traces."""
    return Engine(device, queue, admission, metrics, max_wait, None)
