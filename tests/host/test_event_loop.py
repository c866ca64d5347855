"""How busy the event loop is: not while it waits, and all the time that it works."""

from __future__ import annotations

import asyncio
import time

from attnserve_server.host.event_loop import EventLoop

TOLERANCE_S = 0.01
"""Waits may end this much early, because they are counted in milliseconds."""


def test_waiting_is_not_working() -> None:
    async def wait(seconds: float) -> tuple[float, float]:
        begin, busy = time.perf_counter(), loop.busy_seconds
        await asyncio.sleep(seconds)
        return time.perf_counter() - begin, loop.busy_seconds - busy

    loop = EventLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        elapsed, busy = runner.run(wait(0.3))
    # A late wake-up may make the wait longer than 0.3 s, never shorter.
    assert 0 <= busy <= elapsed - 0.3 + TOLERANCE_S


def test_working_is() -> None:
    async def work(seconds: float) -> float:
        before = loop.busy_seconds
        for _ in range(10):
            time.sleep(seconds / 10)  # noqa: ASYNC251
            await asyncio.sleep(0)
        return loop.busy_seconds - before

    loop = EventLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(work(0.2)) >= 0.2 - TOLERANCE_S
