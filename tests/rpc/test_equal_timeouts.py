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


class ClockedLoop(asyncio.SelectorEventLoop):
    """A loop whose time a test decides."""

    now = 0.0

    def time(self) -> float:
        return self.now


def test_each_has_its_own_time_whatever_began_before_it() -> None:
    with asyncio.Runner(loop_factory=ClockedLoop) as runner:
        runner.run(check_each_time())


async def check_each_time() -> None:
    timeouts, loop = EqualTimeouts(10.0), asyncio.get_running_loop()
    assert isinstance(loop, ClockedLoop)

    async def at(seconds: float) -> None:
        """The clock shows so many seconds, and whatever is due then happens."""
        loop.now = seconds
        for _ in range(10):
            await asyncio.sleep(0)

    waits = []
    for begin in (0.0, 4.0, 4.5):
        waits.append(waiting(timeouts))
        await at(begin)
    late, looks = [], []
    for seconds in (9.9, 10.1, 13.9, 14.1, 14.4, 14.6):
        await at(seconds)
        late.append(sum(wait.done() for _, wait in waits))
        looks.append(timeouts._timer.when() if timeouts._timer else None)
    assert late == [0, 1, 1, 2, 2, 3]
    assert looks == [10.0, 14.0, 14.0, 14.5, 14.5, None], "not before the next one may be late"
    waits.append(waiting(timeouts))  # when none has been waiting
    await at(14.6)
    await at(24.5)
    assert not waits[3][1].done()
    await at(24.7)
    results = await asyncio.gather(*(wait for _, wait in waits), return_exceptions=True)
    assert [type(result) for result in results] == [TimeoutError] * 4


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
