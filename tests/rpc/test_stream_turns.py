"""Messages of many calls: others get their turns while one is being read.

The stream is a real one whose caller is a list of messages; the order of reading calls and running others is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

import calls
import messages
import pytest
from engine_bench import BESIDE, Bench, HeldDevice, torch_threads
from rpcs import streams_of
from stream_context import StreamContext

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.access.callers import Caller, anybody
from attnserve_server.requests.work import Work
from attnserve_server.rpc import reading_turns, stream
from attnserve_server.rpc.reading_turns import ReadingTurn
from attnserve_server.rpc.stream import CallStream

__all__ = ["torch_threads"]

pytestmark = pytest.mark.usefixtures("torch_threads")

CALLS = 50
LONG_S = 1000.0


class Reading:
    """Streams that serve one message of many calls each, and a record of what happens meanwhile."""

    def __init__(self, then: Callable[[int], object] = bool, callers: Sequence[str] = ("here",)) -> None:
        """`then` gets the number of each call that has been read. There is a stream for each caller."""
        self.bench = Bench(HeldDevice(BESIDE))
        self.events: list[str] = []
        self.then = then
        request = messages.random_attend(0)
        many = [calls.call(number, request) for number in range(CALLS)]
        message = pb.AttendStreamRequest(calls=many).SerializeToString()
        self.calls = CALLS * len(callers)
        self.contexts: list[Any] = [StreamContext([message], CALLS) for _ in callers]
        self.context = self.contexts[0]
        streams = streams_of(
            self.bench.engine,
            self.bench.metrics,
            {"attend": self._read},
            max_message_calls=CALLS,
            max_unanswered=10 * CALLS,
        )
        self.streams = [
            CallStream(streams, anybody(caller), context)
            for caller, context in zip(callers, self.contexts, strict=True)
        ]
        self.stream = self.streams[0]

    def _read(self, caller: Caller, buffer: bytes, at: int, end: int) -> Work:
        self.then(self.events.count("call"))
        self.events.append("call")
        return messages.read_request(buffer, at, end)

    async def other(self) -> None:
        """Somebody else with something to do in every turn of the loop."""
        while self.events.count("call") < self.calls:
            self.events.append("other")
            await asyncio.sleep(0)


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one call is read per turn, and the loop turns once before the next. What has been read runs at once."""
    monkeypatch.setattr(stream, "READ_AHEAD_SECONDS", 0.0)
    monkeypatch.setattr(reading_turns, "SLICE_SECONDS", 1e-9)
    monkeypatch.setattr(reading_turns, "TURNS", 0)


async def test_others_have_their_turns_between_calls(no_patience: None) -> None:
    reading = Reading()
    serving = asyncio.create_task(reading.stream.serve())
    await asyncio.create_task(reading.other())
    assert reading.events.count("call") == CALLS
    assert ("call", "call") not in pairwise(reading.events)
    async with asyncio.timeout(calls.PATIENCE_S):
        await reading.context.answered.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert await reading.bench.engine.drain(0)


@pytest.mark.parametrize("callers", [["one"] * 3, ["one", "another"], ["one", "another"] * 3])
async def test_all_streams_together_read_as_much_as_one(no_patience: None, callers: Sequence[str]) -> None:
    """So others wait for many streams, of one caller or of several, no longer than for a single stream."""
    reading = Reading(callers=callers)
    serving = [asyncio.create_task(each.serve()) for each in reading.streams]
    await asyncio.create_task(reading.other())
    in_turns = "".join("c" if event == "call" else " " for event in reading.events).split()
    assert max(map(len, in_turns)) == 1
    async with asyncio.timeout(calls.PATIENCE_S):
        for context in reading.contexts:
            await context.answered.wait()
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)
    assert await reading.bench.engine.drain(0)


@pytest.mark.parametrize(("ahead_s", "runs"), [(0.0, True), (calls.PATIENCE_S, False)])
async def test_calls_run_before_the_rest_is_read_if_that_takes_long(
    no_patience: None, ahead_s: float, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the device, and calls with a deadline, would wait for the last of the message; or run in small batches."""
    monkeypatch.setattr(stream, "READ_AHEAD_SECONDS", ahead_s)
    busy: list[bool] = []
    reading = Reading(lambda number: busy.append(bool(reading.bench.engine.worker.runs)))
    reading.bench.device.may_run.clear()
    serving = asyncio.create_task(reading.stream.serve())
    await asyncio.create_task(reading.other())
    reading.bench.device.may_run.set()
    assert busy == [False] + [runs] * (CALLS - 1)
    async with asyncio.timeout(calls.PATIENCE_S):
        await reading.context.answered.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


async def test_few_calls_are_read_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_turns, "SLICE_SECONDS", calls.PATIENCE_S)
    reading = Reading()
    serving = asyncio.create_task(reading.stream.serve())
    await asyncio.create_task(reading.other())
    first = reading.events.index("call")
    assert reading.events[first:] == ["call"] * CALLS
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


async def test_a_stream_that_is_ended_meanwhile_answers_the_whole_message(no_patience: None) -> None:
    """As when the server drains: no caller whose call was received is left without an answer."""
    reading = Reading(lambda number: reading.stream.end() if number == 3 else None)
    async with asyncio.timeout(calls.PATIENCE_S):
        await reading.stream.serve()
    assert sorted(reading.context.replies) == list(range(CALLS))
    assert await reading.bench.engine.drain(0)


async def test_a_stream_that_is_ended_before_it_reads_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the server drains while a stream begins: it would stay, and be cut off in the end."""
    reading = Reading()

    async def end(_: object) -> None:
        reading.stream.end()

    monkeypatch.setattr(reading.context, "send_initial_metadata", end)
    async with asyncio.timeout(calls.PATIENCE_S):
        await reading.stream.serve()
    assert not reading.events


async def test_who_leaves_meanwhile_has_no_more_of_the_message_read(no_patience: None) -> None:
    reading = Reading(lambda number: serving.cancel() if number == 3 else None)
    serving = asyncio.create_task(reading.stream.serve())
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert len(reading.events) == 4
    assert await reading.bench.engine.drain(calls.PATIENCE_S)
    assert reading.bench.admission.requests == 0


async def test_who_leaves_while_it_pauses_is_not_taken_to_have_read_all_the_time(
    no_patience: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its caller's other streams would wait for as long."""
    paused, waited, pause = asyncio.Event(), 0.0, ReadingTurn.pause

    async def pause_for_long(turn: ReadingTurn, seconds: float) -> None:
        nonlocal waited
        waited += LONG_S
        paused.set()
        await pause(turn, seconds)

    monkeypatch.setattr(ReadingTurn, "pause", pause_for_long)
    monkeypatch.setattr(stream, "perf_counter", lambda: perf_counter() + waited)
    reading = Reading()
    serving = asyncio.create_task(reading.stream.serve())
    await paused.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert reading.stream._reading_turn.until < LONG_S
    assert await reading.bench.engine.drain(calls.PATIENCE_S)


async def test_what_fails_in_a_turn_is_one_calls_error(no_patience: None) -> None:
    def fail(number: int) -> None:
        if number == 3:
            raise OSError("a bug")

    reading = Reading(fail)
    serving = asyncio.create_task(reading.stream.serve())
    async with asyncio.timeout(calls.PATIENCE_S):
        await reading.context.answered.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
