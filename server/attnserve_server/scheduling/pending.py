"""Requests that are admitted but do not run yet: they wait for their turn, are queued, or leave.

In: entries, as they come and as they are cancelled; batches from the queue. Out: the requests of a batch that can run;
a reply to each that leaves without having run, or has nothing to compute and runs here. On the event loop. The engine
decides when batches run.

What has nothing to compute runs on the event loop, in turns by caller. Most takes microseconds; to fork thousands of
layers of caches takes milliseconds, after which the loop turns to others first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Final

from attnserve_server.errors import Cancelled, DeadlineExceeded, RequestError, error_for_caller
from attnserve_server.host.loop_slices import LONGEST_SECONDS, SLICE_SECONDS
from attnserve_server.observability.metrics import Metrics
from attnserve_server.requests.work import Work
from attnserve_server.scheduling.admission import Admission
from attnserve_server.scheduling.batching import Batch, BatchQueue
from attnserve_server.scheduling.computation import compute
from attnserve_server.scheduling.delivery import Delivery
from attnserve_server.scheduling.entry import Entry
from attnserve_server.scheduling.turns import Turns

if TYPE_CHECKING:
    from attnserve_server.devices import Device


TURNS: Final = 10
"""How often the loop turns for each slice in which requests ran that have nothing to compute: about as often as a unary
call needs. RPCs that come meanwhile must begin in time, or gRPC cancels them.
"""


class PendingRequests:
    """The waiting requests of one engine, in a queue that others may look at."""

    def __init__(
        self,
        queue: BatchQueue[Entry],
        admission: Admission,
        delivery: Delivery,
        metrics: Metrics,
        call_after: Callable[[int], object],
    ) -> None:
        """`call_after` has `run_without_device` called once the loop has turned so often, in a turn of its own."""
        self._queue = queue
        self._admission = admission
        self._delivery = delivery
        self._metrics = metrics
        self._call_after = call_after
        self._turns: Turns[Entry] = Turns()
        self._cancelled: list[Entry] = []
        self._without_device: dict[Hashable, deque[Entry]] = {}
        """Those whose turn has come and that have nothing to compute, by caller, in the order of who is next."""
        self._run_is_due = False
        """Whether `run_without_device` is being called, or will be."""

    @property
    def waiting_for_turns(self) -> int:
        """How many wait for something that others before them need."""
        return len(self._turns.waiting)

    @property
    def bytes_waiting_for_turns(self) -> int:
        """The bytes of these requests."""
        return sum(entry.received_bytes for entry in self._turns.waiting)

    @property
    def none_ready(self) -> bool:
        """Whether none could run now."""
        return not (self._queue.requests or self._without_device)

    def enter(self, entry: Entry) -> None:
        """Admits a request, which waits from now on. Raises Overloaded, InvalidRequest (too large for the server), and
        what the request's own `enter` raises.
        """
        self._admission.admit(entry.caller, entry.size, entry.cost, entry.request.extent.reply_bytes, entry.kind)
        if entry.request.needs:
            try:
                entry.request.enter()
            except Exception:
                self._admission.computed(entry.caller, entry.size, entry.cost, entry.kind)
                self._admission.release(entry.caller, entry.size)
                raise
            if not self._turns.enter(entry, entry.request.needs, entry.request.shares):
                return
        self._let_run(entry)

    def _let_run(self, entry: Entry) -> None:
        """Lets a request run whose turn has come: on the device, for which it is queued, or without it."""
        if entry.request.computes:
            self._queue.push(entry)
            return
        if not self._run_is_due:
            self._run_is_due = True
            self._call_after(0)
        self._without_device.setdefault(entry.caller, deque()).append(entry)

    def run_without_device(self, device: Device) -> None:
        """Runs requests that have nothing to compute and whose turn has come or comes meanwhile: all, or for about
        `SLICE_SECONDS`. Then it is called again, after the more turns of the loop the longer they took.
        """
        first = now = perf_counter()
        while self._without_device and now - first < SLICE_SECONDS:
            self._run_next(now, device)
            now = perf_counter()
        if turns := int(TURNS * min(now - first, LONGEST_SECONDS) / SLICE_SECONDS):
            self._call_after(turns)
        elif self._without_device:
            self._call_after(0)
        else:
            self._run_is_due = False

    def _run_next(self, begin: float, device: Device) -> None:
        """Runs the first request of the caller that is next, who is last then."""
        caller, waiting = next(iter(self._without_device.items()))
        del self._without_device[caller]
        entry = waiting.popleft()
        if waiting:
            self._without_device[caller] = waiting
        if entry.cancelled:
            self._drop((entry,), Cancelled)
        elif entry.deadline <= begin:
            self._drop((entry,), DeadlineExceeded)
        else:
            self._run(entry, begin, device)

    def _run(self, entry: Entry, begin: float, device: Device) -> None:
        self._admission.computed(entry.caller, entry.size, entry.cost, entry.kind)
        try:
            entry.request.begin()
        except Exception as error:
            self.leave(entry)
            self._delivery.reply(entry, error_for_caller(error))
            return
        ((_, outcome),) = compute(device, [entry])
        entry.request.end(isinstance(outcome, RequestError))
        self.leave(entry)
        self._delivery.deliver([entry], begin, outcome)

    def enter_again(self, entry: Entry, request: Work) -> None:
        """Queues a request that has run and must run once more, as `request`, which has another cost. It keeps its
        admitted bytes, and its turn.
        """
        entry.request = request
        entry.kind, entry.cost = request.kind, request.extent.cost
        self._admission.again(entry.caller, entry.size, entry.cost, entry.kind)
        self._queue.push(entry)

    def cancel(self, entries: Iterable[Entry]) -> bool:
        """Marks entries as cancelled; returns whether there were any. See `drop_cancelled`."""
        some = False
        for entry in entries:
            some = entry.cancelled = True
            if entry.request.needs:
                self._cancelled.append(entry)
        return some

    def drop_cancelled(self) -> None:
        """Replies to cancelled entries that have not run yet."""
        cancelled, self._cancelled = self._cancelled, []
        # First those that wait for turns. As those in the queue leave, turns come, and who gets one enters the queue: a
        # cancelled one would then be missed there.
        self._drop(filter(self._turns.waits, cancelled), Cancelled)
        self._drop(self._queue.drop_cancelled(), Cancelled)

    def begin(self, batch: Batch[Entry]) -> None:
        """Calls `begin` of a batch's requests, whose turn it is. Replies to those that will not run, because nobody
        waits for them or because they cannot; they leave the batch.
        """
        self._drop(batch.cancelled, Cancelled)
        self._drop(batch.expired, DeadlineExceeded)
        if not batch.entries or not batch.entries[0].request.needs:
            return
        able = []
        for entry in batch.entries:
            try:
                entry.request.begin()
                self._recount(batch, entry)
            except Exception as error:
                self._admission.computed(entry.caller, entry.size, entry.cost, entry.kind)
                batch.cost -= entry.cost
                batch.work.remove(entry.kind, entry.cost)
                self.leave(entry)
                self._delivery.reply(entry, error_for_caller(error))
            else:
                able.append(entry)
        batch.entries = able

    def leave(self, entry: Entry) -> None:
        """Gives up what a request needed, once it has run or never will. Then it is the turn of those next in line."""
        if not entry.request.needs:
            return
        entry.request.leave()
        for ready in self._turns.leave(entry):
            self._let_run(ready)

    def all_at_turns(self) -> Iterable[Entry]:
        """All entries that wait for a turn or have one."""
        return self._turns.everyone()

    def _drop(self, entries: Iterable[Entry], error: type[Cancelled | DeadlineExceeded]) -> None:
        """Replies to entries that will not run, because nobody waits for them."""
        for entry in entries:
            self._admission.computed(entry.caller, entry.size, entry.cost, entry.kind)
            self._metrics.cancelled("cancelled" if error is Cancelled else "deadline")
            self.leave(entry)
            self._delivery.reply(entry, error())

    def _recount(self, batch: Batch[Entry], entry: Entry) -> None:
        """Recounts a request's cost, now that its turn has come. Raises what `admit` does if there is no room."""
        cost, size = entry.cost, entry.size
        entry.count()
        if entry.cost == cost and entry.size == size:
            return
        try:
            reply_bytes = entry.request.extent.reply_bytes
            self._admission.recount(entry.caller, (size, cost), (entry.size, entry.cost), reply_bytes, entry.kind)
        except RequestError:
            entry.cost, entry.size = cost, size
            entry.request.end(failed=True)
            raise
        batch.cost += entry.cost - cost
        batch.work.remove(entry.kind, cost)
        batch.work.add(entry.kind, entry.cost)
