"""Deadlines in the engine: those that pass in the queue, immediate refusals, and the rate that these go by."""

from __future__ import annotations

from time import perf_counter

import messages
import pytest
from engine_bench import BESIDE, INLINE, PATIENCE_S, Bench, HeldDevice, hold, torch_threads

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.errors import DeadlineExceeded, DeadlineUnreachable, Overloaded
from attnserve_server.scheduling import deadlines
from attnserve_server.scheduling.entry import Outcome
from attnserve_server.scheduling.pace import Amount

__all__ = ["torch_threads"]

pytestmark = pytest.mark.usefixtures("torch_threads")


def work_of(message: pb.AttendRequest) -> Amount:
    """The work of one such request."""
    request, amount = messages.read(message), Amount()
    amount.add(request.kind, request.extent.cost)
    return amount


def taught(bench: Bench, message: pb.AttendRequest, seconds: float) -> None:
    """Makes the engine believe that such a request takes so long."""
    for _ in range(200):
        bench.admission.pace.learn(work_of(message), seconds)


async def test_a_deadline_that_passes_in_the_queue_is_never_run() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device)
    first = await hold(bench, device)
    late, in_time = (
        bench.submit(messages.random_attend(seed), deadline=perf_counter() + PATIENCE_S) for seed in (1, 2)
    )
    late.deadline = perf_counter()  # as if that much time had passed
    device.may_run.set()
    outcomes = await bench.outcomes([first, late, in_time])
    assert isinstance(outcomes[1], DeadlineExceeded)
    assert isinstance(outcomes[2], Outcome)
    assert [request for batch in device.batches for request in batch] == [first.request, in_time.request]
    assert bench.count("attnserve_cancelled_requests_total", reason="deadline") == 1


async def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device, max_batch_requests=1)
    message = messages.random_attend(0)
    taught(bench, message, 10.0)
    first = await hold(bench, device)
    queued = [bench.submit(message) for _ in range(3)]
    now = perf_counter()
    with pytest.raises(DeadlineUnreachable) as caught:
        bench.submit(message, deadline=now + 45.0)  # 50 s at the measured rate
    assert (caught.value.code.name, caught.value.reason) == ("DEADLINE_EXCEEDED", "DEADLINE_UNREACHABLE")
    assert (bench.queue.requests, bench.admission.requests) == (3, 4)
    in_time = bench.submit(message, deadline=now + 55.0)
    urgent = bench.submit(messages.random_attend(0, priority=8), deadline=now + 25.0)  # nothing queued is due before it
    device.may_run.set()
    outcomes = await bench.outcomes([first, *queued, in_time, urgent])
    assert all(isinstance(outcome, Outcome) for outcome in outcomes)
    assert device.batches[1] == [urgent.request]


async def test_an_idle_device_tries_now_and_then_what_its_rate_says_is_too_late() -> None:
    """What runs corrects a wrong rate; if everything were refused, nothing would run."""
    bench = Bench(HeldDevice(INLINE))
    message = messages.random_attend(0)
    taught(bench, message, 1000.0)
    believed = bench.admission.pace.seconds(work_of(message))
    (outcome,) = await bench.outcomes([bench.submit(message, deadline=perf_counter() + PATIENCE_S)])
    assert isinstance(outcome, Outcome)
    assert bench.admission.pace.seconds(work_of(message)) < 0.9 * believed, "and does so before another batch runs"


async def test_an_idle_device_does_not_spend_itself_on_what_will_be_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "TRIAL_PAUSE", 10**9)  # times what the first took
    bench = Bench(HeldDevice(BESIDE))
    message = messages.random_attend(0)
    taught(bench, message, 1000.0)
    tried = bench.submit(message, deadline=perf_counter() + PATIENCE_S)
    assert isinstance(await bench.outcome(tried), Outcome)
    taught(bench, message, 1000.0)
    with pytest.raises(DeadlineUnreachable):
        bench.submit(message, deadline=perf_counter() + PATIENCE_S)
    patient = bench.submit(message, deadline=perf_counter() + 2000.0)
    assert isinstance((await bench.outcomes([tried, patient]))[1], Outcome)


async def test_a_trial_that_is_refused_was_none() -> None:
    """The next request is one, without the pause that follows a trial."""
    bench = Bench(HeldDevice(INLINE), max_requests=1)
    message = messages.random_attend(0)
    taught(bench, message, 1000.0)
    bench.admission.admit_computed("another", 0, 1)  # a reply that its caller has not received yet
    with pytest.raises(Overloaded):
        bench.submit(message, deadline=perf_counter() + PATIENCE_S)
    bench.admission.release("another", 0)
    tried = bench.submit(message, deadline=perf_counter() + PATIENCE_S)
    assert isinstance((await bench.outcomes([tried]))[0], Outcome)


async def test_the_rate_is_learnt_from_batches() -> None:
    device = HeldDevice(INLINE)
    bench = Bench(device)
    message = messages.random_attend(0, 64, heads=8, width=64)
    taught(bench, message, 10.0)
    for _ in range(60):
        await bench.outcome(bench.submit(message))
    assert bench.admission.pace.seconds(work_of(message)) < 1.0
