"""Requests that hit NaN or infinities take many times as long: they run again, separately, at their true cost.

The device is a real one with the native kernel that a test can hold up (`engine_bench.HeldDevice`).
"""

from __future__ import annotations

from collections.abc import Sequence

import messages
import numpy as np
import pytest
from engine_bench import BESIDE, Bench, HeldDevice, assert_right, output, torch_threads

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.errors import Cancelled
from attnserve_server.native import library
from attnserve_server.requests.request import Request
from attnserve_server.requests.work import BatchResult
from attnserve_server.scheduling import engine, worker
from attnserve_server.scheduling.entry import Outcome

__all__ = ["torch_threads"]

pytestmark = [
    pytest.mark.usefixtures("torch_threads"),
    pytest.mark.skipif(not library.available(), reason="no native kernel is here"),
]


class NativeDevice(HeldDevice):
    """A device that can be held up and computes with the native kernel."""

    def __init__(self) -> None:
        super().__init__(BESIDE)
        self.native = CpuDevice(1, BESIDE, library.best("auto")).native
        self.held_at = -1
        """Index of the batch that it holds until it may run."""

    def run(self, requests: Sequence[Request]) -> BatchResult:
        if len(self.batches) == self.held_at:
            self.may_run.clear()
        return super().run(requests)


class TimedDevice(NativeDevice):
    """Such a device with a clock of its own, on which a batch takes a millisecond, and what runs `again` takes this
    many seconds.
    """

    def __init__(self, again: float) -> None:
        super().__init__()
        self.now = 0.0
        self._again = again

    def run(self, requests: Sequence[Request]) -> BatchResult:
        seconds = 0.001 if requests[0].unfinished is None else self._again
        result = super().run(requests)
        self.now += seconds
        return result


def spoiled(seed: int, value: float = np.nan) -> pb.AttendRequest:
    """A request with one non-finite value that all queries attend to."""
    message = messages.random_attend(seed, 4)
    array = messages.array(message.value).copy()
    array.reshape(-1)[0] = value
    message.value.CopyFrom(messages.tensor(array))
    return message


async def test_they_run_apart_and_hold_up_nobody_in_their_batch() -> None:
    device = NativeDevice()
    bench = Bench(device)
    batch = [spoiled(n) if n in (1, 4) else messages.random_attend(n, 4) for n in range(6)]
    entries = [bench.submit(message) for message in batch]
    assert entries[1].group == entries[0].group, "nobody knows before"
    cost = entries[1].cost
    outcomes = await bench.outcomes(entries)
    assert device.sizes == [6, 2]
    assert entries[1].group != entries[0].group
    assert entries[1].kind != entries[0].kind, "how long it takes is learnt apart"
    assert entries[1].cost > 10 * cost
    for n, (outcome, message) in enumerate(zip(outcomes, batch, strict=True)):
        assert isinstance(outcome, Outcome)
        assert outcome.batch_size == (2 if n in (1, 4) else 4)
        if n in (1, 4):
            assert np.isnan(output(outcome, message)).any()
            (alone,) = CpuDevice(1, BESIDE, None).run([messages.read(message)]).results
            np.testing.assert_array_equal(output(outcome, message).tobytes(), bytes(alone.output))
        else:
            assert_right(outcome, message)
    assert bench.count("attnserve_batch_requests_sum") == 6


async def test_calls_of_kernels_count_where_all_of_a_batch_runs_once_more() -> None:
    bench = Bench(NativeDevice())
    await bench.outcomes([bench.submit(spoiled(n)) for n in range(3)])
    assert bench.count("attnserve_kernel_calls_total", kernel=library.NAME) == 3
    assert bench.count("attnserve_batch_requests_count") == 1


async def test_who_leaves_meanwhile_is_not_computed_again() -> None:
    device = NativeDevice()
    bench = Bench(device)
    device.may_run.clear()
    entry = bench.submit(spoiled(0))
    await device.until_entered()
    bench.engine.cancel([entry])
    device.may_run.set()
    (outcome,) = await bench.outcomes([entry])
    assert isinstance(outcome, Cancelled)
    assert device.sizes == [1]


@pytest.mark.parametrize("again", [0.002, 0.02], ids=["a little longer", "much longer"])
async def test_a_flood_of_them_has_no_more_than_its_callers_share(
    monkeypatch: pytest.MonkeyPatch, again: float
) -> None:
    """Their rerun cost is charged to the flood: others get their turn before its next one. Nothing but the device takes
    time.
    """
    device = TimedDevice(again)
    for module in (engine, worker):
        monkeypatch.setattr(module, "perf_counter", lambda: device.now)
    device.held_at = 1
    bench = Bench(device, max_batch_flops=10**6)
    flood = [bench.submit(spoiled(n, np.inf), caller="flood") for n in range(8)]
    await device.until_entered()  # all of them, in the native kernel
    await device.until_entered()  # one, in the written-out kernel
    other = bench.submit(messages.random_attend(100, 4), caller="other")
    device.may_run.set()
    await bench.outcomes([*flood, other])
    assert device.sizes == [8, *[1] * 9]
    place = device.batches.index([other.request])
    assert place == 2, "before six that had come before it"
    assert [entry.device_seconds for entry in flood] == pytest.approx([0.001 / 8 + again] * 8)
    assert other.device_seconds == pytest.approx(0.001)
