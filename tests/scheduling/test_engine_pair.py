"""An engine whose device takes two batches at a time: what is staged early, what waits; failures, and shutdown."""

from __future__ import annotations

import asyncio
import threading
from time import perf_counter

import pytest
from engine_bench import PATIENCE_S
from pair_bench import Asked, PairBench, PairDevice

from attnserve_server.errors import Cancelled, ComputationFailed, DeadlineExceeded, DeviceFailed, Draining, OutOfMemory
from attnserve_server.scheduling.entry import Outcome
from attnserve_server.scheduling.shared_lock import SharedLock
from attnserve_server.scheduling.watchdog import Watchdog


async def test_the_next_batch_is_there_while_one_computes() -> None:
    bench = PairBench()
    first = await bench.given(Asked(5))
    second = await bench.given(Asked(2), Asked(3))
    assert bench.device.costs() == [[5], [2, 3]]
    assert not any(bench.replies[entry] for entry in first + second)
    await bench.finish()


async def test_batches_are_launched_on_the_loop_and_waited_for_in_threads() -> None:
    bench = PairBench(device=PairDevice(launch_bytes=10))
    await bench.given(Asked(5, received_bytes=9))
    await bench.given(Asked(3), Asked(2), Asked(4))
    assert bench.device.launched == [threading.current_thread()] * 2
    assert all(batch.thread is not threading.current_thread() for batch in bench.device.batches)
    await bench.finish()


async def test_what_is_much_is_launched_by_threads() -> None:
    bench = PairBench(device=PairDevice(launch_bytes=10))
    await bench.given(Asked(5, received_bytes=10))
    assert not bench.device.launched
    await bench.finish()


async def test_nothing_is_launched_on_the_loop_beside_a_thread_that_launches() -> None:
    """Which may have asked the device for so much that it takes no more: the loop would wait."""
    bench = PairBench(device=PairDevice(launch_bytes=10))
    await bench.given(Asked(5, received_bytes=10))
    await bench.given(Asked(6))
    assert not bench.device.launched
    await bench.finish()


async def test_what_cannot_be_launched_is_computed() -> None:
    bench = PairBench(device=PairDevice(launch_bytes=10))
    bench.device.fails_to_launch = True
    entries = await bench.given(Asked(5), Asked(6))
    bench.device.end_all()
    assert all(isinstance(answer, Outcome) for answer in await bench.answers(entries))
    assert (len(bench.device.launched), len(bench.device.batches)) == (1, 1)
    await bench.finish()


async def test_of_what_was_launched_and_fails_only_the_guilty_fail() -> None:
    bench = PairBench(device=PairDevice(launch_bytes=100))
    bench.device.end_all()
    entries = bench.submit(Asked(1), Asked(2, failure=RuntimeError), Asked(3))
    answers = await bench.answers(entries)
    assert [type(answer) for answer in answers] == [Outcome, ComputationFailed, Outcome]
    assert bench.device.costs() == [[1, 2, 3], [1, 2, 3], [1], [2], [3]]
    await bench.finish()


def test_nothing_is_launched_beside_what_has_or_waits_for_the_device_alone() -> None:
    lock = SharedLock()
    assert lock.try_share()
    entered, may_end = threading.Event(), threading.Event()

    def alone() -> None:
        with lock.exclusive():
            entered.set()
            may_end.wait(PATIENCE_S)

    thread = threading.Thread(target=alone)
    thread.start()
    while lock.try_share():  # until it waits
        lock.unshare()
    assert not entered.is_set()
    lock.unshare()
    assert entered.wait(PATIENCE_S)
    assert not lock.try_share()
    may_end.set()
    thread.join(PATIENCE_S)
    assert lock.try_share()


async def test_less_than_what_computes_waits_for_others() -> None:
    """Two halves are not computed one after the other if they could be one batch."""
    bench = PairBench()
    await bench.given(Asked(5))
    bench.submit(Asked(2))
    bench.submit(Asked(2))
    await asyncio.sleep(0)
    assert bench.device.costs() == [[5]]
    await bench.given(Asked(1))
    assert bench.device.costs() == [[5], [2, 2, 1]]
    await bench.finish()


async def test_an_idle_device_takes_whatever_waits() -> None:
    bench = PairBench()
    await bench.given(Asked(5))
    bench.submit(Asked(1))
    bench.device.end(0)
    await bench.device.until_entered()
    assert bench.device.costs() == [[5], [1]]
    await bench.finish()


async def test_a_full_batch_does_not_wait_however_little_it_costs() -> None:
    bench = PairBench(max_batch_requests=2)
    await bench.given(Asked(50))
    bench.submit(Asked(1))
    await bench.given(Asked(1))
    assert bench.device.costs() == [[50], [1, 1]]
    await bench.finish()


