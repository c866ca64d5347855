"""An engine whose device takes two batches at a time, and what goes wrong: with one of them, with a launch, for want of
memory beside another, or with the device.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
from engine_bench import PATIENCE_S
from pair_bench import Asked, PairBench, PairDevice

from attnserve_server.errors import ComputationFailed, DeviceFailed, OutOfMemory
from attnserve_server.requests.work import Finish
from attnserve_server.scheduling.entry import Outcome
from attnserve_server.scheduling.shared_lock import SharedLock
from attnserve_server.scheduling.watchdog import BEATS, SLOWEST_FLOPS, Watchdog


async def test_what_cannot_be_launched_is_computed() -> None:
    bench = PairBench(device=PairDevice(launch_bytes=10))
    bench.device.fails_to_launch = True
    entries = await bench.given(Asked(5), Asked(6))
    bench.device.end_all()
    assert all(isinstance(answer, Outcome) for answer in await bench.answers(entries))
    assert (len(bench.device.launched), len(bench.device.batches)) == (1, 1)
    await bench.finish()


@pytest.mark.parametrize("fails_to_launch", [False, True])
async def test_whatever_comes_of_a_launch_others_can_have_the_device_alone_afterwards(fails_to_launch: bool) -> None:
    bench = PairBench(device=PairDevice(launch_bytes=10))
    bench.device.end_all()
    bench.device.fails_to_launch = fails_to_launch
    assert isinstance((await bench.answers(bench.submit(Asked(5))))[0], Outcome)
    assert isinstance((await bench.answers(bench.submit(Asked(5, failure=MemoryError))))[0], OutOfMemory)
    await bench.finish()


async def test_what_was_launched_and_lacks_results_is_computed() -> None:
    class Forgetful(PairDevice):
        def launch(self, requests: Sequence[Asked]) -> Finish:
            finish = super().launch(requests)
            return lambda: replace(whole := finish(), results=whole.results[:-1])

    bench = PairBench(device=Forgetful(launch_bytes=100))
    bench.device.end_all()
    assert all(isinstance(answer, Outcome) for answer in await bench.answers(bench.submit(Asked(1), Asked(2))))
    assert bench.device.costs() == [[1, 2], [1, 2]]
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

    def share() -> None:
        with lock.shared():
            pass

    thread = threading.Thread(target=alone)
    thread.start()
    while lock.try_share():  # until it waits
        lock.unshare()
    assert not entered.is_set()
    lock.unshare()
    assert entered.wait(PATIENCE_S)
    assert not lock.try_share()
    behind = threading.Thread(target=share)
    behind.start()
    behind.join(0.1)
    assert behind.is_alive(), "nor does another begin"
    may_end.set()
    for each in (thread, behind):
        each.join(PATIENCE_S)
    assert lock.try_share()


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


class NotedLock(SharedLock):
    """Notes when a thread wants it exclusively."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted = threading.Event()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        self.wanted.set()
        with super().exclusive():
            yield


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("count", [1, 2])
async def test_what_has_no_memory_beside_another_is_tried_without_it(always: bool, count: int) -> None:
    bench = PairBench()
    lock = bench.engine.worker._lock = NotedLock()
    other = await bench.given(Asked(1))
    entries = await bench.given(*(Asked(5, failure=Crowded(bench, always)) for _ in range(count)))
    bench.device.end(1)
    if count > 1:  # the first of them by itself, but still beside the other batch
        await bench.device.until_entered()
        bench.device.end(2)
    assert await asyncio.get_running_loop().run_in_executor(None, lock.wanted.wait, PATIENCE_S)
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


async def test_a_device_that_is_lost_while_the_guilty_are_sought_is_lost_for_all() -> None:
    """Also for those before them, who have been computed."""
    bench = PairBench()
    bench.device.end_all()

    def failure() -> BaseException:
        bench.device.lost = len(bench.device.batches) == 3
        return RuntimeError()

    answers = await bench.answers(bench.submit(Asked(1), Asked(2, failure=failure), Asked(3)))
    assert bench.device.costs() == [[1, 2, 3], [1], [2]]
    assert all(isinstance(answer, DeviceFailed) for answer in answers)
    assert bench.engine.failure == "the device is lost"


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


async def test_batches_that_end_are_left_alone_however_long_all_together_take() -> None:
    bench = PairBench()
    watchdog = Watchdog(bench.engine, 1.0, pytest.fail)
    for place in range(5):
        entries = await bench.given(Asked(1))
        for _ in range(BEATS - 5):
            watchdog._beat()
        bench.device.end(place)
        await bench.answers(entries)
    assert bench.engine.failure is None
    await bench.finish()


async def test_a_batch_may_take_as_long_as_its_work_does_on_the_slowest_device() -> None:
    bench = PairBench()
    watchdog = Watchdog(bench.engine, 1.0, pytest.fail)
    await bench.given(Asked(int(10 * SLOWEST_FLOPS)))
    for _ in range(11 * BEATS):
        watchdog._beat()
    assert bench.engine.failure is None
    for _ in range(BEATS):
        watchdog._beat()
    assert "counts as stuck" in str(bench.engine.failure)
    bench.device.end_all()
