"""An engine that has been given up: everybody who waits is told, however far their requests had come, and only once,
also while these replies are still being sent.
"""

from __future__ import annotations

import asyncio

import pytest
from engine_bench import PATIENCE_S
from pair_bench import Asked, PairBench

from attnserve_server.errors import DeviceFailed, RequestError
from attnserve_server.scheduling.entry import Entry, Outcome


class Sending(PairBench):
    """Its callers have read none of their replies yet."""

    def _reply(self, entry: Entry, outcome: Outcome | RequestError) -> None:
        self.replies[entry].append(outcome)
        self._answered.set()

    async def ends(self) -> None:
        """What is being computed ends, and the loop has seen that."""
        self.device.end_all()
        await asyncio.get_running_loop().run_in_executor(None, self.engine.worker._threads.shutdown)
        await asyncio.sleep(0)


async def test_who_would_not_have_run_is_told_too() -> None:
    bench = PairBench()
    entries = await bench.given(Asked(5))
    gone, late, waits = bench.submit(Asked(1), Asked(1), Asked(1))
    late.deadline = 0.0
    bench.engine.cancel([gone])
    bench.engine.fail("it is broken")
    for outcome in await bench.answers([*entries, gone, late, waits]):
        assert isinstance(outcome, DeviceFailed)
    assert await bench.engine.drain(PATIENCE_S)
    bench.device.end_all()


async def test_what_is_computed_after_all_is_no_second_answer() -> None:
    bench = Sending()
    entries = await bench.given(Asked(5, needs=("a",)))
    bench.engine.fail("it is broken")
    await bench.ends()
    assert isinstance((await bench.answers(entries))[0], DeviceFailed)


async def test_who_leaves_then_is_not_told_twice() -> None:
    bench = Sending()
    runs = await bench.given(Asked(5, needs=("a",)))
    waits = bench.submit(Asked(1, needs=("a",)))
    bench.engine.cancel(waits)
    bench.engine.fail("it is broken")
    await bench.ends()
    for outcome in await bench.answers(runs + waits):
        assert isinstance(outcome, DeviceFailed)


async def test_what_has_nothing_to_compute_is_not_done_then() -> None:
    bench = Sending()
    asked = Asked(computes=False, needs=("a",))
    entries = bench.submit(asked)
    bench.engine.fail("it is broken")
    await bench.ends()
    assert isinstance((await bench.answers(entries))[0], DeviceFailed)
    assert asked.said == ["enter"]


async def test_who_was_answered_before_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug met between the replies to one batch."""
    bench = Sending()
    bench.device.end_all()
    count, counted = bench.metrics.batch, []

    def fail_later(requests: int, *others: int) -> None:
        counted.append(requests)
        if len(counted) == 2:
            raise KeyError("a bug")
        count(requests, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.metrics, "batch", fail_later)
    answers = await bench.answers(bench.submit(Asked(1), Asked(2, failure=RuntimeError), Asked(3)))
    assert [type(answer).__name__ for answer in answers] == ["Outcome", "ComputationFailed", "DeviceFailed"]
    assert bench.engine.failure == "the engine failed"


async def test_draining_changes_nothing_of_what_callers_are_told() -> None:
    """Another server is what they need, not patience. The first reason is the one that counts."""
    bench = PairBench()
    bench.engine.fail("it is broken")
    bench.engine.fail("and so is everything else")
    assert bench.engine.failure == "it is broken"
    assert await bench.engine.drain(PATIENCE_S)
    with pytest.raises(DeviceFailed):
        bench.engine.check_open()
