"""A request's life in the engine: batches form while the device is busy; refusals; draining and the end."""

from __future__ import annotations

import asyncio
from time import perf_counter

import messages
import pytest
from engine_bench import BESIDE, INLINE, PATIENCE_S, Bench, HeldDevice, assert_right, hold, torch_threads
from engines import OpenAdmission, batch_queue, engine_of
from rpcs import new_metrics

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.errors import (
    Draining,
    InvalidRequest,
    Overloaded,
    RequestError,
    Starting,
)
from attnserve_server.scheduling.entry import Entry, Outcome, StillHeld

__all__ = ["torch_threads"]

pytestmark = pytest.mark.usefixtures("torch_threads")


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


@pytest.mark.parametrize(("reply_bytes", "counts"), [(100, 200), (10**9, None)], ids=["little", "more than it took"])
async def test_of_what_is_answered_the_reply_alone_counts_until_it_has_been_sent(
    reply_bytes: int, counts: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, because there are two copies of it, but never more than counted before."""
    bench = Bench(HeldDevice(INLINE))
    sending: list[StillHeld] = []

    def reply(entry: Entry, outcome: Outcome | RequestError) -> None:
        sending.append(bench.engine.answered(entry, reply_bytes))
        bench._futures[entry].set_result(outcome)

    monkeypatch.setattr(bench, "_reply", reply)
    message = messages.random_attend(0, kv_length=1000)
    entry = bench.submit(message)
    before = bench.admission.bytes
    assert before > message.ByteSize()
    await bench.outcome(entry)
    left = before if counts is None else counts
    assert sending == [("me", 1, left)]
    assert (bench.admission.requests, bench.admission.bytes) == (1, left)
    bench.engine.release(*sending)
    assert (bench.admission.requests, bench.admission.bytes) == (0, 0)


async def test_the_thread_is_chosen_by_cost() -> None:
    message = messages.random_attend(0)
    cost = messages.read(message).extent.cost
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


async def test_what_ran_without_a_turn_of_the_loop_has_none_afterwards() -> None:
    """A turn that was meant for it would give a busy device one batch more than it takes."""
    device = HeldDevice(BESIDE)
    bench = Bench(device, max_batch_requests=1)
    bench.engine.worker.inline_flops = INLINE
    little = bench.submit(messages.random_attend(0))
    bench.engine.hurry()
    assert device.sizes == [1]
    bench.engine.worker.inline_flops = BESIDE
    device.may_run.clear()
    others = [bench.submit(messages.random_attend(seed)) for seed in (1, 2)]
    await asyncio.sleep(0)
    assert (len(bench.engine.worker.runs), bench.queue.requests) == (1, 1)
    device.may_run.set()
    await bench.outcomes([little, *others])


async def test_what_has_others_beside_it_or_costs_much_waits_for_the_turn_of_the_loop() -> None:
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
        assert large.engine.worker.runs == []
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
        await asyncio.sleep(0)  # a turn of the event loop for each
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
    bench = Bench(device, max_batch_flops=2 * messages.read(message).extent.cost)
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


async def test_a_caller_that_floods_delays_another_by_two_batches() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device, max_batch_requests=4)
    first = await hold(bench, device)
    flood = [bench.submit(messages.random_attend(seed)) for seed in range(40)]
    other = [bench.submit(messages.random_attend(seed), caller="other") for seed in range(40, 42)]
    device.may_run.set()
    await bench.outcomes([first, *flood, *other])
    assert {id(entry.request) for entry in other} <= {id(request) for batch in device.batches[:3] for request in batch}
    assert device.sizes[1:] == [4] * 10 + [2]  # the flood fills up the other caller's batches


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
    admission, metrics = OpenAdmission(1000, 10**12, 10**15), new_metrics()
    engine = engine_of(CpuDevice(1, INLINE, None), batch_queue(pace=admission.pace), admission, metrics)
    with pytest.raises(Starting) as caught:
        engine.check("me", 1)
    assert caught.value.code.name == "UNAVAILABLE"
    for reason in ("draining", "failed"):
        assert metrics.registry.get_sample_value("attnserve_rejected_requests_total", {"reason": reason}) == 0
    engine.open()
    engine.check("me", 1)
    assert await engine.drain(PATIENCE_S)
    engine.open()
    with pytest.raises(Draining):
        engine.check("me", 1)


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


async def test_phases_add_up_to_the_time_that_passed() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device)
    begin = perf_counter()
    first = await hold(bench, device)
    queued, decoded = bench.submit(messages.random_attend(1)), bench.submit(messages.random_attend(2))
    decoded.decode = PATIENCE_S  # as if all the time since its arrival had been that of decoding
    device.may_run.set()
    *outcomes, last = await bench.outcomes([first, queued, decoded])
    assert isinstance(last, Outcome)
    assert last.phases.queue == 0
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
    assert bench.count("attnserve_flops_total") == 4 * messages.read(batch[0]).extent.flops
    assert bench.count("attnserve_kernel_calls_total", kernel="cpu_flash") == 1
