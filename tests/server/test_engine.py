"""The life of a request: batches that form while the device is busy, and devices that fail.

Devices are real ones that a test can hold up (with events, never with time) and make fail for chosen requests.
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

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.admission import Admission
from attnserve_server.batching import BatchQueue
from attnserve_server.callers import Callers, anybody
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.engine import Engine
from attnserve_server.entry import Entry, Outcome
from attnserve_server.errors import (
    Cancelled,
    ComputationFailed,
    DeadlineExceeded,
    DeadlineUnreachable,
    Draining,
    InvalidRequest,
    Overloaded,
    RequestError,
    Starting,
)
from attnserve_server.metrics import Metrics
from attnserve_server.pace import Amount
from attnserve_server.request import Request, read_request
from attnserve_server.rpc import Rpcs
from attnserve_server.service import AttentionService
from attnserve_server.work import BatchResult

INLINE, BESIDE = 10**15, -1
"""Inline FLOPs with which every batch runs on the loop, and with which none does."""
PATIENCE_S = 60.0

pytestmark = pytest.mark.usefixtures("torch_threads")


class HeldDevice(CpuDevice):
    """A CPU that computes nothing while it is held, notes what it was given, and fails where a test wants it to."""

    def __init__(self, inline_flops: int) -> None:
        super().__init__(1, inline_flops)
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
        """Waits until a batch has come to the device; call it once for each."""
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
        self.admission = Admission(max_requests, 10**12, 10**15)
        self.metrics = Metrics("0", "0", "cpu")
        self.queue: BatchQueue[Entry] = BatchQueue(max_batch_flops, max_batch_requests, 0.1, self.admission.pace)
        self.engine = Engine(device, self.queue, self.admission, self.metrics, max_wait)
        self.engine.open()
        self.replies: dict[Entry, list[Outcome | RequestError]] = {}
        self._futures: dict[Entry, asyncio.Future[Outcome | RequestError]] = {}

    def submit(self, message: pb.AttendRequest, deadline: float = math.inf, caller: str = "me") -> Entry:
        request, now = messages.read(message), perf_counter()
        entry = Entry(request, self._reply, now, deadline, 1e-6, caller)
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
        """What came of each, when all have been answered; each once, and nothing may be left anywhere."""
        outcomes = [await self.outcome(entry) for entry in entries]
        assert await self.engine.drain(PATIENCE_S)
        assert all(len(replies) == 1 for replies in self.replies.values())
        assert (self.admission.requests, self.admission.bytes, self.admission.flops) == (0, 0, 0)
        assert (self.queue.requests, self.queue.bytes, self.queue.cost) == (0, 0, 0)
        return outcomes

    def count(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(name, labels)
        assert value is not None
        return value


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """A device sets torch's threads for the whole process: set them back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def output(outcome: Outcome | RequestError, message: pb.AttendRequest) -> messages.Array:
    assert isinstance(outcome, Outcome), outcome
    query = messages.array(message.query)
    return np.frombuffer(outcome.result.output, query.dtype).reshape(query.shape)


def assert_right(outcome: Outcome | RequestError, message: pb.AttendRequest) -> None:
    """The outcome is that of the message and of no other."""
    arrays = (messages.array(getattr(message, name)) for name in ("query", "key", "value"))
    expected = oracle.attend(*arrays, causal=message.causal, softcap=message.softcap)
    np.testing.assert_allclose(output(outcome, message), expected.output, rtol=0, atol=2e-6)


async def hold(bench: Bench, device: HeldDevice) -> Entry:
    """Makes the device busy with a request that does not end until `may_run` is set."""
    device.may_run.clear()
    entry = bench.submit(messages.random_attend(10**6))
    await device.until_entered()
    return entry


@pytest.mark.parametrize("inline_flops", [INLINE, BESIDE])
async def test_an_idle_device_starts_at_once(inline_flops: int) -> None:
    device = HeldDevice(inline_flops)
    bench = Bench(device)
    message = messages.random_attend(0)
    (outcome,) = await bench.outcomes([bench.submit(message)])
    assert_right(outcome, message)
    assert isinstance(outcome, Outcome)
    assert outcome.batch_size == 1
    assert device.sizes == [1]


