"""An engine whose device takes two batches at a time: what is staged early, what waits, and shutdown.

`test_engine_pair_faults.py` is about what goes wrong.
"""

from __future__ import annotations

import asyncio
import threading
from time import perf_counter

import pytest
from pair_bench import Asked, PairBench, PairDevice

from attnserve_server.errors import Cancelled, DeadlineExceeded, Draining
from attnserve_server.scheduling.batching import Batch
from attnserve_server.scheduling.entry import Outcome
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


async def test_whose_turn_comes_because_another_leaves_runs_beside_what_computes() -> None:
    bench = PairBench()
    await bench.given(Asked(5, needs=("a",), shares=True))
    between, behind = bench.submit(Asked(1, needs=("a",)), Asked(6, needs=("a",), shares=True))
    bench.engine.cancel([between])
    await bench.device.until_entered()
    assert bench.device.costs() == [[5], [6]]
    assert not bench.replies[behind]
    await bench.finish()


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
    assert all(batch.thread.is_alive() for batch in bench.device.batches)
    bench.device.end_all()


async def test_the_device_is_busy_from_its_first_batch_to_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """However its batches overlap. What was computed without a batch counts, too."""
    worker = PairBench().engine.worker
    one, other = worker.take(Batch(), 1.0), worker.take(Batch(), 2.0)
    assert worker.free(one, 4.0) == 1.0
    monkeypatch.setattr("attnserve_server.scheduling.worker.perf_counter", lambda: 4.5)
    assert (worker.busy_seconds, worker.batch_seconds) == (3.5, 2.5)
    assert worker.free(other, 5.0) == 4.0
    assert (worker.busy_seconds, worker.batch_seconds) == (4.0, 0.0)
    assert worker.free(worker.take(Batch(), 7.0), 8.0) == 7.0
    worker.computed_inline(0.5)
    assert worker.busy_seconds == 5.5
    worker.close()


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
