"""Messages of unary calls are read in turns, and what waits for its turn is counted."""

from __future__ import annotations

import asyncio
from time import perf_counter

import messages
import pytest
from engine_bench import INLINE, Bench, torch_threads
from rpcs import rpcs_of

from attnserve_server.access.callers import anybody
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.errors import Overloaded
from attnserve_server.rpc.engine_calls import EngineCalls
from attnserve_server.rpc.reading_turns import SLICE_SECONDS, TURNS, ReadingTurns
from attnserve_server.rpc.rpcs import Received

__all__ = ["torch_threads"]

pytestmark = pytest.mark.usefixtures("torch_threads")

MESSAGE = messages.random_attend(0).SerializeToString()
SLICES = 10


class Calls:
    """Calls through an engine, beside somebody whose messages have just been read for `SLICES` slices."""

    def __init__(self, max_requests: int = 100) -> None:
        self.bench = Bench(CpuDevice(1, INLINE, None), max_requests=max_requests)
        self.turns = ReadingTurns()
        self._calls = EngineCalls(self.bench.engine, self.bench.metrics, rpcs_of(self.bench.metrics), self.turns)
        self.read = 0
        another = self.turns.of("another")
        another.begin()
        another.end(SLICES * SLICE_SECONDS)

    def call(self, caller: str = "here") -> asyncio.Task[bytes]:
        """A call, which has arrived."""

        def read(_: object, message: bytes) -> object:
            self.read += 1
            return messages.read_request(message, 0, len(message))

        received = Received(anybody(caller), MESSAGE, perf_counter(), None, None)
        return asyncio.create_task(self._calls._answer(read, None, received))  # type: ignore[arg-type]

    async def turn(self, times: int) -> None:
        for _ in range(times):
            await asyncio.sleep(0)


async def test_a_message_waits_until_the_loop_has_turned_for_others() -> None:
    calls = Calls()
    task = calls.call()
    await calls.turn(SLICES * TURNS - 2)
    assert calls.read == 0
    await calls.turn(6)
    assert calls.read == 1
    assert await task


async def test_what_waits_is_counted_as_a_request_of_its_caller() -> None:
    calls = Calls()
    tasks = [calls.call(), calls.call()]
    await calls.turn(2)
    admission = calls.bench.admission
    assert (calls.read, admission.requests, admission.bytes) == (0, 2, 2 * len(MESSAGE))
    for task in tasks:
        assert await task
    assert await calls.bench.engine.drain(10)
    assert (admission.requests, admission.bytes) == (0, 0)


async def test_draining_waits_for_it() -> None:
    calls = Calls()
    task = calls.call()
    await calls.turn(2)
    assert not await calls.bench.engine.drain(0)
    await asyncio.wait([task])


async def test_it_is_refused_where_there_is_no_room_for_it() -> None:
    calls = Calls(max_requests=2)
    one, another = calls.call("one"), calls.call("another")
    await calls.turn(2)
    with pytest.raises(Overloaded):
        await calls.call("a third")
    assert await one
    assert await another


async def test_one_that_is_cancelled_meanwhile_is_not_read() -> None:
    calls = Calls()
    gone, stays = calls.call(), calls.call()
    await calls.turn(2)
    gone.cancel()
    assert await stays
    assert gone.cancelled()
    assert calls.read == 1
    assert await calls.bench.engine.drain(10)
    assert calls.bench.admission.requests == 0


async def test_reading_counts_for_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has had little of the loop is before one whose messages take long to read."""
    calls = Calls()
    turn = calls.turns.of("here")
    before = turn.until
    assert await calls.call()
    assert turn.until > before