async def test_the_thread_is_chosen_by_cost() -> None:
    message = messages.random_attend(0)
    cost = messages.read(message).flops
    for inline_flops, thread in ((cost, "MainThread"), (cost - 1, "attnserve-device_0")):
        device = HeldDevice(inline_flops)
        bench = Bench(device)
        await bench.outcomes([bench.submit(message)])
        assert device.threads_seen == {thread}
        bench.engine.close()


async def test_the_bits_do_not_depend_on_the_thread() -> None:
    batch = [messages.random_attend(seed, 9, kv_length=17, causal=True, return_lse=True) for seed in range(5)]
    results = []
    for inline_flops in (INLINE, BESIDE):
        bench = Bench(HeldDevice(inline_flops))
        outcomes = await bench.outcomes([bench.submit(message) for message in batch])
        results.append(
            [(bytes(o.result.output), bytes(o.result.lse or b"")) for o in outcomes if isinstance(o, Outcome)]
        )
    assert len(results[0]) == len(batch)
    assert results[0] == results[1]


@pytest.mark.parametrize("inline_flops", [INLINE, BESIDE])
async def test_the_device_is_busy_while_it_has_a_batch(inline_flops: int) -> None:
    bench = Bench(HeldDevice(inline_flops))
    assert (bench.engine.worker.busy_seconds, bench.engine.worker.batch_seconds) == (0, 0)
    begin = perf_counter()
    (outcome,) = await bench.outcomes([bench.submit(messages.random_attend(0))])
    assert isinstance(outcome, Outcome)
    busy = bench.engine.worker.busy_seconds
    assert outcome.phases.staging + outcome.phases.compute <= busy <= perf_counter() - begin
    assert bench.engine.worker.batch_seconds == 0
    assert bench.engine.worker.busy_seconds == busy, "an idle device is not busy"


async def test_a_batch_that_still_runs_counts_already() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device)
    entry = await hold(bench, device)
    assert 0 < bench.engine.worker.batch_seconds <= bench.engine.worker.busy_seconds
    before = bench.engine.worker.busy_seconds
    assert bench.engine.worker.busy_seconds > before
    device.may_run.set()
    await bench.outcomes([entry])
    assert bench.engine.worker.batch_seconds == 0


async def test_what_comes_in_one_turn_of_the_loop_is_one_batch() -> None:
    device = HeldDevice(INLINE)
    bench = Bench(device)
    batch = [messages.random_attend(seed) for seed in range(5)]
    outcomes = await bench.outcomes([bench.submit(message) for message in batch])
    assert device.sizes == [5]
    for outcome, message in zip(outcomes, batch, strict=True):
        assert_right(outcome, message)
        assert isinstance(outcome, Outcome)
        assert outcome.batch_size == 5


async def test_little_that_is_alone_runs_without_a_turn_of_the_loop() -> None:
    device = HeldDevice(INLINE)
    bench = Bench(device)
    bench.engine.hurry()  # with nothing to do
    batch = [messages.random_attend(seed) for seed in range(3)]
    entries = [bench.submit(message) for message in batch]
    bench.engine.hurry()
    assert device.sizes == [3]
    for outcome, message in zip(await bench.outcomes(entries), batch, strict=True):
        assert_right(outcome, message)
    assert device.sizes == [3]


async def test_what_has_company_or_costs_much_waits_for_the_turn_of_the_loop() -> None:
    device = HeldDevice(INLINE)
    bench = Bench(device)
    bench.admission.admit("another", 1, 1)
    entry = bench.submit(messages.random_attend(0))
    bench.engine.hurry()
    assert device.sizes == []
    await bench.outcome(entry)
    assert device.sizes == [1]
    for large in (Bench(HeldDevice(BESIDE)), Bench(HeldDevice(INLINE), max_wait=1e-3)):
        entry = large.submit(messages.random_attend(1))
        large.engine.hurry()
        assert large.engine.worker.batch is None
        assert large.queue.requests == 1
        await large.outcomes([entry])


