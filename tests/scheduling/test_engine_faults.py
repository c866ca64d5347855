"""Failing batches, and devices that are lost, hang or run out of memory: only the requests at fault get an error,
everyone waiting is told, and nobody waits for ever.

The device is a real one that a test can hold up and make fail (`engine_bench.HeldDevice`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import messages
import pytest
import torch
from engine_bench import BESIDE, INLINE, PATIENCE_S, Bench, HeldDevice, assert_right, hold, torch_threads

from attnserve_server.devices.cuda import CudaDevice
from attnserve_server.devices.failures import Blame, is_out_of_memory
from attnserve_server.errors import ComputationFailed, DeviceFailed, OutOfMemory, RequestError
from attnserve_server.requests.request import Request
from attnserve_server.requests.work import BatchResult
from attnserve_server.scheduling.entry import Entry, Outcome
from attnserve_server.scheduling.watchdog import Watchdog

__all__ = ["torch_threads"]

pytestmark = pytest.mark.usefixtures("torch_threads")


class HurtDevice(HeldDevice):
    """A device that fails for some requests as the test says, and may be lost as a result."""

    def __init__(self, inline_flops: int, failure: Callable[[], BaseException], verdict: Blame | None = None) -> None:
        super().__init__(inline_flops)
        self.failure = failure
        self.verdict = verdict
        self.culprits: list[bytes] = []

    def run(self, requests: Sequence[Request]) -> BatchResult:
        result = super().run(requests)
        if any(bytes(request.payload("query")) in self.culprits for request in requests):
            raise self.failure()
        return result

    def blame(self, error: Exception) -> Blame:
        return self.verdict or super().blame(error)


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
    assert "/a/path" in caplog.text  # the log, unlike the caller, gets the full text


@pytest.mark.parametrize("others", [0, 1, 2])
async def test_the_time_of_a_failure_says_nothing(others: int) -> None:
    """Nor does that of the others in its batch, which were computed twice."""
    device = HeldDevice(INLINE)
    bench = Bench(device)
    batch = [messages.random_attend(seed) for seed in range(others + 1)]
    device.guilty = [batch[-1].query.data]
    await bench.outcomes([bench.submit(message) for message in batch])
    assert bench.admission.pace.batches == 0


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


def no_memory_of_the_host() -> Exception:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 62, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize("inline_flops", [INLINE, BESIDE])
@pytest.mark.parametrize("failure", [MemoryError, torch.OutOfMemoryError, no_memory_of_the_host])
async def test_no_memory_is_an_error_of_those_who_need_too_much(
    inline_flops: int, failure: Callable[[], Exception]
) -> None:
    device = HurtDevice(inline_flops, failure)
    bench = Bench(device)
    batch = [messages.random_attend(seed) for seed in range(5)]
    device.culprits = [batch[1].query.data]
    outcomes = await bench.outcomes([bench.submit(message) for message in batch])
    guilty = outcomes.pop(1)
    assert isinstance(guilty, OutOfMemory)
    assert guilty.code.name == "RESOURCE_EXHAUSTED"
    for outcome, message in zip(outcomes, batch[:1] + batch[2:], strict=True):
        assert_right(outcome, message)
    assert bench.engine.failure is None


def test_other_failures_are_not_for_want_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))


class MemoryOfCuda(RuntimeError):
    """Like torch.AcceleratorError when CUDA itself runs out of memory, such as pinned memory."""

    error_code = 2


@pytest.mark.parametrize(
    ("error", "torch_device", "blame"),
    [
        (RuntimeError("shapes do not fit"), "cpu", "request"),
        (RuntimeError("an illegal memory access"), "meta", "device"),
        (torch.OutOfMemoryError("no"), "meta", "memory"),
        (MemoryOfCuda("no"), "meta", "memory"),
    ],
)
def test_a_cuda_device_is_lost_if_it_computes_no_more(error: Exception, torch_device: str, blame: Blame) -> None:
    """Simulated without CUDA: tensors on `cpu` can be read, those on `meta` cannot."""
    device = object.__new__(CudaDevice)
    device._device = torch.device(torch_device)
    assert device.blame(error) == blame


@pytest.mark.parametrize("inline_flops", [INLINE, BESIDE])
async def test_a_device_that_is_lost_is_given_up(inline_flops: int, caplog: pytest.LogCaptureFixture) -> None:
    """Requests in the batch, queued ones and later ones are all told to go elsewhere, once each."""
    device = HurtDevice(inline_flops, RuntimeError, "device")
    bench = Bench(device, max_batch_requests=3)
    batch = [messages.random_attend(seed) for seed in range(8)]
    device.culprits = [batch[1].query.data]
    outcomes = [await bench.outcome(entry) for entry in [bench.submit(message) for message in batch]]
    assert all(isinstance(outcome, DeviceFailed) for outcome in outcomes)
    assert all(len(replies) == 1 for replies in bench.replies.values())
    assert device.sizes == [3], "nothing is tried again on a device that is lost"
    assert bench.engine.failed.is_set()
    with pytest.raises(DeviceFailed) as caught:
        bench.submit(messages.random_attend(9))
    assert (caught.value.code.name, caught.value.reason) == ("UNAVAILABLE", "DEVICE_FAILED")
    assert bench.count("attnserve_rejected_requests_total", reason="failed") == 1
    assert await bench.engine.drain(PATIENCE_S)
    assert (bench.admission.requests, bench.admission.bytes) == (0, 0)
    assert "the device is lost" in caplog.text


class Death(BaseException):
    """An exception that no thread catches."""


async def test_a_thread_that_dies_leaves_nobody_waiting() -> None:
    device = HurtDevice(BESIDE, Death)
    bench = Bench(device, max_batch_requests=1)
    fatal, other = messages.random_attend(0), messages.random_attend(1)
    device.culprits = [fatal.query.data]
    outcomes = [await bench.outcome(entry) for entry in (bench.submit(fatal), bench.submit(other))]
    assert all(isinstance(outcome, DeviceFailed) for outcome in outcomes)
    assert bench.engine.failed.is_set()


@pytest.mark.parametrize("results", [2, 4])
async def test_a_device_that_forgets_results_or_has_too_many_is_a_failure_of_the_batch(results: int) -> None:
    class Confused(HeldDevice):
        def run(self, requests: Sequence[Request]) -> BatchResult:
            result = super().run(requests)
            return replace(result, results=[*result.results, *result.results][: results + len(requests) - 3])

    bench = Bench(Confused(INLINE))
    outcomes = await bench.outcomes([bench.submit(messages.random_attend(seed)) for seed in range(3)])
    assert all(isinstance(outcome, ComputationFailed) for outcome in outcomes)


async def test_a_reply_that_fails_concerns_its_caller_alone() -> None:
    """It is tried once more, with an error; but if that, or another error, cannot be told, there is no more to tell."""
    device = HeldDevice(INLINE)
    bench = Bench(device)
    told: list[tuple[Entry, type]] = []

    def fail(entry: Entry, outcome: Outcome | RequestError) -> None:
        told.append((entry, type(outcome)))
        bench.replies[entry].append(outcome)
        raise KeyError("a bug")

    device.guilty = [messages.random_attend(1).query.data]
    good, bad, other = [bench.submit(messages.random_attend(seed)) for seed in range(3)]
    good.reply = bad.reply = fail
    assert isinstance(await bench.outcome(other), Outcome)
    assert told == [(good, Outcome), (good, ComputationFailed), (bad, ComputationFailed)]
    assert bench.engine.failure is None


async def test_a_bug_in_the_engine_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise KeyError("a bug")

    bench = Bench(HeldDevice(BESIDE))
    monkeypatch.setattr(bench.metrics, "batch", fail)
    entries = [bench.submit(messages.random_attend(seed)) for seed in range(3)]
    for entry in entries:
        assert isinstance(await bench.outcome(entry), DeviceFailed)
    assert bench.engine.failure == "the engine failed"


async def test_a_bug_met_by_who_leaves_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("a bug")

    device = HeldDevice(BESIDE)
    bench = Bench(device)
    monkeypatch.setattr(bench.queue, "drop_cancelled", fail)
    runs = await hold(bench, device)
    gone, waits = bench.submit(messages.random_attend(1)), bench.submit(messages.random_attend(2))
    bench.engine.cancel([gone])
    for entry in (runs, waits):
        assert isinstance(await bench.outcome(entry), DeviceFailed)
    device.may_run.set()


async def test_a_queue_that_is_broken_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers of running requests are told; the others see the process end, which waits for nothing else."""

    def fail(now: float) -> None:
        raise KeyError("a bug")

    device = HeldDevice(BESIDE)
    bench = Bench(device)
    runs = await hold(bench, device)
    bench.submit(messages.random_attend(1))
    monkeypatch.setattr(bench.queue, "pop", fail)
    bench.engine.fail("the device is lost")
    assert isinstance(await bench.outcome(runs), DeviceFailed)
    assert bench.engine.failed.is_set()
    device.may_run.set()


