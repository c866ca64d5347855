"""Messages of unary calls are read in turns, and what waits for its turn is counted."""

from __future__ import annotations

import asyncio
import gc
from time import perf_counter

import messages
import pytest
from engine_bench import INLINE, Bench, torch_threads
from rpcs import rpcs_of

from attnserve_server.access.callers import anybody
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.errors import Overloaded
from attnserve_server.host.loop_slices import SLICE_SECONDS
from attnserve_server.rpc import engine_calls
from attnserve_server.rpc.engine_calls import EngineCalls
from attnserve_server.rpc.reading_turns import TURNS, ReadingTurns
from attnserve_server.rpc.rpcs import Received

__all__ = ["torch_threads"]

pytestmark = pytest.mark.usefixtures("torch_threads")

MESSAGE = messages.random_attend(0).SerializeToString()
SLICES = 10


class Calls:
    """Calls through an engine, beside somebody whose messages have just been read for `SLICES` slices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_requests: int = 100) -> None:
        self.bench = Bench(CpuDevice(1, INLINE, None), max_requests=max_requests)
        self.turns = ReadingTurns()
        self._calls = EngineCalls(self.bench.engine, self.bench.metrics, rpcs_of(self.bench.metrics), self.turns)
        self.read = 0
        self.clock = 0.0
        monkeypatch.setattr(engine_calls, "perf_counter", lambda: self.clock)
        another = self.turns.of("another")
        another.begin()
        another.end(SLICES * SLICE_SECONDS)

    def call(self, caller: str = "here", seconds: float = 0.0, in_turns: bool = True) -> asyncio.Task[bytes]:
        """A call, which has arrived, and takes so long to read."""

        def read(_: object, message: bytes) -> object:
            self.read += 1
            self.clock += seconds
            return messages.read_request(message, 0, len(message))

        received = Received(anybody(caller), MESSAGE, perf_counter(), None, None)
        return asyncio.create_task(self._calls._answer(read, None, in_turns, received))  # type: ignore[arg-type]

    async def turn(self, times: int) -> None:
        for _ in range(times):
            await asyncio.sleep(0)


@pytest.fixture
async def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


async def test_a_message_waits_until_the_loop_has_turned_for_others(calls: Calls) -> None:
    task = calls.call()
    await calls.turn(SLICES * TURNS - 10)
    assert calls.read == 0
    await calls.turn(14)
    assert calls.read == 1
    assert await task


async def test_what_waits_is_counted_as_a_request_of_its_caller(calls: Calls) -> None:
    tasks = [calls.call(), calls.call()]
    await calls.turn(2)
    admission = calls.bench.admission
    assert (calls.read, admission.requests, admission.bytes) == (0, 2, 2 * len(MESSAGE))
    for task in tasks:
        assert await task
    assert await calls.bench.engine.drain(10)
    assert (admission.requests, admission.bytes) == (0, 0)


async def test_draining_waits_for_it(calls: Calls) -> None:
    task = calls.call()
    await calls.turn(2)
    assert not await calls.bench.engine.drain(0)
    await asyncio.wait([task])


async def test_it_is_refused_where_there_is_no_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, max_requests=2)
    one, another = calls.call("one"), calls.call("another")
    await calls.turn(2)
    with pytest.raises(Overloaded):
        await calls.call("a third")
    assert await one
    assert await another


async def test_one_that_is_cancelled_meanwhile_is_not_read(calls: Calls) -> None:
    gone, stays = calls.call(), calls.call()
    await calls.turn(2)
    gone.cancel()
    assert await stays
    assert gone.cancelled()
    assert calls.read == 1
    assert await calls.bench.engine.drain(10)
    assert calls.bench.admission.requests == 0


async def test_what_takes_little_does_not_wait_for_what_others_have_read(calls: Calls) -> None:
    task = calls.call(in_turns=False)
    await calls.turn(1)
    assert calls.read == 1
    assert await task


@pytest.mark.parametrize("in_turns", [False, True])
async def test_after_a_message_that_took_long_the_callers_next_ones_wait(calls: Calls, in_turns: bool) -> None:
    """And others do not, unless theirs may take long, too."""
    await calls.turn((SLICES + 1) * TURNS)
    slow = calls.call("slow", SLICES * SLICE_SECONDS, in_turns)
    await calls.turn(1)
    others = calls.call("slow", in_turns=in_turns), calls.call("other", in_turns=in_turns)
    await calls.turn(SLICES * TURNS - 3)
    assert calls.read == (1 if in_turns else 2)
    for task in (slow, *others):
        assert await task
    assert calls.read == 3


async def test_one_that_takes_less_meanwhile_does_not_shorten_that(calls: Calls) -> None:
    await calls.turn((SLICES + 1) * TURNS)
    tasks = [calls.call("slow", SLICES * SLICE_SECONDS, in_turns=False)]
    await calls.turn(2)
    tasks.append(calls.call("other", 2 * SLICE_SECONDS, in_turns=False))
    await calls.turn(1)
    tasks.append(calls.call("slow", in_turns=False))
    await calls.turn(SLICES * TURNS - 6)
    assert calls.read == 2
    for task in tasks:
        assert await task


async def test_that_is_remembered_when_the_call_has_ended(calls: Calls) -> None:
    await calls.turn((SLICES + 1) * TURNS)
    assert await calls.call(seconds=SLICES * SLICE_SECONDS, in_turns=False)
    gc.collect()
    again = calls.call(in_turns=False)
    await calls.turn(2)
    assert calls.read == 1
    assert await again


async def test_after_messages_that_took_little_nobody_waits(calls: Calls) -> None:
    await calls.turn((SLICES + 1) * TURNS)
    tasks = [calls.call(seconds=0.9 * SLICE_SECONDS, in_turns=False) for _ in range(20)]
    await calls.turn(1)
    assert calls.read == 20
    for task in tasks:
        assert await task


async def test_a_call_does_not_end_what_a_stream_of_its_caller_reads(calls: Calls) -> None:
    await calls.turn((SLICES + 1) * TURNS)
    turn = calls.turns.of("here")
    turn.begin()
    assert await calls.call(seconds=SLICE_SECONDS, in_turns=False)
    assert not turn.is_free
    turn.end(0.0)
    await calls.turn(2 * TURNS)
    assert turn.is_free
