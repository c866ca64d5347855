"""Timeouts of one length: whatever is late ends, each after its own time, and nothing else does."""

from __future__ import annotations

import asyncio

import pytest

from attnserve_server.rpc.equal_timeouts import EqualTimeouts

SECONDS = 0.05


def waiting(timeouts: EqualTimeouts) -> tuple[asyncio.Future[str], asyncio.Task[str]]:
    """Something that is waited for, and the wait."""
    awaited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    return awaited, asyncio.create_task(timeouts.of(awaited))


async def test_what_is_late_ends_and_what_comes_in_time_is_the_result() -> None:
    timeouts = EqualTimeouts(SECONDS)
    waits = [waiting(timeouts) for _ in range(5)]
    await asyncio.sleep(0)
    waits[1][0].set_result("in time")
    waits[3][0].set_exception(KeyError("failed"))
    results = await asyncio.gather(*(wait for _, wait in waits), return_exceptions=True)
    assert [type(result) for result in results] == [TimeoutError, str, TimeoutError, KeyError, TimeoutError]
    assert all(awaited.cancelled() for awaited, wait in (waits[0], waits[2], waits[4]))


async def test_each_has_its_own_time_whatever_began_before_it() -> None:
    timeouts, loop = EqualTimeouts(SECONDS), asyncio.get_running_loop()

    async def seconds_of_one() -> float:
        begin = loop.time()
        with pytest.raises(TimeoutError):
            await timeouts.of(loop.create_future())
        return loop.time() - begin

    async def after_a_while(turns: int) -> float:
        for _ in range(turns):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(SECONDS / 3):
                    await timeouts.of(loop.create_future())
        return await seconds_of_one()

    took = await asyncio.gather(*(after_a_while(turns) for turns in range(4)))
    assert min(took) >= SECONDS
    assert await seconds_of_one() >= SECONDS  # when none has been waiting


async def test_one_who_is_cancelled_is_told_so_and_the_others_wait_on() -> None:
    timeouts = EqualTimeouts(SECONDS)
    (_, gone), (_, late) = waiting(timeouts), waiting(timeouts)
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    with pytest.raises(TimeoutError):
        await late


async def test_without_a_bound_nothing_is_late() -> None:
    timeouts = EqualTimeouts(None)
    awaited, wait = waiting(timeouts)
    asyncio.get_running_loop().call_later(SECONDS, awaited.set_result, "at last")
    assert await wait == "at last"