async def test_a_batch_forms_while_the_device_is_busy() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device)
    first = await hold(bench, device)
    batch = [messages.random_attend(seed) for seed in range(7)]
    entries = []
    for message in batch:
        entries.append(bench.submit(message))
        await asyncio.sleep(0)  # a turn of the loop for each
    assert bench.queue.requests == 7
    device.may_run.set()
    outcomes = await bench.outcomes([first, *entries])
    assert device.sizes == [1, 7]
    for outcome, message in zip(outcomes[1:], batch, strict=True):
        assert_right(outcome, message)


async def test_what_cannot_run_together_runs_apart_and_answers_reach_their_callers() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device, max_batch_requests=6)
    first = await hold(bench, device)
    batch = [
        messages.random_attend(seed, 1 + seed % 4, heads=1 + seed % 2, causal=seed % 3 == 0, softcap=seed % 5 // 4)
        for seed in range(48)
    ]
    entries = [bench.submit(message) for message in batch]
    device.may_run.set()
    outcomes = await bench.outcomes([first, *entries])
    for outcome, message in zip(outcomes[1:], batch, strict=True):
        assert_right(outcome, message)
    assert all(len({request.group for request in batch}) == 1 for batch in device.batches)
    assert max(device.sizes) == 6
    assert len(device.sizes) < 20


async def test_a_batch_is_bounded_by_cost() -> None:
    device = HeldDevice(BESIDE)
    message = messages.random_attend(0)
    bench = Bench(device, max_batch_flops=2 * messages.read(message).flops)
    await bench.outcomes([bench.submit(message) for _ in range(5)])
    assert device.sizes == [2, 2, 1]


async def test_higher_priorities_run_first() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device, max_batch_requests=1)
    first = await hold(bench, device)
    priorities = [0, -8, 8, 3]
    entries = [bench.submit(messages.random_attend(seed, priority=given)) for seed, given in enumerate(priorities)]
    device.may_run.set()
    await bench.outcomes([first, *entries])
    assert [batch[0].problem.priority for batch in device.batches[1:]] == [8, 3, 0, -8]


@pytest.mark.parametrize("inline_flops", [INLINE, BESIDE])
async def test_only_the_guilty_fail(inline_flops: int, caplog: pytest.LogCaptureFixture) -> None:
    device = HeldDevice(inline_flops)
    bench = Bench(device)
    batch = [messages.random_attend(seed) for seed in range(6)]
    device.guilty = [batch[2].query.data, batch[5].query.data]
    entries = [bench.submit(message) for message in batch]
    outcomes = await bench.outcomes(entries)
    for place, (outcome, message) in enumerate(zip(outcomes, batch, strict=True)):
        if place in (2, 5):
            assert isinstance(outcome, ComputationFailed)
            assert "RuntimeError" in outcome.message
            assert "/a/path" not in outcome.message
            assert outcome.code.name == "INTERNAL"
        else:
            assert_right(outcome, message)
            assert isinstance(outcome, Outcome)
            assert outcome.batch_size == 1
    assert device.sizes == [6, 1, 1, 1, 1, 1, 1]
    assert "a batch of 6 failed" in caplog.text


async def test_a_request_that_fails_alone_is_not_tried_twice(caplog: pytest.LogCaptureFixture) -> None:
    device = HeldDevice(INLINE)
    bench = Bench(device)
    message = messages.random_attend(0)
    device.guilty = [message.query.data]
    (outcome,) = await bench.outcomes([bench.submit(message)])
    assert isinstance(outcome, ComputationFailed)
    assert device.sizes == [1]
    assert "/a/path" in caplog.text  # the log, unlike the caller, is told everything


async def test_a_batch_that_is_too_much_for_the_device_runs_one_by_one() -> None:
    device = HeldDevice(BESIDE)
    device.largest_batch = 1
    bench = Bench(device)
    batch = [messages.random_attend(seed) for seed in range(4)]
    outcomes = await bench.outcomes([bench.submit(message) for message in batch])
    for outcome, message in zip(outcomes, batch, strict=True):
        assert_right(outcome, message)


async def test_a_failure_does_not_stop_the_engine() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device)
    bad, good = messages.random_attend(0), messages.random_attend(1)
    device.guilty = [bad.query.data]
    assert isinstance(await bench.outcome(bench.submit(bad)), ComputationFailed)
    (outcome,) = await bench.outcomes([bench.submit(good)])
    assert_right(outcome, good)