async def test_two_at_most_and_the_third_as_soon_as_one_ends() -> None:
    bench = PairBench(max_batch_requests=1)
    bench.submit(*(Asked(n) for n in range(1, 5)))
    await bench.device.until_entered(2)
    assert bench.device.costs() == [[1], [2]]
    for place in (1, 0):  # in either order
        bench.device.end(place)
        await bench.device.until_entered()
    assert bench.device.costs() == [[1], [2], [3], [4]]
    await bench.finish()


async def test_what_needs_the_same_thing_runs_when_the_one_before_has_ended() -> None:
    """However idle the device is: the next step on a cache reads what the one before writes."""
    bench = PairBench()
    steps = [Asked(n, needs=("cache",)) for n in (1, 2, 3)]
    bench.submit(*steps)
    other = Asked(9, needs=("another",))
    bench.submit(other)
    await bench.device.until_entered()
    assert bench.device.costs() == [[1, 9]]
    bench.device.end(0)
    await bench.device.until_entered()
    assert steps[0].said == ["enter", "begin", "end", "leave"]
    await bench.given(Asked(2))
    assert bench.device.costs() == [[1, 9], [2], [2]]
    assert steps[2].said == ["enter"]
    bench.device.end(1)
    await bench.device.until_entered()
    assert bench.device.costs()[-1] == [3]
    await bench.finish()


async def test_a_batch_that_fails_leaves_the_other_alone(caplog: pytest.LogCaptureFixture) -> None:
    bench = PairBench()
    bad = await bench.given(Asked(2, failure=RuntimeError, needs=("a",)), Asked(2, needs=("b",)))
    good = await bench.given(Asked(5, needs=("c",)))
    bench.device.held = False  # each once more, by itself
    bench.device.end(0)
    guilty, innocent = await bench.answers(bad)
    assert isinstance(guilty, ComputationFailed)
    assert isinstance(innocent, Outcome)
    assert bench.device.costs() == [[2, 2], [5], [2], [2]]
    assert [entry.request.said for entry in bad] == [  # type: ignore[attr-defined]
        ["enter", "begin", "failed", "leave"],
        ["enter", "begin", "end", "leave"],
    ]
    assert not bench.replies[good[0]]
    await bench.finish()
    (outcome,) = await bench.answers(good)
    assert isinstance(outcome, Outcome)
    assert "a batch of 2 failed" in caplog.text


class Crowded:
    """Fails for lack of memory while another batch is there, or always."""

    def __init__(self, bench: PairBench, always: bool) -> None:
        self.bench, self.always = bench, always

    def __call__(self) -> BaseException:
        others = [batch for batch in self.bench.device.batches if not batch.may_end.is_set()]
        return MemoryError() if others or self.always else KeyError("room")


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("count", [1, 2])
async def test_what_has_no_memory_beside_another_is_tried_without_it(always: bool, count: int) -> None:
    bench = PairBench()
    other = await bench.given(Asked(1))
    entries = await bench.given(*(Asked(5, failure=Crowded(bench, always)) for _ in range(count)))
    bench.device.end(1)
    if count > 1:  # the first of them by itself, but still beside the other batch
        await bench.device.until_entered()
        bench.device.end(2)
    bench.device.held = False
    later = bench.submit(Asked(9))
    assert not any(bench.replies[entry] for entry in entries)
    bench.device.end(0)
    assert isinstance((await bench.answers(other))[0], Outcome)
    for outcome in await bench.answers(entries):
        assert isinstance(outcome, OutOfMemory if always else ComputationFailed)
    await bench.answers(later)
    await bench.finish()


async def test_a_device_that_is_lost_is_lost_for_both_and_all_who_wait() -> None:
    bench = PairBench(max_batch_requests=2)
    bad = await bench.given(Asked(2, failure=RuntimeError), Asked(2))
    good = await bench.given(Asked(5), Asked(1))
    waits = bench.submit(Asked(1), Asked(1, needs=("a",)), Asked(1, needs=("a",)))
    bench.device.lost = True
    bench.device.end(0)
    for outcome in await bench.answers([*bad, *good, *waits]):
        assert isinstance(outcome, DeviceFailed)
    assert bench.engine.failed.is_set()
    with pytest.raises(DeviceFailed):
        bench.submit(Asked())
    bench.device.end_all()
    await asyncio.get_running_loop().run_in_executor(bench.engine.worker._threads, bool)
    await bench.answers([*bad, *good, *waits])  # each still answered exactly once
    assert bench.device.costs() == [[2, 2], [5, 1]], "nothing is tried again on a device that is lost"


async def test_a_thread_that_dies_fails_everybody() -> None:
    class Death(BaseException):
        pass

    bench = PairBench()
    bad = await bench.given(Asked(2, failure=Death))
    good = await bench.given(Asked(5))
    bench.device.end(0)
    for outcome in await bench.answers(bad + good):
        assert isinstance(outcome, DeviceFailed)
    bench.device.end_all()


