"""Runs batches on the device; knows which it has, since when, when each should be done, and the device's busy time.

In: batches, as many at a time as the device takes (`Device.depth`): while one computes, the next is staged. Out: the
outcomes of their entries, on the event loop. A small batch is computed on the loop itself, because handing it to a
thread costs more than computing it. A larger one is computed in a thread, while the loop receives and decodes what
comes next. If the device computes by itself, a batch of few operations is launched on the loop, and a thread only waits
for it: two threads that launch would wait for each other at each operation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from attnserve_server.scheduling.batching import Batch
from attnserve_server.scheduling.computation import Part, compute, launch
from attnserve_server.scheduling.entry import Entry
from attnserve_server.scheduling.shared_lock import SharedLock

if TYPE_CHECKING:
    from attnserve_server.devices import Device

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Run:
    """A batch that the device has, from `take` to `free`: when it began, and when it should be done."""

    batch: Batch[Entry]
    begin: float
    end: float
    launched: bool = False
    """Whether it was launched on the loop, so that a thread only waits for it."""


class Worker:
    """Computes batches on a device. Made on the event loop that it lives on.

    `computed` is called with a run and its outcomes; `died` if a computing thread is dead.
    """

    def __init__(self, device: Device, computed: Callable[[Run, list[Part]], None], died: Callable[[], None]) -> None:
        self._device = device
        self.inline_flops = device.inline_flops
        """The most that a batch computed on the loop may cost, in FLOPs."""
        self.depth = device.depth
        """How many batches the device takes at a time."""
        self._computed = computed
        self._died = died
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(device.depth, "attnserve-device", device.prepare_thread)
        self._lock = SharedLock() if device.depth > 1 else None
        self._counted = 0.0
        """While the device has batches: up to when `_busy_seconds` has counted its time."""
        self._busy_seconds = 0.0
        self.runs: list[Run] = []
        """The batches that the device has, in the order in which it got them."""

    @property
    def cost(self) -> int:
        """What all batches that the device has cost, in FLOPs."""
        return sum(run.batch.cost for run in self.runs)

    @property
    def free_at(self) -> float | None:
        """When the device should be done with all that it has; None if it has nothing."""
        return self.runs[-1].end if self.runs else None

    @property
    def batch_seconds(self) -> float:
        """How long the device has had the oldest of its current batches; 0 if it has none."""
        return perf_counter() - self.runs[0].begin if self.runs else 0.0

    @property
    def busy_seconds(self) -> float:
        """For how long in total the device has had at least one batch."""
        return self._busy_seconds + (perf_counter() - self._counted if self.runs else 0.0)

    def has_room_beside(self, waiting: int, is_full: bool) -> bool:
        """Whether a busy device should get one more batch. `waiting` is the cost of what waits, in FLOPs; `is_full`
        says whether that fills a batch.

        What does not fill a batch, and costs less than the batch that the device got last, waits on: once it is staged,
        it no longer grows. Two half batches take longer than a whole one where kernels have a fixed cost, however
        little they do.
        """
        return len(self.runs) < self.depth and (is_full or waiting >= self.runs[-1].batch.cost)

    def take(self, batch: Batch[Entry], begin: float) -> Run:
        """Adds a batch, which the device has from `begin` on; the batch may still change until it runs."""
        run = Run(batch, begin, begin)
        if not self.runs:
            self._counted = begin
        self.runs.append(run)
        return run

    def run(self, run: Run, seconds: float) -> None:
        """Computes the batch that was taken last, which should take `seconds` by itself."""
        run.end = (run.begin if len(self.runs) == 1 else max(run.begin, self.runs[-2].end)) + seconds
        batch, lock = run.batch, self._lock
        if batch.cost <= self.inline_flops:
            self._computed(run, compute(self._device, batch.entries, lock))
            return
        launched = None
        if lock is not None and self._may_launch(run):
            launched = launch(self._device, batch.entries, lock)
        run.launched = launched is not None
        computing = launched or partial(compute, self._device, batch.entries, lock)
        self._loop.run_in_executor(self._threads, computing).add_done_callback(partial(self._hand_over, run))

    def _may_launch(self, run: Run) -> bool:
        """Whether the batch that was taken last may be launched on the loop. It must be small, and no thread may be
        launching another: a thread may be so far ahead of the device that the device takes no further operations for a
        while.
        """
        size = sum(entry.size for entry in run.batch.entries)
        return size <= self._device.launch_bytes and all(each.launched for each in self.runs[:-1])

    def free(self, run: Run, now: float) -> float:
        """Removes a batch that is done. Returns from when on the device's time counts for it: from when another batch
        was last done or, if the device had none then, from when it got one. So no time counts twice.
        """
        self.runs.remove(run)
        since, self._counted = self._counted, now
        self._busy_seconds += now - since
        return since

    def computed_inline(self, seconds: float) -> None:
        """Adds busy time for work that did not come by `take`, while the device had no batch."""
        self._busy_seconds += seconds

    def give_back(self, run: Run) -> None:
        """Removes a batch of which nothing is left to compute."""
        self.runs.remove(run)

    def close(self) -> None:
        """Ends the threads, without waiting for what they compute, which nothing can interrupt."""
        self._threads.shutdown(wait=not self.runs)

    def _hand_over(self, run: Run, done: asyncio.Future[list[Part]]) -> None:
        """Passes on the outcomes of a batch from its thread, or reports that the thread is dead."""
        if (error := done.exception()) is not None:
            logger.critical("a batch ended the thread that computed it", exc_info=error)
            self._died()
        else:
            self._computed(run, done.result())