async def test_a_deadline_that_passes_in_the_queue_is_never_run() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device)
    first = await hold(bench, device)
    late, in_time = (
        bench.submit(messages.random_attend(seed), deadline=perf_counter() + PATIENCE_S) for seed in (1, 2)
    )
    late.deadline = perf_counter()  # as if so much time had passed
    device.may_run.set()
    outcomes = await bench.outcomes([first, late, in_time])
    assert isinstance(outcomes[1], DeadlineExceeded)
    assert isinstance(outcomes[2], Outcome)
    assert [request for batch in device.batches for request in batch] == [first.request, in_time.request]
    assert bench.count("attnserve_cancelled_requests_total", reason="deadline") == 1


async def test_what_is_cancelled_in_the_queue_is_never_run() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device)
    first = await hold(bench, device)
    gone, waits = bench.submit(messages.random_attend(1)), bench.submit(messages.random_attend(2))
    bench.engine.cancel([gone])
    device.may_run.set()
    outcomes = await bench.outcomes([first, gone, waits])
    assert isinstance(outcomes[1], Cancelled)
    assert isinstance(outcomes[2], Outcome)
    assert [request for batch in device.batches for request in batch] == [first.request, waits.request]
    assert bench.count("attnserve_cancelled_requests_total", reason="cancelled") == 1


async def test_what_is_cancelled_leaves_the_queue_at_once_and_makes_room() -> None:
    """While the device is busy still: what nobody waits for must not keep others out."""
    device = HeldDevice(BESIDE)
    bench = Bench(device, max_requests=4)
    first = await hold(bench, device)
    gone = [bench.submit(messages.random_attend(seed)) for seed in range(1, 4)]
    with pytest.raises(Overloaded):
        bench.submit(messages.random_attend(4))
    bench.engine.cancel(gone)
    for entry in gone:
        assert isinstance(await bench.outcome(entry), Cancelled)
    assert (bench.queue.requests, bench.queue.bytes, bench.admission.requests) == (0, 0, 1)
    stays = bench.submit(messages.random_attend(5))
    device.may_run.set()
    await bench.outcomes([first, *gone, stays])
    assert [request for batch in device.batches for request in batch] == [first.request, stays.request]
    assert bench.count("attnserve_cancelled_requests_total", reason="cancelled") == 3


async def test_what_was_answered_can_be_cancelled_without_harm() -> None:
    bench = Bench(HeldDevice(INLINE))
    entry = bench.submit(messages.random_attend(0))
    await bench.outcome(entry)
    bench.engine.cancel([entry])
    bench.engine.cancel([entry])
    await bench.outcomes([entry, bench.submit(messages.random_attend(1))])


def work_of(message: pb.AttendRequest) -> Amount:
    """What one such request is."""
    request, amount = messages.read(message), Amount()
    amount.add(request.kind, request.cost)
    return amount


def taught(bench: Bench, message: pb.AttendRequest, seconds: float) -> None:
    """Has the engine believe that such a request takes so long."""
    for _ in range(200):
        bench.admission.pace.learn(work_of(message), seconds)


async def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device, max_batch_requests=1)
    message = messages.random_attend(0)
    taught(bench, message, 10.0)
    first = await hold(bench, device)
    queued = [bench.submit(message) for _ in range(3)]
    now = perf_counter()
    with pytest.raises(DeadlineUnreachable) as caught:
        bench.submit(message, deadline=now + 45.0)  # 50 s by the measured rate
    assert (caught.value.code.name, caught.value.reason) == ("DEADLINE_EXCEEDED", "DEADLINE_UNREACHABLE")
    assert (bench.queue.requests, bench.admission.requests) == (3, 4)
    in_time = bench.submit(message, deadline=now + 55.0)
    urgent = bench.submit(messages.random_attend(0, priority=8), deadline=now + 25.0)  # nothing queued is before it
    device.may_run.set()
    outcomes = await bench.outcomes([first, *queued, in_time, urgent])
    assert all(isinstance(outcome, Outcome) for outcome in outcomes)
    assert device.batches[1] == [urgent.request]


