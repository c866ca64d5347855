"""The life of a request between its decoding and its reply: admit, queue, batch, run, complete.

The engine lives on the event loop. A batch forms while the device is busy, and an idle device starts at once: there is
no timer. A small batch runs on the loop itself, because handing it to a thread costs more than computing it; a larger
one runs beside the loop, which meanwhile receives and decodes what comes next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

from attnserve_server.admission import Admission
from attnserve_server.batching import Batch, BatchQueue
from attnserve_server.computation import compute
from attnserve_server.errors import (
    Cancelled,
    ComputationFailed,
    DeadlineExceeded,
    DeviceFailed,
    Draining,
    RequestError,
    Starting,
    error_for_caller,
)
from attnserve_server.metrics import Metrics
from attnserve_server.turns import Turns
from attnserve_server.work import BatchResult, Phases, RequestResult, Work

if TYPE_CHECKING:
    from attnserve_server.devices import Device
    from attnserve_server.tracing import Trace, Tracing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a request that ran: its result, its phases (encode still holds only the fetching), its batch."""

    result: RequestResult
    phases: Phases
    batch_size: int


Reply: TypeAlias = Callable[["Entry", Outcome | RequestError], None]
Part: TypeAlias = tuple[list["Entry"], BatchResult | RequestError]
"""What came of some entries of a batch."""


@dataclass(slots=True, eq=False)
class Entry:
    """A request in flight: what to compute, what that costs, how long its caller waits, and the way back.

    `caller` tells callers apart (`Caller.share`); `trace` is there if the request is recorded. Times are of
    `time.perf_counter`. `reply` is called once, on the event loop: with `Cancelled` if the entry was cancelled before
    it ran. If it fails with an outcome, it is called once more, with an error.
    """

    request: Work
    reply: Reply
    arrival: float
    deadline: float
    decode: float
    caller: Hashable = None
    trace: Trace | None = None
    cancelled: bool = False
    answered: bool = False

    @property
    def group(self) -> Hashable:
        """Equal for entries that one batch can hold."""
        return self.request.group

    @property
    def cost(self) -> int:
        """What it costs to run, in FLOPs."""
        return self.request.cost

    @property
    def received_bytes(self) -> int:
        """What it holds in memory."""
        return self.request.received_bytes

    @property
    def priority(self) -> int:
        """Higher goes first."""
        return self.request.priority

    @property
    def size(self) -> int:
        """The bytes that it may take until its reply has left."""
        return self.request.received_bytes + self.request.reply_bytes + self.request.scratch_bytes


