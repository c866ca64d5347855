"""Turns at reading messages: how much a caller reads before the loop turns, and in which order its streams do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import ref

import pytest

from attnserve_server.rpc.reading_turns import CALLED, MAX_TURN_SECONDS, ReadingTurn, ReadingTurns

LONG, SHORT = 1.1 * MAX_TURN_SECONDS, 0.4 * MAX_TURN_SECONDS
PATIENCE_S = 30.0


class Share:
    """What a caller is known by."""


class Streams:
    """Streams of one caller, and what they have read: "/" where the loop has turned."""

    def __init__(self) -> None:
        self.turn = ReadingTurn()
        self.read = ""

    async def message(self, name: str, seconds: float) -> None:
        """A stream reads a message, which takes so long."""
        if not self.turn.is_free:
            await self.turn.wait()
        self.turn.begin()
        self.read += name
        self.turn.end(0.0, seconds)

    @asynccontextmanager
    async def turning(self) -> AsyncIterator[None]:
        """Takes note of the loop's turns."""

        def note() -> None:
            nonlocal next_turn
            self.read += "/"
            next_turn = loop.call_soon(note)

        loop = asyncio.get_running_loop()
        next_turn = loop.call_soon(note)
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield
        finally:
            next_turn.cancel()

    async def all(self, **seconds: float) -> list[str]:
        """What was read in each turn of the loop, if such messages come at once."""
        async with self.turning():
            await asyncio.gather(*(self.message(name, each) for name, each in seconds.items()))
        return [turn for turn in self.read.split("/") if turn]


async def test_what_takes_little_is_read_at_once() -> None:
    assert await Streams().all(a=SHORT, b=SHORT) == ["ab"]


async def test_what_takes_long_has_the_loop_turn_before_more_is_read() -> None:
    assert await Streams().all(a=LONG, b=LONG, c=LONG, d=SHORT, e=LONG, f=SHORT) == ["a", "b", "c", "de", "f"]


async def test_little_things_add_up_until_the_loop_turns() -> None:
    assert await Streams().all(a=SHORT, b=SHORT, c=SHORT, d=SHORT, e=SHORT, f=SHORT, g=SHORT) == ["abc", "def", "g"]


async def test_the_order_is_that_of_arrival_however_many_wait() -> None:
    names = [chr(ord("A") + number) for number in range(3 * CALLED)]
    turns = await Streams().all(**{name: LONG if number % 5 else SHORT for number, name in enumerate(names)})
    assert "".join(turns) == "".join(names)


async def test_many_that_take_nothing_are_called_some_at_a_time() -> None:
    names = [chr(ord("A") + number) for number in range(2 * CALLED + 1)]
    turns = await Streams().all(**dict.fromkeys(names, 0.0) | {names[0]: LONG})
    assert [len(turn) for turn in turns] == [1, CALLED, CALLED]


async def test_nobody_reads_while_a_message_is_being_read() -> None:
    """Such as one of many calls, for which the loop turns in between."""
    streams = Streams()
    streams.turn.begin()
    waiting = asyncio.create_task(streams.message("a", SHORT))
    async with streams.turning():
        for _ in range(10):
            await asyncio.sleep(0)
    assert "a" not in streams.read
    streams.turn.end(0.0, SHORT)
    async with asyncio.timeout(PATIENCE_S):
        await waiting
    assert streams.turn.is_free


@pytest.mark.parametrize("at_once", [False, True])
async def test_one_that_leaves_the_line_holds_up_nobody(at_once: bool) -> None:
    """Before its turn, and when it has just been called."""
    streams = Streams()
    await streams.message("a", LONG)
    leaving, staying = (asyncio.create_task(streams.message(name, SHORT)) for name in "bc")
    await asyncio.sleep(0)
    if at_once:
        await asyncio.sleep(0)
    leaving.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await staying
    assert streams.read in ("ac", "abc")
    assert streams.turn.is_free


async def test_those_that_leave_when_they_have_been_called_have_the_next_called() -> None:
    streams = Streams()
    streams.turn.begin()
    *leaving, staying = (asyncio.create_task(streams.message(name, SHORT)) for name in CALLED * "b" + "c")
    await asyncio.sleep(0)
    streams.turn.end(0.0, LONG)
    await asyncio.sleep(0)  # all but the last have been called
    for each in leaving:
        each.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await staying
    assert (streams.read, streams.turn.is_free) == ("c", True)


async def test_each_caller_has_its_own_turns_for_as_long_as_it_has_streams() -> None:
    turns, one, another = ReadingTurns(), Share(), Share()
    turn = turns.of(one)
    assert turns.of(one) is turn is not turns.of(another)
    kept = [ref(one), ref(another), ref(turn)]
    del one, another
    assert [each() is None for each in kept] == [False, True, False]
    del turn
    assert [each() is None for each in kept] == [True] * 3
