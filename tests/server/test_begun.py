"""Coroutines that begin before anybody waits for them."""

from __future__ import annotations

import asyncio

import pytest

from attnserve_server.begun import Begun


class Steps:
    """A coroutine that notes how far it has come, and waits in the middle."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        self.seen.append("begun")
        try:
            await self.gate
            await asyncio.sleep(0)
            self.seen.append("done")
        finally:
            self.seen.append("left")


async def test_it_begins_at_once_and_ends_when_awaited() -> None:
    steps = Steps()
    begun = Begun(steps.run())
    assert steps.seen == ["begun"]
    waiting = asyncio.create_task(_result(begun))
    await asyncio.sleep(0)
    assert not waiting.done()
    steps.gate.set_result(None)
    await waiting
    assert steps.seen == ["begun", "done", "left"]


async def test_what_it_waits_for_may_be_there_before_it_is_awaited() -> None:
    steps = Steps()
    begun = Begun(steps.run())
    steps.gate.set_result(None)
    await begun
    assert steps.seen == ["begun", "done", "left"]


async def test_what_need_not_wait_is_done_at_once() -> None:
    seen = []

    async def run() -> None:
        seen.append("done")

    begun = Begun(run())
    assert seen == ["done"]
    await begun


@pytest.mark.parametrize("waits", [False, True])
async def test_it_raises_when_awaited(waits: bool) -> None:
    async def run() -> None:
        if waits:
            await asyncio.sleep(0)
        raise LookupError

    begun = Begun(run())
    with pytest.raises(LookupError):
        await begun


async def test_who_awaits_it_may_be_cancelled() -> None:
    steps = Steps()
    waiting = asyncio.create_task(_result(Begun(steps.run())))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert steps.seen == ["begun", "left"]


async def test_what_nobody_awaits_is_closed() -> None:
    steps = Steps()
    Begun(steps.run()).close()
    assert steps.seen == ["begun", "left"]
    assert steps.gate.cancelled(), "an error there would be logged, as one that was never retrieved"


async def _result(begun: Begun) -> None:
    await begun
