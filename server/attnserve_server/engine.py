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
from typing import TypeAlias

from attnserve_server.admission import Admission
from attnserve_server.batching import Batch, BatchQueue
from attnserve_server.devices import BatchResult, Device, RequestResult
from attnserve_server.errors import Cancelled, ComputationFailed, DeadlineExceeded, Draining, RequestError
from attnserve_server.metrics import Metrics
from attnserve_server.reply import Phases
from attnserve_server.request import Request


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a request that ran: its result, its phases (encode still holds only the fetching), its batch."""

    result: RequestResult
    phases: Phases
    batch_size: int


logger = logging.getLogger(__name__)

Reply: TypeAlias = Callable[["Entry", Outcome | RequestError], None]


@dataclass(slots=True, eq=False)
class Entry:
    """A request in flight: what to compute, what that costs, how long its caller waits, and the way back.

    Times are of `time.perf_counter`. `reply` is called once, on the event loop, unless the engine never gets to it
    because the entry was cancelled: then it is called with `Cancelled`.
    """

    request: Request
    reply: Reply
    arrival: float
    deadline: float
    decode: float
    cancelled: bool = False

    @property
    def group(self) -> Hashable:
        """Equal for entries that one batch can hold."""
        return self.request.problem.group

    @property
    def flops(self) -> int:
        """What it costs to run."""
        return self.request.flops

    @property
    def received_bytes(self) -> int:
        """What it holds in memory."""
        return self.request.received_bytes

    @property
    def priority(self) -> int:
        """Higher goes first."""
        return self.request.problem.priority

    @property
    def size(self) -> int:
        """The bytes that it holds until its reply has left."""
        return self.request.received_bytes + self.request.reply_bytes


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
        self._busy = False
        self._step_is_due = False
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, entry: Entry) -> None:
        """Admits and queues a request. Raises Overloaded, InvalidRequest (too large for the server) or Draining.

        The caller of `submit` calls `release` when the reply has left.
        """
        if self._draining:
            self._metrics.rejected("draining")
            raise Draining
        self._admission.admit(entry.size, entry.flops)
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
        try:
            await asyncio.wait_for(self._idle.wait(), grace)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Ends the worker thread when it has finished what it runs."""
        self._worker.shutdown()

    def _schedule(self) -> None:
        # Not at once, but when the loop has handed over what it has already received: that is a batch.
        if not self._step_is_due and not self._busy:
            self._step_is_due = True
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        """Runs the next batch, if there is one."""
        self._step_is_due = False
        if self._busy:
            return
        now = perf_counter()
        if self._max_wait > 0 and (wait := self._remaining_wait(now)) > 0:
            self._step_is_due = True
            self._loop.call_later(wait, self._step)
            return
        batch = self._queue.pop(now)
        self._drop(batch)
        if not batch.entries:
            return
        self._busy = True
        if batch.flops <= self._device.inline_flops:
            self._complete(batch, now, self._run(batch))
        else:
            future = self._loop.run_in_executor(self._worker, self._run, batch)
            future.add_done_callback(lambda done: self._complete(batch, now, done.result()))

    def _remaining_wait(self, now: float) -> float:
        oldest = self._queue.oldest_arrival()
        return 0.0 if oldest is None or self._queue.is_full else oldest + self._max_wait - now

    def _drop(self, batch: Batch[Entry]) -> None:
        for entries, reason, error in (
            (batch.cancelled, "cancelled", Cancelled),
            (batch.expired, "deadline", DeadlineExceeded),
        ):
            for entry in entries:
                self._admission.computed(entry.flops, 0)
                self._metrics.cancelled(reason)
                entry.reply(entry, error())

    def _run(self, batch: Batch[Entry]) -> list[tuple[list[Entry], BatchResult | Exception]]:
        """Computes a batch; if that fails, each of its requests alone, so that only the guilty fail."""
        entries = batch.entries
        try:
            return [(entries, self._device.run([entry.request for entry in entries]))]
        except Exception as error:
            logger.exception("a batch of %d failed", len(entries))
            if len(entries) == 1:
                return [(entries, error)]
        results: list[tuple[list[Entry], BatchResult | Exception]] = []
        for entry in entries:
            try:
                results.append(([entry], self._device.run([entry.request])))
            except Exception as error:
                logger.exception("a request failed alone")
                results.append(([entry], error))
        return results

    def _complete(
        self, batch: Batch[Entry], begin: float, results: list[tuple[list[Entry], BatchResult | Exception]]
    ) -> None:
        """Hands results to their callers, and has the next batch run."""
        self._busy = False
        self._admission.computed(batch.flops, perf_counter() - begin)
        if self._queue.requests:
            self._schedule()
        for entries, outcome in results:
            if isinstance(outcome, Exception):
                for entry in entries:
                    entry.reply(entry, ComputationFailed(type(outcome).__name__))
                continue
            self._metrics.batch(
                len(entries),
                sum(entry.flops for entry in entries),
                sum(entry.request.query_tokens for entry in entries),
                outcome.padding,
                outcome.kernel_calls,
            )
            for entry, result in zip(entries, outcome.results, strict=True):
                phases = Phases(entry.decode, begin - entry.arrival, outcome.staging, outcome.compute, outcome.fetch)
                entry.reply(entry, Outcome(result, phases, len(entries)))