async def test_a_bug_met_with_one_batch_tells_those_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise KeyError("a bug")

    bench = PairBench()
    first = await bench.given(Asked(1))
    second = await bench.given(Asked(2))
    monkeypatch.setattr(bench.metrics, "batch", fail)
    bench.device.end(1)
    for outcome in await bench.answers(first + second):
        assert isinstance(outcome, DeviceFailed)
    bench.device.end_all()


async def test_who_leaves_while_both_compute() -> None:
    """Queued requests are answered at once; those in either batch get its result."""
    bench = PairBench()
    first = await bench.given(Asked(2))
    second = await bench.given(Asked(3, needs=("b",)), Asked(1, needs=("a",)))
    waits = bench.submit(Asked(1), Asked(1, needs=("a",)))
    bench.engine.cancel([*first, *second, *waits])
    for outcome in await bench.answers(waits):
        assert isinstance(outcome, Cancelled)
    assert not any(bench.replies[entry] for entry in first + second)
    await bench.finish()
    for outcome in await bench.answers(first + second):
        assert isinstance(outcome, Outcome)


async def test_what_is_too_late_for_the_second_place_leaves_it_to_others() -> None:
    bench = PairBench()
    await bench.given(Asked(2))
    late = bench.submit(Asked(9, "another"))
    late[0].deadline = 0.0
    assert isinstance((await bench.answers(late))[0], DeadlineExceeded)
    assert len(bench.engine.worker.runs) == 1
    await bench.given(Asked(9))
    assert bench.device.costs() == [[2], [9]]
    await bench.finish()


async def test_draining_waits_for_both() -> None:
    bench = PairBench()
    entries = [*await bench.given(Asked(1)), *await bench.given(Asked(1)), *bench.submit(Asked(1))]
    drained = asyncio.ensure_future(bench.engine.drain(60.0))
    await asyncio.sleep(0)
    with pytest.raises(Draining):
        bench.submit(Asked())
    assert bench.engine.is_computing
    for place in (1, 0):
        assert not drained.done()
        bench.device.end(place)
        await bench.answers([entries[place]])
    assert not drained.done(), "one waits still"
    bench.device.end_all()
    assert await drained
    for outcome in await bench.answers(entries):
        assert isinstance(outcome, Outcome)
    await bench.finish()


async def test_an_engine_is_closed_without_waiting_for_what_computes() -> None:
    bench = PairBench()
    await bench.given(Asked(1))
    await bench.given(Asked(1))
    assert not await bench.engine.drain(0.0)
    bench.engine.close()
    assert bench.engine.is_computing
    bench.device.end_all()


async def test_a_batch_that_does_not_end_is_noticed_beside_others_that_do() -> None:
    bench = PairBench()
    watchdog = Watchdog(bench.engine, 1.0, pytest.fail)  # the test itself drives its beats
    stuck = await bench.given(Asked(1))
    for _ in range(20):
        entries = await bench.given(Asked(1))
        bench.device.end(len(bench.device.batches) - 1)
        await bench.answers(entries)
        watchdog._beat()
    assert bench.engine.failure is None
    watchdog._beat()
    watchdog._beat()
    assert "counts as stuck" in str(bench.engine.failure)
    assert isinstance((await bench.answers(stuck))[0], DeviceFailed)
    bench.device.end_all()


async def test_no_second_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times learnt from overlapping batches add up to the time in which the device was busy."""
    bench = PairBench()
    learnt: list[float] = []
    monkeypatch.setattr(bench.admission.pace, "learn", lambda work, seconds: learnt.append(seconds))
    worker, begin = bench.engine.worker, perf_counter()
    for places in ((0, 1), (3, 2)):
        for _ in places:
            await bench.given(Asked(3))
        assert len(worker.runs) == 2
        for place in places:
            bench.device.end(place)
        await bench.answers(list(bench.replies))
    await asyncio.sleep(0)
    assert len(learnt) == 4
    assert all(seconds >= 0 for seconds in learnt)
    assert sum(learnt) == pytest.approx(worker.busy_seconds)
    assert worker.busy_seconds <= perf_counter() - begin
    assert worker.batch_seconds == 0
    await bench.finish()


async def test_a_deadline_counts_all_that_the_device_has() -> None:
    """The batch that computes and the one staged behind it both come first."""
    bench = PairBench()
    await bench.given(Asked(1))
    alone = bench.engine.worker.free_at
    bench.admission.pace.least_seconds = lambda work: 100.0  # type: ignore[method-assign, assignment]
    await bench.given(Asked(1))
    assert alone is not None
    first, second = bench.engine.worker.runs
    assert bench.engine.worker.free_at == second.end == max(first.end, second.begin) + 100.0
    await bench.finish()


async def test_who_watches_a_batch_does_not_hold_it() -> None:
    """The batch is freed with its last reply, not seconds later: with it go messages, results and layers."""
    bench = PairBench()
    watchdog = Watchdog(bench.engine, 1.0, pytest.fail)
    await bench.given(Asked(1))
    (run,) = bench.engine.worker.runs
    watchdog._beat()
    assert not any(each is run for each in vars(watchdog).values())
    await bench.finish()