async def test_an_idle_device_tries_now_and_then_what_its_rate_says_is_too_late() -> None:
    """What runs corrects a rate that is wrong; were it always refused, nothing would."""
    bench = Bench(HeldDevice(INLINE))
    message = messages.random_attend(0)
    taught(bench, message, 1000.0)
    (outcome,) = await bench.outcomes([bench.submit(message, deadline=perf_counter() + PATIENCE_S)])
    assert isinstance(outcome, Outcome)
    assert bench.admission.pace.seconds(work_of(message)) < 1000.0


async def test_an_idle_device_does_not_spend_itself_on_what_will_be_too_late() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device)
    message = messages.random_attend(0)
    taught(bench, message, 1000.0)
    device.may_run.clear()
    tried = bench.submit(message, deadline=perf_counter() + PATIENCE_S)
    await device.until_entered()
    await asyncio.sleep(0.5)  # it takes so long at the least, and what is like it is tried nine times as long after it
    device.may_run.set()
    assert isinstance(await bench.outcome(tried), Outcome)
    taught(bench, message, 1000.0)
    with pytest.raises(DeadlineUnreachable):
        bench.submit(message, deadline=perf_counter() + PATIENCE_S)
    patient = bench.submit(message, deadline=perf_counter() + 2000.0)
    assert isinstance((await bench.outcomes([tried, patient]))[1], Outcome)


async def test_a_caller_that_floods_delays_another_by_two_batches() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device, max_batch_requests=4)
    first = await hold(bench, device)
    flood = [bench.submit(messages.random_attend(seed)) for seed in range(40)]
    other = [bench.submit(messages.random_attend(seed), caller="other") for seed in range(40, 42)]
    device.may_run.set()
    await bench.outcomes([first, *flood, *other])
    assert {id(entry.request) for entry in other} <= {id(request) for batch in device.batches[:3] for request in batch}
    assert device.sizes[1:] == [4] * 10 + [2]  # the flood fills the batches of the other


async def test_the_rate_is_learnt_from_batches() -> None:
    device = HeldDevice(INLINE)
    bench = Bench(device)
    message = messages.random_attend(0, 64, heads=8, width=64)
    taught(bench, message, 10.0)
    for _ in range(60):
        await bench.outcome(bench.submit(message))
    assert bench.admission.pace.seconds(work_of(message)) < 1.0


async def test_what_is_cancelled_while_it_runs_is_answered_once() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device)
    first = await hold(bench, device)
    bench.engine.cancel([first])
    device.may_run.set()
    (outcome,) = await bench.outcomes([first])
    assert isinstance(outcome, Outcome)


async def test_drain_refuses_what_comes_and_waits_for_what_is_there() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device)
    first = await hold(bench, device)
    queued = bench.submit(messages.random_attend(1))
    drained = asyncio.create_task(bench.engine.drain(PATIENCE_S))
    await asyncio.sleep(0)
    with pytest.raises(Draining) as caught:
        bench.submit(messages.random_attend(2))
    assert caught.value.code.name == "UNAVAILABLE"
    with pytest.raises(Draining):
        bench.engine.check("me", 1)
    assert bench.count("attnserve_rejected_requests_total", reason="draining") == 2
    assert not drained.done()
    device.may_run.set()
    assert await drained
    assert all(isinstance(outcome, Outcome) for outcome in await bench.outcomes([first, queued]))


async def test_nothing_is_taken_before_the_device_is_ready() -> None:
    admission, metrics = Admission(1000, 10**12, 10**15), Metrics("0", "0", "cpu")
    engine = Engine(CpuDevice(1, INLINE), BatchQueue(10**12, 64, 0.1, admission.pace), admission, metrics)
    with pytest.raises(Starting) as caught:
        engine.check("me", 1)
    assert caught.value.code.name == "UNAVAILABLE"
    engine.open()
    engine.check("me", 1)
    assert await engine.drain(PATIENCE_S)
    engine.open()
    with pytest.raises(Draining):
        engine.check("me", 1)


async def test_a_stream_without_calls_ends_without_a_look_at_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device)
    looks: list[None] = []
    monkeypatch.setattr(bench.queue, "drop_cancelled", lambda: looks.append(None) or [])
    first = await hold(bench, device)
    bench.engine.cancel([])
    device.may_run.set()
    await bench.outcomes([first])
    assert not looks


