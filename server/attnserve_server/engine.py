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
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

from attnserve_server.admission import Admission
from attnserve_server.batching import Batch, BatchQueue
from attnserve_server.errors import Cancelled, ComputationFailed, DeadlineExceeded, Draining, RequestError, Starting
from attnserve_server.metrics import Metrics
from attnserve_server.turns import Turns
from attnserve_server.work import BatchResult, Phases, RequestResult, Work

if TYPE_CHECKING:
    from attnserve_server.devices import Device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a request that ran: its result, its phases (encode still holds only the fetching), its batch."""

    result: RequestResult
    phases: Phases
    batch_size: int


Reply: TypeAlias = Callable[["Entry", Outcome | RequestError], None]


@dataclass(slots=True, eq=False)
class Entry:
    """A request in flight: what to compute, what that costs, how long its caller waits, and the way back.

    `caller` tells callers apart (`Caller.share`). Times are of `time.perf_counter`. `reply` is called once, on the
    event loop: with `Cancelled` if the entry was cancelled before it ran. If it fails with an outcome, it is called
    once more, with an error.
    """

    request: Work
    reply: Reply
    arrival: float
    deadline: float
    decode: float
    caller: Hashable = None
    cancelled: bool = False

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
        self, device: Device, queue: BatchQueue[Entry], admission: Admission, metrics: Metrics, max_wait: float = 0.0
    ) -> None:
        self._device = device
        self._queue = queue
        self._admission = admission
        self._metrics = metrics
        self._max_wait = max_wait
        self._loop = asyncio.get_running_loop()
        self._worker = ThreadPoolExecutor(1, "attnserve-device")
        self._turns: Turns[Entry] = Turns()
        self._busy = False
        self._batch_begin = 0.0
        self._busy_seconds = 0.0
        self._next_step: asyncio.Handle | None = None
        self._waits = False
        self._opened = False
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, entry: Entry) -> None:
        """Admits and queues a request. Raises Overloaded, InvalidRequest (too large for the server) or Draining.

        The caller of `submit` calls `release` when the reply has left.
        """
        if not self._opened:
            raise Starting
        if self._draining:
            self._metrics.rejected("draining")
            raise Draining
        self._admission.admit(entry.size, entry.cost, entry.request.reply_bytes)
        if entry.request.needs:
            try:
                entry.request.enter()
            except RequestError:
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
        return self._busy

    @property
    def batch_seconds(self) -> float:
        """How long the device has had the batch that it has now; 0 if it has none."""
        return perf_counter() - self._batch_begin if self._busy else 0.0

    @property
    def busy_seconds(self) -> float:
        """In how much time the device has had a batch."""
        return self._busy_seconds + self.batch_seconds

    def open(self) -> None:
        """Lets requests in: the device is ready."""
        self._opened = True

    def close(self) -> None:
        """Ends the worker thread. What it runs is not waited for: see `stuck`."""
        self._worker.shutdown(wait=not self._busy)

    def _schedule(self) -> None:
        """Has the next batch run, if the device is idle."""
        if self._busy or (self._next_step is not None and not self._waits):
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
        begin = perf_counter()
        batch = self._queue.pop(begin)
        self._drop(batch)
        if batch.entries and batch.entries[0].request.needs:
            self._begin(batch)
        if not batch.entries:
            if self._queue.requests:
                self._schedule()
            return
        self._busy, self._batch_begin = True, begin
        if batch.cost <= self._device.inline_flops:
            self._complete(batch, begin, self._run(batch))
        else:
            future = self._loop.run_in_executor(self._worker, self._run, batch)
            future.add_done_callback(lambda done: self._complete(batch, begin, done.result()))

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
            except RequestError as error:
                self._admission.computed(entry.cost, 0)
                batch.cost -= entry.cost
                self._leave(entry)
                self._reply(entry, error)
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

    def _run(self, batch: Batch[Entry]) -> list[tuple[list[Entry], BatchResult | Exception]]:
        """Computes a batch; if that fails, each of its requests alone, so that only the guilty fail."""
        entries = batch.entries
        try:
            return [(entries, self._compute(entries))]
        except Exception as error:
            logger.exception("a batch of %d failed", len(entries))
            if len(entries) == 1:
                return [(entries, error)]
        results: list[tuple[list[Entry], BatchResult | Exception]] = []
        for entry in entries:
            try:
                results.append(([entry], self._compute([entry])))
            except Exception as error:
                logger.exception("a request failed alone")
                results.append(([entry], error))
        return results

    def _compute(self, entries: list[Entry]) -> BatchResult:
        return entries[0].request.run_batch(self._device, [entry.request for entry in entries])

    def _complete(
        self, batch: Batch[Entry], begin: float, results: list[tuple[list[Entry], BatchResult | Exception]]
    ) -> None:
        """Hands results to their callers, and has the next batch run."""
        self._busy = False
        seconds = perf_counter() - begin
        self._busy_seconds += seconds
        self._admission.computed(batch.cost, seconds)
        if batch.entries[0].request.needs:
            for entries, outcome in results:
                for entry in entries:
                    entry.request.end(isinstance(outcome, Exception))
                    self._leave(entry)
        if self._queue.requests:
            self._schedule()
        for entries, outcome in results:
            if isinstance(outcome, Exception):
                for entry in entries:
                    self._reply(entry, ComputationFailed(type(outcome).__name__))
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
        try:
            entry.reply(entry, outcome)
        except Exception:
            logger.exception("a reply failed")
            if isinstance(outcome, Outcome):
                self._reply(entry, ComputationFailed("the reply could not be encoded"))
