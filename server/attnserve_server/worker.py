"""The device at work: one batch at a time, since when, until when by the measured rate, and how much of all time.

In: a batch. Out: what came of its entries, on the event loop. A small batch is computed on the loop itself, because
handing it to a thread costs more than computing it; a larger one beside the loop, which meanwhile receives and decodes
what comes next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

from attnserve_server.batching import Batch
from attnserve_server.computation import compute
from attnserve_server.entry import Entry
from attnserve_server.errors import RequestError
from attnserve_server.work import BatchResult

if TYPE_CHECKING:
    from attnserve_server.devices import Device

logger = logging.getLogger(__name__)

Part: TypeAlias = tuple[list[Entry], BatchResult | RequestError]
"""What came of some entries of a batch."""


class Worker:
    """Computes batches on a device. Made on the event loop that it lives on.

    `computed` is called with a batch, when it began, and what came of it; `died` if the thread is dead that computes.
    """

    def __init__(
        self, device: Device, computed: Callable[[Batch[Entry], float, list[Part]], None], died: Callable[[], None]
    ) -> None:
        self._device = device
        self.inline_flops = device.inline_flops
        """What a batch may cost to be computed on the loop, in FLOPs."""
        self._computed = computed
        self._died = died
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "attnserve-device")
        self._begin = 0.0
        self._end = 0.0
        self._busy_seconds = 0.0
        self.batch: Batch[Entry] | None = None
        """The batch that the device has, from `take` to `free`."""

    @property
    def cost(self) -> int:
        """What that batch costs, in FLOPs."""
        return 0 if self.batch is None else self.batch.cost

    @property
    def free_at(self) -> float | None:
        """When the device should have computed it; None if it has none."""
        return None if self.batch is None else self._end

    @property
    def batch_seconds(self) -> float:
        """How long the device has had the batch that it has now; 0 if it has none."""
        return perf_counter() - self._begin if self.batch is not None else 0.0

    @property
    def busy_seconds(self) -> float:
        """In how much time the device has had a batch."""
        return self._busy_seconds + self.batch_seconds

    def take(self, batch: Batch[Entry], begin: float) -> None:
        """Has a batch, since `begin`, which may change until it runs."""
        self.batch, self._begin, self._end = batch, begin, begin

    def run(self, seconds: float) -> None:
        """Computes the batch that it has, which should take so long."""
        batch, begin = self.batch, self._begin
        assert batch is not None
        self._end = begin + seconds
        if batch.cost <= self.inline_flops:
            self._computed(batch, begin, compute(self._device, batch.entries))
        else:
            future = self._loop.run_in_executor(self._thread, compute, self._device, batch.entries)
            future.add_done_callback(partial(self._hand_over, batch, begin))

    def free(self, now: float) -> None:
        """The device can have another batch."""
        self.batch = None
        self._busy_seconds += now - self._begin

    def close(self) -> None:
        """Ends the thread. What it computes is not waited for, which nothing can interrupt."""
        self._thread.shutdown(wait=self.batch is None)

    def _hand_over(self, batch: Batch[Entry], begin: float, done: asyncio.Future[list[Part]]) -> None:
        """Takes what the thread made of a batch, if it lives."""
        if (error := done.exception()) is not None:
            logger.critical("a batch ended the thread that computed it", exc_info=error)
            self._died()
        else:
            self._computed(batch, begin, done.result())
