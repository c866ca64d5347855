"""Coroutines that start running before anybody awaits them."""

from __future__ import annotations

import asyncio

import pytest

from attnserve_server.rpc.eager import EagerCoroutine


class Steps:
    """A coroutine that records how far it has come, and waits in the middle."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        self.seen.append("begun")
        try:
            await self.gate
            self.seen.append("through")
            await asyncio.sleep(0)
            self.seen.append("done")
        finally:
            self.seen.append("left")

    def ended(self, coroutine: EagerCoroutine) -> None:
        assert coroutine.has_ended
        self.seen.append("told" if coroutine.error is None else f"told of {type(coroutine.error).__name__}")


async def test_it_begins_at_once_and_goes_on_by_itself() -> None:
    steps = Steps()
    coroutine = EagerCoroutine(steps.run(), steps.ended)
    assert steps.seen == ["begun"]
    await asyncio.sleep(0)
    assert not coroutine.has_ended
    steps.gate.set_result(None)
    await asyncio.sleep(0)
    assert steps.seen == ["begun", "through"], "no turn of the loop is lost"
    await asyncio.sleep(0)
    assert steps.seen == ["begun", "through", "done", "left", "told"]
    assert coroutine.has_ended
    assert coroutine.error is None


async def test_what_need_not_wait_has_ended_at_once() -> None:
    seen: list[str] = []

    async def run() -> None:
        seen.append("done")

    coroutine = EagerCoroutine(run(), lambda _: seen.append("told"))
    assert coroutine.has_ended
    assert seen == ["done", "told"]


@pytest.mark.parametrize("waits", [False, True])
async def test_what_it_raises_is_told(waits: bool) -> None:
    told: list[EagerCoroutine] = []

    async def run() -> None:
        if waits:
            await asyncio.sleep(0)
        raise LookupError

    coroutine = EagerCoroutine(run(), told.append)
    await asyncio.sleep(0)
    assert told == [coroutine]
    assert isinstance(coroutine.error, LookupError)


async def test_what_it_waits_for_may_fail() -> None:
    steps = Steps()
    EagerCoroutine(steps.run(), steps.ended)
    steps.gate.set_exception(LookupError())
    await asyncio.sleep(0)
    assert steps.seen == ["begun", "left", "told of LookupError"]


@pytest.mark.parametrize("answered", [False, True])
async def test_what_nobody_asks_for_is_closed_and_nobody_told(answered: bool) -> None:
    steps = Steps()
    coroutine = EagerCoroutine(steps.run(), steps.ended)
    if answered:
        steps.gate.set_result(None)  # it would continue in the loop's next turn
    coroutine.close()
    assert steps.seen == ["begun", "left"]
    assert answered or steps.gate.cancelled(), "an error there would be logged, as one that was never retrieved"
    await asyncio.sleep(0)
    assert steps.seen == ["begun", "left"]
