"""An engine and its callers, for tests that control what is in flight at any moment.

Devices are real; a test can block them (with events, never with time) and make them fail for chosen requests.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator, Sequence
from time import perf_counter

import messages
import numpy as np
import oracle
import pytest
import torch
from engines import OpenAdmission, batch_queue, engine_of
from rpcs import new_metrics

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.errors import (
    RequestError,
)
from attnserve_server.requests.request import Request
from attnserve_server.requests.work import BatchResult
from attnserve_server.scheduling.batching import BatchQueue
from attnserve_server.scheduling.entry import Entry, Outcome

INLINE, BESIDE = 10**15, -1
"""Inline FLOPs with which every batch runs on the event loop, and with which none does."""
PATIENCE_S = 60.0


class HeldDevice(CpuDevice):
    """A CPU that computes nothing while it is held, records what it was given, and fails on demand."""

    def __init__(self, inline_flops: int) -> None:
        super().__init__(1, inline_flops, None)
        self.batches: list[list[Request]] = []
        self.threads_seen: set[str] = set()
        self.guilty: list[bytes] = []
        self.largest_batch: int | None = None
        self.entered = threading.Semaphore(0)
        self.may_run = threading.Event()
        self.may_run.set()

    def run(self, requests: Sequence[Request]) -> BatchResult:
        self.batches.append(list(requests))
        self.threads_seen.add(threading.current_thread().name)
        self.entered.release()
        assert self.may_run.wait(PATIENCE_S)
        if any(bytes(request.payload("query")) in self.guilty for request in requests):
            raise RuntimeError("a message of the device's own, with /a/path in it")
        if self.largest_batch is not None and len(requests) > self.largest_batch:
            raise MemoryError
        return super().run(requests)

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]

    async def until_entered(self) -> None:
        """Waits until a batch has reached the device; call it once for each."""
        assert await asyncio.get_running_loop().run_in_executor(None, lambda: self.entered.acquire(timeout=PATIENCE_S))


class Bench:
    """An engine on a device, and the callers' side of it."""

    def __init__(
        self,
        device: CpuDevice,
        *,
        max_wait: float = 0.0,
        max_requests: int = 1000,
        max_batch_requests: int = 64,
        max_batch_flops: int = 10**12,
    ) -> None:
        self.device = device
        self.admission = OpenAdmission(max_requests, 10**12, 10**15)
        self.metrics = new_metrics()
        self.queue: BatchQueue[Entry] = batch_queue(max_batch_flops, max_batch_requests, pace=self.admission.pace)
        self.engine = engine_of(device, self.queue, self.admission, self.metrics, max_wait)
        self.engine.open()
        self.replies: dict[Entry, list[Outcome | RequestError]] = {}
        self._futures: dict[Entry, asyncio.Future[Outcome | RequestError]] = {}

    def submit(self, message: pb.AttendRequest, deadline: float = math.inf, caller: str = "me") -> Entry:
        request, now = messages.read(message), perf_counter()
        entry = Entry(request, self._reply, now, deadline, 1e-6, caller, None)
        self.engine.submit(entry)
        self.replies[entry] = []
        self._futures[entry] = asyncio.get_running_loop().create_future()
        return entry

    def _reply(self, entry: Entry, outcome: Outcome | RequestError) -> None:
        self.replies[entry].append(outcome)
        self.engine.release(entry)
        if len(self.replies[entry]) == 1:
            self._futures[entry].set_result(outcome)

    async def outcome(self, entry: Entry) -> Outcome | RequestError:
        async with asyncio.timeout(PATIENCE_S):
            return await self._futures[entry]

    async def outcomes(self, entries: Sequence[Entry]) -> list[Outcome | RequestError]:
        """The outcomes, once all have been answered: each exactly once, and with nothing left behind."""
        outcomes = [await self.outcome(entry) for entry in entries]
        assert await self.engine.drain(PATIENCE_S)
        assert all(len(replies) == 1 for replies in self.replies.values())
        assert (self.admission.requests, self.admission.bytes, self.admission.flops) == (0, 0, 0)
        assert (self.queue.requests, self.queue.bytes, self.queue.cost) == (0, 0, 0)
        if self.engine.failure is None:
            await asyncio.sleep(0)  # the last batch's time is learnt once its replies are on their way
            assert self.queue._fairness._running == 0
        return outcomes

    def count(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(name, labels)
        assert value is not None
        return value


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """Restores torch's thread counts, which a device sets for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def output(outcome: Outcome | RequestError, message: pb.AttendRequest) -> messages.Array:
    assert isinstance(outcome, Outcome), outcome
    query = messages.array(message.query)
    return np.frombuffer(outcome.result.output, query.dtype).reshape(query.shape)


def assert_right(outcome: Outcome | RequestError, message: pb.AttendRequest) -> None:
    """Asserts that the outcome is that of the message and of no other."""
    arrays = (messages.array(getattr(message, name)) for name in ("query", "key", "value"))
    expected = oracle.attend(*arrays, causal=message.causal, softcap=message.softcap)
    np.testing.assert_allclose(output(outcome, message), expected.output, rtol=0, atol=2e-6)


async def hold(bench: Bench, device: HeldDevice) -> Entry:
    """Occupies the device with a request that does not end until `may_run` is set."""
    device.may_run.clear()
    entry = bench.submit(messages.random_attend(10**6))
    await device.until_entered()
    return entry
