"""The life of a request between its decoding and its reply: admit, queue, batch, run, complete.

The engine lives on the event loop. Requests that come while the device is busy form the next batch. An idle device
starts at once: only `max_wait` makes it wait, by a timer. The worker (`worker.py`) runs the device. Some devices take
several batches at a time. A busy one gets another once what waits fills a batch, or costs no less than the batch that
it got last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Iterable
from dataclasses import replace
from math import ceil, inf
from time import perf_counter
from typing import TYPE_CHECKING

from attnserve_server.errors import DeviceFailed, Draining, RequestError, Starting
from attnserve_server.no_room import NoRoom
from attnserve_server.observability.metrics import Metrics
from attnserve_server.requests.work import BatchResult
from attnserve_server.scheduling.admission import Admission
from attnserve_server.scheduling.batch_times import BatchTimes
from attnserve_server.scheduling.batching import BatchQueue
from attnserve_server.scheduling.computation import Part
from attnserve_server.scheduling.deadlines import Deadlines
from attnserve_server.scheduling.delivery import Delivery
from attnserve_server.scheduling.entry import Entry, Held, StillHeld
from attnserve_server.scheduling.pending import PendingRequests
from attnserve_server.scheduling.worker import Run, Worker

if TYPE_CHECKING:
    from attnserve_server.devices import Device
    from attnserve_server.observability.tracing import Tracing

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests on a device."""

    def __init__(
        self,
        device: Device,
        queue: BatchQueue[Entry],
        admission: Admission,
        metrics: Metrics,
        max_wait: float,
        tracing: Tracing | None,
    ) -> None:
        self._device = device
        self._queue = queue
        self._admission = admission
        self._metrics = metrics
        self._max_wait = max_wait
        self._delivery = Delivery(metrics, tracing)
        self._loop = asyncio.get_running_loop()
        self._pending = PendingRequests(queue, admission, self._delivery, metrics, self._run_without_device_after)
        self._deadlines = Deadlines(queue, admission)
        self._batch_times = BatchTimes(queue, admission.pace, self._deadlines)
        self._drop_due: asyncio.Handle | None = None
        self._next_step: asyncio.Handle | None = None
        """The scheduled call of `_step`, if there is one."""
        self._next_step_is_timer = False
        """Whether that call is a timer, until which a batch may fill (`max_wait`)."""
        self._closed: type[Starting | Draining | DeviceFailed] | None = Starting
        self._idle = asyncio.Event()
        self._idle.set()
        self.worker = Worker(device, self._complete, lambda: self.fail("a thread that computes is dead"))
        """Runs the device."""
        self.failure: str | None = None
        """Why the device was given up, for good; None while it works."""
        self.refused_at = 0.0
        """When something was refused last because this is closed, by the loop's clock."""
        self.failed = asyncio.Event()
        """Set when there is a failure."""

    def check_open(self) -> None:
        """Raises Starting, Draining or DeviceFailed if no requests are accepted at the moment."""
        if self._closed is None:
            return
        self.refused_at = self._loop.time()
        if self._closed is not Starting:
            self._metrics.rejected("draining" if self._closed is Draining else "failed")
        raise self._closed

    def check(self, caller: Hashable, size: int) -> None:
        """Raises what `check_open` does, and Overloaded if a request of `size` bytes would be refused whatever it asks
        for. This is asked before the request is read: refusing it must cost less than reading it.
        """
        self.check_open()
        self._admission.check(caller, size)

    def refusal(self, caller: Hashable, size: int) -> NoRoom | None:
        """As `check`, but returns what the Overloaded would say: see `Admission.refusal`."""
        self.check_open()
        return self._admission.refusal(caller, size)

    def hold(self, caller: Hashable, size: int) -> StillHeld:
        """Counts a message of `size` bytes that waits to be read, as a request of its caller, until it is released.
        Raises what `check` does.
        """
        self.check(caller, size)
        self._admission.hold(caller, size, 1)
        self._idle.clear()
        return StillHeld(caller, 1, size)

    def submit(self, entry: Entry) -> None:
        """Admits and queues a request, which runs once the loop has handed over what it has received. Raises what
        `check_open` does, Overloaded, InvalidRequest (too large for the server), or DeadlineUnreachable.

        The caller of `submit` calls `release` when the reply has been sent.
        """
        self.take(entry)
        self._schedule()

    def take(self, entry: Entry) -> None:
        """As `submit`, for requests that arrive together: none runs before `hurry` is called."""
        self.check_open()
        is_timed = entry.deadline < inf and entry.request.computes
        is_trial = is_timed and self._deadlines.check(entry, self.worker.free_at)
        self._pending.enter(entry)
        if is_trial:  # not before `enter`, which may refuse it
            self._deadlines.begin_trial(entry)
        self._idle.clear()

    def hurry(self) -> None:
        """Runs what has been taken. If that is little, and nothing else is in flight, it runs at once: to wait a turn
        of the loop for others to join the batch would take longer than to compute it. All else is scheduled, as by
        `submit`.
        """
        queued = self._queue.requests
        if (
            queued
            and queued == self._admission.requests
            and self._queue.cost <= self.worker.inline_flops
            and self._max_wait == 0
        ):
            if self._next_step is not None:
                self._next_step.cancel()
            self._step()
        else:
            self._schedule()

    def cancel(self, entries: Iterable[Entry]) -> None:
        """Cancels entries that nobody waits for any longer. They are replied to in the loop's next turn; those that are
        already running go on.
        """
        if self._pending.cancel(entries) and self._drop_due is None:
            self._drop_due = self._loop.call_soon(self._drop_cancelled)

    @property
    def is_free(self) -> bool:
        """Whether a request that comes now can be computed at once: the engine is open, nothing waits or runs, and
        batches do not wait to fill.
        """
        return self._pending.none_ready and not (self._closed or self.worker.runs or self._max_wait)

    def has_room_for(self, caller: Hashable, size: int, requests: int) -> bool:
        """Whether a free engine would take that many requests of a caller, of `size` bytes together."""
        return self._admission.has_room_for(caller, size, requests)

    def computed_inline(self, caller: Hashable, size: int, requests: int, seconds: float) -> None:
        """Admits requests for which `has_room_for` has found room, and which have since been computed without the
        queue, in `seconds`. No rate is learnt from that: each takes longer in a queue. The caller of this calls
        `release` when they have been replied to.
        """
        self._admission.admit_computed(caller, size, requests)
        self._idle.clear()
        self.worker.computed_inline(seconds)

    def answered(self, entry: Entry, reply_bytes: int) -> StillHeld:
        """Lets go of an admitted request whose reply is about to be sent. Returns what admission still counts for it:
        twice the reply, because there are two copies of it while it is being sent (`rpc/outbox.py`), but no more than
        before.
        """
        left = min(entry.size, 2 * reply_bytes)
        self._admission.shrink(entry.caller, entry.size - left)
        return StillHeld(entry.caller, 1, left)

    def release(self, *held: Held) -> None:
        """Releases admitted requests of one caller, whose replies have been sent or never will be."""
        if held:
            requests, size = sum([each.requests for each in held]), sum([each.size for each in held])
            self._admission.release(held[0].caller, size, requests)
        if not self._admission.requests:
            self._idle.set()

    async def drain(self, grace: float) -> bool:
        """Refuses new requests and waits up to `grace` seconds until all replies are sent; returns whether they are."""
        if self.failure is None:
            self._closed = Draining
        if self._idle.is_set():
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), grace)
        except TimeoutError:
            return False
        return True

    @property
    def waiting_for_turns(self) -> int:
        """How many admitted requests wait for something that others before them need."""
        return self._pending.waiting_for_turns

    @property
    def bytes_waiting_for_turns(self) -> int:
        """The bytes of these requests."""
        return self._pending.bytes_waiting_for_turns

    @property
    def is_computing(self) -> bool:
        """Whether something is being computed: nothing can interrupt that."""
        return bool(self.worker.runs)

    def open(self) -> None:
        """Lets requests in: the device is ready."""
        if self._closed is Starting:
            self._closed = None

    def close(self) -> None:
        """Ends the worker, without waiting for what it computes: see `is_computing`."""
        self.worker.close()

    def fail(self, why: str) -> None:
        """Gives up the device for good. All waiting callers are told to go elsewhere, whatever else is wrong."""
        if self.failure is not None:
            return
        self.failure, self._closed = why, DeviceFailed
        logger.critical("%s; requests are told to go elsewhere", why)
        batches = [run.batch for run in self.worker.runs]
        try:
            while self._queue.requests:
                batches.append(self._queue.pop(perf_counter()))
        except Exception:  # callers of what is in it learn of the failure when the process ends
            logger.exception("the queue is broken")
        waiting = [entry for batch in batches for entry in (*batch.entries, *batch.cancelled, *batch.expired)]
        for entry in dict.fromkeys([*waiting, *self._pending.all_at_turns()]):
            if not entry.answered:
                self._delivery.reply(entry, DeviceFailed())
        self.failed.set()

    def _schedule(self) -> None:
        """Schedules the next batch, if there is one and the device takes it."""
        if (
            not self._queue.requests
            or (self.worker.runs and not self._has_room())
            or (self._next_step is not None and not self._next_step_is_timer)
        ):
            return
        wait = self._remaining_wait() if self._max_wait > 0 else 0.0
        if self._next_step is not None:
            if wait > 0:
                return
            self._next_step.cancel()
        self._next_step_is_timer = wait > 0
        # Not at once: first the loop hands over what it has already received, so that all of that makes a batch.
        if wait > 0:  # rounded up: the loop rounds to whole milliseconds, and 0 would not wait
            self._next_step = self._loop.call_later(ceil(wait * 1e3) * 1e-3, self._step)
        else:
            self._next_step = self._loop.call_soon(self._step)

    def _has_room(self) -> bool:
        """Whether a busy device takes another batch now."""
        worker = self.worker
        return worker.depth > 1 and worker.has_room_beside(self._queue.cost, self._queue.is_full)

    def _remaining_wait(self) -> float:
        """How long the oldest entry still waits for others to join its batch."""
        oldest = None if self._queue.is_full else self._queue.oldest_arrival()
        return 0.0 if oldest is None else oldest + self._max_wait - perf_counter()

    def _step(self) -> None:
        """Runs the next batch, if there is one."""
        self._next_step = None
        try:
            self._run_next()
        except Exception as bug:
            self._fail_by(bug)

    def _fail_by(self, bug: Exception) -> None:
        """Gives up, so that a bug leaves no other caller waiting."""
        logger.error("the engine failed", exc_info=bug)
        self.fail("the engine failed")

    def _run_next(self) -> None:
        """Gives the worker the next batch, and replies to what cannot run."""
        if self.failure is not None:
            return
        begin = perf_counter()
        self._batch_times.learn(begin)
        batch = self._queue.pop(begin)
        run = self.worker.take(batch, begin)
        self._pending.begin(batch)
        if not batch.entries:
            self.worker.give_back(run)
            if batch.charges:  # it had entries, none of which could run
                self._queue.end(batch, None)
            self._schedule()
            return
        self.worker.run(run, self._admission.pace.least_seconds(batch.work))
        if self.worker.depth > 1:  # there may be enough for another
            self._schedule()

    def _drop_cancelled(self) -> None:
        """Replies to cancelled entries that have not run yet."""
        self._drop_due = None
        if self.failure is not None:  # everybody has been told
            return
        try:
            self._pending.drop_cancelled()
        except Exception as bug:
            self._fail_by(bug)
        self._schedule()  # what has left may have made it the turn of others

    def _run_without_device_after(self, turns: int) -> None:
        """Has what has nothing to compute run once the loop has turned so often, and once more."""
        if turns:
            self._loop.call_soon(self._run_without_device_after, turns - 1)
        else:
            self._loop.call_soon(self._run_without_device)

    def _run_without_device(self) -> None:
        """Runs what has nothing to compute."""
        if self.failure is not None:  # everybody has been told
            return
        try:
            self._pending.run_without_device(self._device)
        except Exception as bug:
            self._fail_by(bug)
        self._schedule()  # what has left may have made it the turn of others

    def _complete(self, run: Run, parts: list[Part]) -> None:
        """Hands results to their callers, and schedules the next batch."""
        if self.failure is not None:  # everybody has been told
            return
        try:
            self._hand_over(run, parts)
        except Exception as bug:
            if run not in self.worker.runs:  # `fail` tells the callers of what is in there
                self.worker.take(run.batch, run.begin)
            self._fail_by(bug)

    def _hand_over(self, run: Run, parts: list[Part]) -> None:
        """Counts out what has been computed, ends the turns of its requests, schedules the next batch and delivers the
        outcomes.
        """
        if isinstance(parts[0].outcome, DeviceFailed):
            self.fail("the device is lost")
            return
        batch, begin, now = run.batch, run.begin, perf_counter()
        since = self.worker.free(run, now)
        for entry in batch.entries:
            self._admission.computed(entry.caller, entry.size, entry.cost, entry.kind)
            entry.device_seconds += (now - since) * entry.cost / max(1, batch.cost)
        if len(parts) == 1 and not isinstance(parts[0].outcome, RequestError):  # the time of a failure says nothing
            # Mostly the next batch begins as soon as the loop gets to it, and the time until then counts as this one's
            # (`BatchTimes.end`). Not if another runs already, if batches wait to fill, or if nothing waits.
            apart = bool(self.worker.runs) or self._max_wait > 0 or not self._queue.requests
            self._batch_times.end(batch, since, now if apart else None)
            if apart:
                self._loop.call_soon(self._batch_times.learn)  # once replies are on their way
        else:
            self._batch_times.end_failed(batch, since, now)
        if batch.entries[0].request.needs:
            for entries, outcome in parts:
                failed = isinstance(outcome, RequestError)
                again = () if isinstance(outcome, RequestError) else outcome.again
                for place, entry in enumerate(entries):
                    if place not in again:  # one to run again keeps its turn until it is complete
                        entry.request.end(failed)
                        self._pending.leave(entry)
        whole = [self._whole(entries, outcome) for entries, outcome in parts]
        self._schedule()
        for entries, outcome in whole:
            self._delivery.deliver(entries, begin, outcome)

    def _whole(self, entries: list[Entry], outcome: BatchResult | RequestError) -> Part:
        """The part of an outcome that can be delivered. Requests that must run again are queued, each at the cost of
        running again.
        """
        if isinstance(outcome, RequestError) or not outcome.again:
            return Part(entries, outcome)
        for place, request in outcome.again.items():
            self._pending.enter_again(entries[place], request)
        places = [place for place in range(len(entries)) if place not in outcome.again]
        results = [outcome.results[place] for place in places]
        return Part([entries[place] for place in places], replace(outcome, results=results, again={}))