async def test_a_batch_that_does_not_end_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device)
    watchdog = Watchdog(bench.engine, 1.0, pytest.fail)
    stuck = await hold(bench, device)
    waiting = bench.submit(messages.random_attend(1))
    watchdog.start()
    for entry in (stuck, waiting):
        assert isinstance(await bench.outcome(entry), DeviceFailed)
    assert bench.engine.is_computing
    assert "counts as stuck" in caplog.text
    watchdog.stop()
    device.may_run.set()
    await asyncio.get_running_loop().run_in_executor(bench.engine.worker._threads, bool)
    await asyncio.sleep(0)
    assert all(len(replies) == 1 for replies in bench.replies.values()), "what comes of it after all is dropped"


async def test_batches_that_end_are_left_alone_however_many() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device)
    watchdog = Watchdog(bench.engine, PATIENCE_S)
    watchdog.start()
    for seed in range(20):
        assert isinstance(await bench.outcome(bench.submit(messages.random_attend(seed))), Outcome)
    watchdog.stop()
    assert bench.engine.failure is None


async def test_a_loop_that_does_not_turn_ends_the_process() -> None:
    """A batch on the event loop blocks every reply; the watchdog then ends the process. Here it only says so."""
    device = HeldDevice(INLINE)
    bench = Bench(device)
    why: list[str] = []

    def end(reason: str) -> None:
        why.append(reason)
        device.may_run.set()

    watchdog = Watchdog(bench.engine, 0.1, end)
    device.may_run.clear()
    entry = bench.submit(messages.random_attend(0))
    watchdog.start()
    (outcome,) = await bench.outcomes([entry])
    assert isinstance(outcome, Outcome)
    assert len(why) == 1
    assert "stuck" in why[0]
    watchdog.stop()


def test_a_watchdog_ends_with_its_loop(caplog: pytest.LogCaptureFixture) -> None:
    async def forget() -> Watchdog:
        watchdog = Watchdog(Bench(HeldDevice(INLINE)).engine, 10.0, pytest.fail)
        watchdog.start()
        return watchdog

    watchdog = asyncio.run(forget())
    watchdog._thread.join(PATIENCE_S)
    assert not watchdog._thread.is_alive()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
