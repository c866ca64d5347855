"""A device that takes two batches at a time, each of which ends when the test says so, with an engine that feeds it.

Its batches block worker threads on events, never on time: a test knows at each moment what is in flight.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from engine_bench import PATIENCE_S
from engines import OpenAdmission, batch_queue, engine_of
from rpcs import new_metrics

from attnserve_server.devices.failures import Blame
from attnserve_server.errors import RequestError
from attnserve_server.requests.work import BatchResult, Extent, Finish, RequestResult
from attnserve_server.scheduling.batching import BatchQueue
from attnserve_server.scheduling.entry import Entry, Outcome


@dataclass(eq=False)
class Asked:
    """A request: what it costs, which requests it can share a batch with, and what it needs exclusively."""

    cost: int = 1
    kin: str = "one"
    needs: Sequence[Hashable] = ()
    failure: Callable[[], BaseException] | None = None
    shares: bool = False
    computes: bool = True
    layer: None = None
    kind: str = "asked"
    priority: int = 0
    received_bytes: int = 1
    scratch_bytes: int = 0
    said: list[str] = field(default_factory=list)
    """The lifecycle calls that the engine has made on it."""

    @property
    def group(self) -> Hashable:
        """A request that needs something never shares a batch with one that needs nothing."""
        return self.kin, bool(self.needs)

    @property
    def extent(self) -> Extent:
        return Extent(flops=self.cost, cost=self.cost, query_tokens=1, reply_bytes=1)

    def enter(self) -> None:
        self.said.append("enter")

    def begin(self) -> None:
        self.said.append("begin")

    def end(self, failed: bool) -> None:
        self.said.append("failed" if failed else "end")

    def leave(self) -> None:
        self.said.append("leave")

    def run_batch(self, device: PairDevice, batch: Sequence[Asked]) -> BatchResult:
        return device.compute(batch)

    def launch_batch(self, device: PairDevice, batch: Sequence[Asked]) -> Finish | None:
        return device.launch(batch)


class Batch:
    """A batch that the device holds until it is released."""

    def __init__(self, requests: Sequence[Asked]) -> None:
        self.requests = list(requests)
        self.may_end = threading.Event()
        self.thread = threading.current_thread()


class PairDevice:
    """A device for two batches at a time, which fails as its requests say."""

    inline_flops = -1
    depth = 2

    def __init__(self, launch_bytes: int = 0) -> None:
        self.launch_bytes = launch_bytes
        self.launched: list[threading.Thread] = []
        """By which threads batches were launched."""
        self.fails_to_launch = False
        self.batches: list[Batch] = []
        """All batches that it was ever given, in order."""
        self.held = True
        """Whether batches wait until they are released."""
        self.holds_again = True
        """Whether it also holds requests that it has seen before, such as retries of failed ones."""
        self.lost = False
        self._entered = threading.Semaphore(0)

    def prepare_thread(self) -> None:
        pass

    def launch(self, requests: Sequence[Asked]) -> Finish:
        self.launched.append(threading.current_thread())
        if self.fails_to_launch:
            raise RuntimeError("no room")
        return lambda: self.compute(requests)

    def compute(self, requests: Sequence[Asked]) -> BatchResult:
        batch = Batch(requests)
        known = not self.holds_again and any(requests[0] in before.requests for before in list(self.batches))
        if known:
            batch.may_end.set()
        self.batches.append(batch)
        if not self.held:  # checked only after the append: otherwise `end_all` could come in between and miss this one
            batch.may_end.set()
        if not known:
            self._entered.release()
        assert batch.may_end.wait(PATIENCE_S)
        for request in requests:
            if request.failure is not None:
                raise request.failure()
        results = [RequestResult(memoryview(b"%d" % id(request)), None, None) for request in requests]
        return BatchResult(results, 0.0, 0.0, 0.0)

    def blame(self, error: Exception) -> Blame:
        return "device" if self.lost else "memory" if isinstance(error, MemoryError) else "request"

    def take_kernel_calls(self) -> Counter[str]:
        return Counter()

    async def until_entered(self, batches: int = 1) -> None:
        """Waits until that many more batches have arrived."""
        for _ in range(batches):
            entered = asyncio.get_running_loop().run_in_executor(
                None, lambda: self._entered.acquire(timeout=PATIENCE_S)
            )
            assert await entered

    def costs(self) -> list[list[int]]:
        """The costs of each batch's requests."""
        return [[request.cost for request in batch.requests] for batch in self.batches]

    def end(self, *places: int) -> None:
        """Releases batches by their positions among all."""
        for place in places:
            self.batches[place].may_end.set()

    def end_all(self) -> None:
        """Releases all batches, present and future."""
        self.held = False
        for batch in list(self.batches):
            batch.may_end.set()


class PairBench:
    """An engine on a `PairDevice`, and the callers' side of it."""

    def __init__(
        self, max_batch_requests: int = 64, max_batch_flops: int = 10**12, device: PairDevice | None = None
    ) -> None:
        self.device: Any = device or PairDevice()
        self.admission = OpenAdmission(10**6, 10**12, 10**15)
        self.metrics = new_metrics()
        self.queue: BatchQueue[Entry] = batch_queue(max_batch_flops, max_batch_requests, pace=self.admission.pace)
        self.engine = engine_of(self.device, self.queue, self.admission, self.metrics)
        self.engine.open()
        self.replies: dict[Entry, list[Outcome | RequestError]] = {}
        self._answered = asyncio.Event()

    def submit(self, *requests: Asked, deadline: float = float("inf")) -> list[Entry]:
        """Submits requests within one turn of the event loop."""
        entries = []
        for request in requests:
            entry = Entry(request, self._reply, perf_counter(), deadline, 0.0, "me", None)  # type: ignore[arg-type]
            self.engine.submit(entry)
            self.replies[entry] = []
            entries.append(entry)
        return entries

    async def given(self, *requests: Asked) -> list[Entry]:
        """Submits requests within one turn of the event loop and waits until the device has a batch of them."""
        entries = self.submit(*requests)
        await self.device.until_entered()
        return entries

    async def answers(self, entries: Sequence[Entry]) -> list[Outcome | RequestError]:
        """The replies to some entries, once all have one: each exactly one, and nobody another's result."""
        async with asyncio.timeout(PATIENCE_S):
            while not all(self.replies[entry] for entry in entries):
                self._answered.clear()
                await self._answered.wait()
        found = []
        for entry in entries:
            (reply,) = self.replies[entry]
            if isinstance(reply, Outcome):
                assert bytes(reply.result.output) == b"%d" % id(entry.request)
            found.append(reply)
        return found

    async def finish(self) -> None:
        """Releases everything; nothing may be left anywhere."""
        self.device.end_all()
        await self.answers(list(self.replies))
        assert await self.engine.drain(PATIENCE_S)
        assert (self.admission.requests, self.admission.bytes, self.admission.flops) == (0, 0, 0)
        assert (self.queue.requests, self.queue.cost, self.engine.waiting_for_turns) == (0, 0, 0)
        assert self.engine.failure is not None or not self.engine.is_computing
        self.engine.close()

    def _reply(self, entry: Entry, outcome: Outcome | RequestError) -> None:
        self.replies[entry].append(outcome)
        self.engine.release(entry)
        self._answered.set()