class Engine:
    """Runs requests on a device."""

    def __init__(
        self,
        device: Device,
        queue: BatchQueue[Entry],
        admission: Admission,
        metrics: Metrics,
        max_wait: float = 0.0,
        tracing: Tracing | None = None,
    ) -> None:
        self._device = device
        self._queue = queue
        self._admission = admission
        self._metrics = metrics
        self._max_wait = max_wait
        self._tracing = tracing
        self._loop = asyncio.get_running_loop()
        self._worker = ThreadPoolExecutor(1, "attnserve-device")
        self._turns: Turns[Entry] = Turns()
        self._running: Batch[Entry] | None = None
        self._batch_begin = 0.0
        self._busy_seconds = 0.0
        self._next_step: asyncio.Handle | None = None
        self._waits = False
        self._opened = False
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.failure: str | None = None
        """Why the device was given up, for good; None while it works."""
        self.failed = asyncio.Event()
        """Set when there is a failure."""

    def submit(self, entry: Entry) -> None:
        """Admits and queues a request. Raises Overloaded, InvalidRequest (too large for the server), Draining, or
        DeviceFailed.

        The caller of `submit` calls `release` when the reply has left.
        """
        if not self._opened:
            raise Starting
        if self.failure is not None:
            self._metrics.rejected("failed")
            raise DeviceFailed
        if self._draining:
            self._metrics.rejected("draining")
            raise Draining
        self._admission.admit(entry.size, entry.cost, entry.request.reply_bytes)
        if entry.request.needs:
            try:
                entry.request.enter()
            except Exception:
                self._admission.computed(entry.cost, 0)
                self._admission.release(entry.size)
                raise
            if not self._turns.enter(entry, entry.request.needs):
                self._idle.clear()
                return
        self._idle.clear()
        self._queue.push(entry)
        self._schedule()

    def release(self, entry: Entry) -> None:
        """Says that the reply of an admitted request has left, or never will."""
        self._admission.release(entry.size)
        if not self._admission.requests:
            self._idle.set()

    async def drain(self, grace: float) -> bool:
        """Refuses new requests and waits until all replies have left, at most `grace` seconds; whether they have."""
        self._draining = True
        if self._idle.is_set():
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), grace)
        except TimeoutError:
            return False
        return True

    @property
    def waiting_for_turns(self) -> int:
        """How many admitted requests wait for what others need before them."""
        return self._turns.waiting

    @property
    def stuck(self) -> bool:
        """Whether something is being computed, which nothing can interrupt."""
        return self._running is not None

    @property
    def running(self) -> object | None:
        """The batch that is being computed; None while the device is idle."""
        return self._running

    @property
    def running_cost(self) -> int:
        """What that batch costs, in FLOPs."""
        return 0 if self._running is None else self._running.cost

    @property
    def batch_seconds(self) -> float:
        """How long the device has had the batch that it has now; 0 if it has none."""
        return perf_counter() - self._batch_begin if self._running is not None else 0.0

    @property
    def busy_seconds(self) -> float:
        """In how much time the device has had a batch."""
        return self._busy_seconds + self.batch_seconds

    def open(self) -> None:
        """Lets requests in: the device is ready."""
        self._opened = True

    def close(self) -> None:
        """Ends the worker thread. What it runs is not waited for: see `stuck`."""
        self._worker.shutdown(wait=self._running is None)

    def fail(self, why: str) -> None:
        """Gives up the device, for good. Everybody who waits for it is told to go elsewhere, whatever else is wrong."""
        if self.failure is not None:
            return
        self.failure = why
        logger.critical("%s; requests are told to go elsewhere", why)
        batches = [] if self._running is None else [self._running]
        while self._queue.requests:
            batches.append(self._queue.pop(perf_counter()))
        waiting = [entry for batch in batches for entry in (*batch.entries, *batch.cancelled, *batch.expired)]
        for entry in dict.fromkeys([*waiting, *self._turns.everyone()]):
            if not entry.answered:
                self._reply(entry, DeviceFailed())
        self.failed.set()

    def _schedule(self) -> None:
        """Has the next batch run, if the device is idle."""
        if self._running is not None or (self._next_step is not None and not self._waits):
            return
        wait = self._remaining_wait() if self._max_wait > 0 else 0.0
        if self._next_step is not None:
            if wait > 0:
                return
            self._next_step.cancel()
        self._waits = wait > 0
        # Not at once, but when the loop has handed over what it has already received: that is a batch.
        self._next_step = self._loop.call_later(wait, self._step) if wait > 0 else self._loop.call_soon(self._step)

    def _remaining_wait(self) -> float:
        """How long the oldest entry still waits for company."""
        oldest = self._queue.oldest_arrival()
        return 0.0 if oldest is None or self._queue.is_full else oldest + self._max_wait - perf_counter()

    def _step(self) -> None:
        """Runs the next batch, if there is one."""
        self._next_step = None
        try:
            self._run_next()
        except Exception:  # a bug, which must not leave those waiting whom it did not reach
            logger.exception("the engine failed")
            self.fail("the engine failed")

    def _run_next(self) -> None:
        if self.failure is not None:
            return
        self._batch_begin = begin = perf_counter()
        self._running = batch = self._queue.pop(begin)
        self._drop(batch)
        if batch.entries and batch.entries[0].request.needs:
            self._begin(batch)
        if not batch.entries:
            self._running = None
            if self._queue.requests:
                self._schedule()
            return
        if batch.cost <= self._device.inline_flops:
            self._complete(batch, begin, compute(self._device, batch.entries))
        else:
            future = self._loop.run_in_executor(self._worker, compute, self._device, batch.entries)
            future.add_done_callback(partial(self._computed, batch, begin))

    def _drop(self, batch: Batch[Entry]) -> None:
        for entries, reason, error in (
            (batch.cancelled, "cancelled", Cancelled),
            (batch.expired, "deadline", DeadlineExceeded),
        ):
            for entry in entries:
                self._admission.computed(entry.cost, 0)
                self._metrics.cancelled(reason)
                self._leave(entry)
                self._reply(entry, error())

    def _begin(self, batch: Batch[Entry]) -> None:
        """Has the requests of a batch do what they must at their turn; those that cannot run leave it."""
        able = []
        for entry in batch.entries:
            try:
                entry.request.begin()
            except Exception as error:
                self._admission.computed(entry.cost, 0)
                batch.cost -= entry.cost
                self._leave(entry)
                self._reply(entry, error_for_caller(error))
            else:
                able.append(entry)
        batch.entries = able

    def _leave(self, entry: Entry) -> None:
        """Gives up what a request needed; who waited for it has its turn."""
        if not entry.request.needs:
            return
        entry.request.leave()
        for ready in self._turns.leave(entry):
            self._queue.push(ready)

    def _computed(self, batch: Batch[Entry], begin: float, done: asyncio.Future[list[Part]]) -> None:
        """Takes what the worker thread made of a batch, if it lives."""
        if (error := done.exception()) is not None:
            logger.critical("a batch ended the thread that computed it", exc_info=error)
            self.fail("the thread that computes is dead")
        else:
            self._complete(batch, begin, done.result())

    def _complete(self, batch: Batch[Entry], begin: float, parts: list[Part]) -> None:
        """Hands results to their callers, and has the next batch run."""
        if self.failure is not None:  # everybody has been told
            return
        try:
            self._hand_over(batch, begin, parts)
        except Exception:  # a bug, which must not leave those waiting whom it did not reach
            logger.exception("the engine failed")
            self._running = batch
            self.fail("the engine failed")

    def _hand_over(self, batch: Batch[Entry], begin: float, parts: list[Part]) -> None:
        if isinstance(parts[0][1], DeviceFailed):
            self.fail("the device is lost")
            return
        self._running = None
        seconds = perf_counter() - begin
        self._busy_seconds += seconds
        self._admission.computed(batch.cost, seconds)
        if batch.entries[0].request.needs:
            for entries, outcome in parts:
                for entry in entries:
                    entry.request.end(isinstance(outcome, RequestError))
                    self._leave(entry)
        if self._queue.requests:
            self._schedule()
        for entries, outcome in parts:
            if self._tracing is not None:
                self._tracing.batch(entries, begin, outcome)
            if isinstance(outcome, RequestError):
                for entry in entries:
                    self._reply(entry, outcome)
                continue
            flops = sum(entry.request.flops for entry in entries)
            tokens = sum(entry.request.query_tokens for entry in entries)
            self._metrics.batch(len(entries), flops, tokens, outcome.padding, outcome.kernel_calls)
            if (layer := entries[0].request.layer) is not None:
                self._metrics.layer_batch(layer, len(entries), tokens, flops)
            for entry, result in zip(entries, outcome.results, strict=True):
                queue = max(0.0, begin - entry.arrival - entry.decode)
                phases = Phases(entry.decode, queue, outcome.staging, outcome.compute, outcome.fetch)
                self._reply(entry, Outcome(result, phases, len(entries)))

    def _reply(self, entry: Entry, outcome: Outcome | RequestError) -> None:
        """Hands an outcome to its caller; a failure there is that caller's alone."""
        entry.answered = True
        try:
            entry.reply(entry, outcome)
        except Exception:
            logger.exception("a reply failed")
            if isinstance(outcome, Outcome):
                self._reply(entry, ComputationFailed("the reply could not be encoded"))
