"""An engine whose batches wait for others to join them, for at most `max_wait`."""

from __future__ import annotations

import asyncio
from typing import Any

import engine_bench
import messages
import pytest
from engine_bench import BESIDE, INLINE, PATIENCE_S, Bench, HeldDevice, torch_threads

from attnserve_server.scheduling import engine
from attnserve_server.scheduling.entry import Outcome

__all__ = ["torch_threads"]

pytestmark = pytest.mark.usefixtures("torch_threads")


async def test_max_wait_waits_for_others() -> None:
    device = HeldDevice(INLINE)
    max_wait = 0.05
    bench = Bench(device, max_wait=max_wait)
    outcomes = await bench.outcomes([bench.submit(messages.random_attend(seed)) for seed in range(2)])
    assert device.sizes == [2]
    assert isinstance(outcomes[0], Outcome)
    assert outcomes[0].phases.queue >= max_wait - 0.001, "the loop's clock has milliseconds"


async def test_the_shortest_wait_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop rounds to whole milliseconds: half of one, or less, would be none."""
    loop, waits = asyncio.get_running_loop(), []
    call_later = loop.call_later

    def noted(delay: float, *call: Any) -> asyncio.TimerHandle:
        waits.append(delay)
        return call_later(delay, *call)

    bench = Bench(HeldDevice(INLINE), max_wait=1e-4)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "call_later", noted)
        for module in (engine, engine_bench):  # no time passes until the engine has seen the request
            patch.setattr(module, "perf_counter", lambda: 1.0)
        bench.submit(messages.random_attend(0))
    assert waits == [0.001]
    assert await bench.engine.drain(PATIENCE_S)


async def test_a_full_batch_waits_for_nobody() -> None:
    device = HeldDevice(INLINE)
    bench = Bench(device, max_wait=10 * PATIENCE_S, max_batch_requests=2)
    await bench.outcomes([bench.submit(messages.random_attend(seed)) for seed in range(2)])
    assert device.sizes == [2]


async def test_the_time_of_a_batch_is_without_what_the_next_one_waits_for_others() -> None:
    device = HeldDevice(BESIDE)
    bench = Bench(device, max_wait=10 * PATIENCE_S, max_batch_requests=2)
    device.may_run.clear()
    full = [bench.submit(messages.random_attend(seed)) for seed in range(2)]
    await device.until_entered()
    waits = bench.submit(messages.random_attend(2))
    device.may_run.set()
    for entry in full:
        await bench.outcome(entry)
    await asyncio.sleep(0)  # it is learnt once replies are on their way
    assert (bench.queue.requests, bench.admission.pace.batches) == (1, 1)
    await bench.outcomes([*full, waits, bench.submit(messages.random_attend(3))])


async def test_a_batch_that_is_full_before_leaves_nothing_to_come_at_the_end_of_the_wait() -> None:
    """Whatever came then would be one batch more than a busy device takes."""
    device = HeldDevice(BESIDE)
    wait = 1e-3
    bench = Bench(device, max_wait=wait, max_batch_requests=2)
    device.may_run.clear()
    entries = [bench.submit(messages.random_attend(seed)) for seed in range(3)]
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(2 * wait, over.set)
    await over.wait()
    assert (len(bench.engine.worker.runs), bench.queue.requests) == (1, 1)
    device.may_run.set()
    await bench.outcomes(entries)
    assert device.sizes == [2, 1]
