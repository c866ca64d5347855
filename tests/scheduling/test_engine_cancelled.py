"""Callers who leave: their queued requests do not run, and whatever those held is released, whenever they leave."""

from __future__ import annotations

import asyncio
from time import perf_counter

import messages
import pytest
from engine_bench import BESIDE, INLINE, Bench, HeldDevice, hold, torch_threads
from pair_bench import Asked, PairBench
from rpcs import rpcs_of

from attnserve_server.access.callers import anybody
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.errors import Cancelled, Overloaded
from attnserve_server.rpc.engine_calls import EngineCalls
from attnserve_server.rpc.reading_turns import ReadingTurns
from attnserve_server.rpc.rpcs import Received
from attnserve_server.scheduling.entry import Outcome

__all__ = ["torch_threads"]

pytestmark = pytest.mark.usefixtures("torch_threads")


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
    """Even while the device is busy: a request that nobody waits for must not keep others out."""
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


async def test_who_is_cancelled_later_leaves_at_once_too() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device)
    first = await hold(bench, device)
    gone = []
    for seed in range(2):
        gone.append(bench.submit(messages.random_attend(seed)))
        bench.engine.cancel(gone[-1:])
        await asyncio.sleep(0)  # they are replied to in the next turn of the event loop
        assert [type(reply) for reply in bench.replies[gone[-1]]] == [Cancelled]
    device.may_run.set()
    await bench.outcomes([first, *gone])


async def test_all_who_wait_in_line_leave_at_once() -> None:
    """Also the one whose turn it is once the one before it has left."""
    bench = PairBench(max_batch_requests=1)
    await bench.given(Asked(1))
    await bench.given(Asked(1))
    line = bench.submit(*(Asked(1, needs=("cache",)) for _ in range(4)))
    bench.engine.cancel(line)
    await asyncio.sleep(0)
    assert [type(reply) for entry in line for reply in bench.replies[entry]] == [Cancelled] * 4
    assert (bench.queue.requests, bench.engine.waiting_for_turns, bench.admission.requests) == (0, 0, 2)
    await bench.finish()


async def test_what_was_answered_can_be_cancelled_without_harm() -> None:
    bench = Bench(HeldDevice(INLINE))
    entry = bench.submit(messages.random_attend(0))
    await bench.outcome(entry)
    bench.engine.cancel([entry])
    bench.engine.cancel([entry])
    await bench.outcomes([entry, bench.submit(messages.random_attend(1))])


async def test_what_is_cancelled_while_it_runs_is_answered_once() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device)
    first = await hold(bench, device)
    bench.engine.cancel([first])
    device.may_run.set()
    (outcome,) = await bench.outcomes([first])
    assert isinstance(outcome, Outcome)


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


async def test_a_unary_call_that_is_cancelled_when_its_outcome_is_there_lets_go(torch_threads: None) -> None:
    """A caller may leave once the outcome is set but before the handler wakes up: the request still lets go of all."""
    bench = Bench(CpuDevice(1, INLINE, None))
    engine_calls = EngineCalls(bench.engine, bench.metrics, rpcs_of(bench.metrics), ReadingTurns())
    message = messages.random_attend(0).SerializeToString()
    task = asyncio.create_task(
        engine_calls._answer(
            lambda _, whole: messages.read_request(whole, 0, len(whole)),
            None,
            False,
            Received(anybody("here"), message, perf_counter(), None, None),
        )
    )
    await asyncio.sleep(0)  # it has been submitted, and the engine's step is due in the next turn of the event loop
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.count("attnserve_batch_requests_sum") == 1
    assert bench.count("attnserve_caller_flops_total", caller="anonymous") == bench.count("attnserve_flops_total") > 0
    busy = bench.engine.worker.busy_seconds
    assert bench.count("attnserve_caller_device_seconds_total", caller="anonymous") == pytest.approx(busy)
    assert (bench.admission.requests, bench.admission.bytes) == (0, 0)
