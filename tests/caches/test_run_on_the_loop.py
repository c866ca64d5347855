"""Requests that compute nothing run on the event loop: who is next there, and when others have their turns."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from cache_bench import PATIENCE_S, Bench, bench

from attnserve_server.host.loop_slices import LONGEST_SECONDS, SLICE_SECONDS
from attnserve_server.scheduling import pending

__all__ = ["bench"]

TOOK_S = 0.0051
"""How long each takes, by the clock of these tests."""
TURNS = 51
"""How often the loop turns for that."""


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request takes `TOOK_S`: so much passes from one look at the clock to the next."""
    clock = itertools.count(0.0, TOOK_S)
    monkeypatch.setattr(pending, "perf_counter", lambda: next(clock))


@asynccontextmanager
async def turning(bench: Bench) -> AsyncIterator[Counter[int]]:
    """Counts the turns of the loop, by how many requests have been answered by then."""
    turns: Counter[int] = Counter()

    async def turn() -> None:
        while True:
            turns[len(bench.order)] += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(turn())
    await asyncio.sleep(0)
    try:
        yield turns
    finally:
        task.cancel()


@pytest.mark.parametrize("takes_long", [False, True])
async def test_callers_are_next_in_turns(bench: Bench, takes_long: bool, request: pytest.FixtureRequest) -> None:
    """However many requests of another are before theirs."""
    if takes_long:
        request.getfixturevalue("slow")
    many = [bench.look(bench.create(1), caller="many") for _ in range(5)]
    few = [bench.look(bench.create(1), caller="few") for _ in range(2)]
    for entry in (*many, *few):
        assert await bench.seen(entry) == 1
    assert bench.order == [many[0], few[0], many[1], few[1], *many[2:]]
    await bench.finished()


async def test_many_that_take_little_run_together(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "SLICE_SECONDS", PATIENCE_S)
    async with turning(bench) as turns:
        looks = [bench.look(bench.create(1)) for _ in range(5)]
        for entry in looks:
            await bench.outcome(entry)
    assert [turns[answered] for answered in range(1, 5)] == [0] * 4
    await bench.finished()


@pytest.mark.usefixtures("slow")
async def test_after_one_that_took_long_the_loop_turns_for_others(bench: Bench) -> None:
    async with turning(bench) as turns:
        for entry in [bench.look(bench.create(1)) for _ in range(3)]:
            await bench.outcome(entry)
        # One that comes only now waits, too.
        assert await bench.seen(bench.look(bench.create(2))) == 2
    assert turns[0] <= 3
    assert all(TURNS <= turns[answered] <= TURNS + 3 for answered in (1, 2, 3)), turns
    await bench.finished()


async def test_a_process_that_was_suspended_meanwhile_is_not_held_up_for_long(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 3600.0)
    monkeypatch.setattr(pending, "perf_counter", lambda: next(clock))
    async with turning(bench) as turns:
        for entry in [bench.look(bench.create(1)) for _ in range(2)]:
            await bench.outcome(entry)
    assert turns[1] <= pending.TURNS * LONGEST_SECONDS / SLICE_SECONDS + 3
    await bench.finished()


@pytest.mark.usefixtures("slow")
async def test_one_that_is_cancelled_meanwhile_does_not_run(bench: Bench) -> None:
    first, gone, last = (bench.look(bench.create(1)) for _ in range(3))
    await bench.outcome(first)
    bench.engine.cancel([gone])
    await bench.outcome(last)
    assert bench.order == [first, gone, last]
    assert "Cancelled" in type(await bench.outcome(gone)).__name__
    await bench.finished()