async def test_drain_ends_with_its_grace() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device)
    first = await hold(bench, device)
    assert not await bench.engine.drain(0.01)
    device.may_run.set()
    assert isinstance((await bench.outcomes([first]))[0], Outcome)


async def test_drain_of_an_idle_engine_is_immediate() -> None:
    assert await Bench(HeldDevice(INLINE)).engine.drain(PATIENCE_S)


async def test_what_is_refused_leaves_nothing_behind() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device, max_requests=2)
    first = await hold(bench, device)
    queued = bench.submit(messages.random_attend(1))
    with pytest.raises(Overloaded) as caught:
        bench.submit(messages.random_attend(2))
    assert caught.value.bound == "requests"
    assert (bench.admission.requests, bench.queue.requests) == (2, 1)
    device.may_run.set()
    await bench.outcomes([first, queued])


async def test_a_request_larger_than_the_server_is_the_callers_mistake() -> None:
    bench = Bench(HeldDevice(INLINE))
    bench.engine._admission._max_bytes = 100
    with pytest.raises(InvalidRequest) as caught:
        bench.submit(messages.random_attend(0, 100))
    assert caught.value.reason == "LIMIT_EXCEEDED"
    assert bench.queue.requests == 0


async def test_max_wait_waits_for_company() -> None:
    device = HeldDevice(INLINE)
    max_wait = 0.05
    bench = Bench(device, max_wait=max_wait)
    outcomes = await bench.outcomes([bench.submit(messages.random_attend(seed)) for seed in range(2)])
    assert device.sizes == [2]
    assert isinstance(outcomes[0], Outcome)
    assert outcomes[0].phases.queue >= max_wait * 0.99


async def test_a_full_batch_waits_for_nobody() -> None:
    device = HeldDevice(INLINE)
    bench = Bench(device, max_wait=10 * PATIENCE_S, max_batch_requests=2)
    await bench.outcomes([bench.submit(messages.random_attend(seed)) for seed in range(2)])
    assert device.sizes == [2]


async def test_phases_add_up_to_the_time_that_passed() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device)
    begin = perf_counter()
    first = await hold(bench, device)
    queued = bench.submit(messages.random_attend(1))
    device.may_run.set()
    outcomes = await bench.outcomes([first, queued])
    passed = perf_counter() - begin
    for outcome in outcomes:
        assert isinstance(outcome, Outcome)
        phases = outcome.phases
        assert phases.decode == 1e-6
        assert min(phases.queue, phases.staging, phases.compute, phases.encode) > 0
        assert phases.queue + phases.staging + phases.compute + phases.encode <= passed


async def test_metrics_of_batches() -> None:
    bench = Bench(HeldDevice(INLINE))
    batch = [messages.random_attend(seed, 3, batch=2) for seed in range(4)]
    await bench.outcomes([bench.submit(message) for message in batch])
    assert bench.count("attnserve_batch_requests_count") == 1
    assert bench.count("attnserve_batch_requests_sum") == 4
    assert bench.count("attnserve_query_tokens_total") == 4 * 2 * 3
    assert bench.count("attnserve_flops_total") == 4 * messages.read(batch[0]).flops
    assert bench.count("attnserve_kernel_calls_total", kernel="cpu_flash") == 1


async def test_a_unary_call_that_is_cancelled_when_its_outcome_is_there_lets_go(torch_threads: None) -> None:
    """Between the outcome and the handler's waking up, the caller may go: what the request held must not stay held."""
    bench = Bench(CpuDevice(1, INLINE))
    rpcs = Rpcs(Callers(), bench.metrics)
    service = AttentionService(bench.engine, bench.metrics, rpcs, {}, 64, 64, pb.ServerInfoResponse)
    message = messages.random_attend(0).SerializeToString()
    task = asyncio.create_task(
        service._answer(anybody("here"), lambda _, *part: read_request(*part), message, perf_counter(), None)
    )
    await asyncio.sleep(0)  # it has been submitted, and the engine's step is due in the next turn of the loop
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.count("attnserve_batch_requests_sum") == 1
    assert (bench.admission.requests, bench.admission.bytes) == (0, 0)
