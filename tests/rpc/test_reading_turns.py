"""Turns at reading messages: how much is read before the loop turns, how often it does, and who is next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from weakref import ref

import pytest

from attnserve_server.host.loop_slices import LONGEST_SECONDS, SLICE_SECONDS
from attnserve_server.rpc import reading_turns
from attnserve_server.rpc.reading_turns import CALLED, TURNS, ReadingTurn, ReadingTurns

LONG, SHORT = 1.1 * SLICE_SECONDS, 0.4 * SLICE_SECONDS
PATIENCE_S = 30.0
PLENTY = 20
"""More turns than the loop has before more is read."""


class Share:
    """What a caller is known by."""


class Streams:
    """Streams of one caller, or of several, and what they have read: "/" where the loop has turned."""

    def __init__(self) -> None:
        self.turns = ReadingTurns()
        self.turn = ReadingTurn(self.turns)
        self.read = ""

    async def message(self, name: str, seconds: float, turn: ReadingTurn | None = None) -> None:
        """A stream, of another caller if `turn` is its own, reads a message, which takes so long."""
        turn = turn or self.turn
        if not turn.is_free:
            await turn.wait()
        turn.begin()
        self.read += name
        turn.end(seconds)

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


@pytest.fixture
def often() -> None:
    """The loop turns as often before more is read as it does in a server."""


@pytest.fixture(autouse=True)
def _once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop turns once before more is read, unless a test is about that."""
    if "often" not in request.fixturenames:
        monkeypatch.setattr(reading_turns, "TURNS", 1)


async def test_what_takes_little_is_read_at_once() -> None:
    assert await Streams().all(a=SHORT, b=SHORT) == ["ab"]


async def test_what_takes_long_has_the_loop_turn_before_more_is_read() -> None:
    assert await Streams().all(a=LONG, b=LONG, c=LONG, d=SHORT, e=LONG, f=SHORT) == ["a", "b", "c", "de", "f"]


async def test_little_things_add_up_until_the_loop_turns() -> None:
    assert await Streams().all(a=SHORT, b=SHORT, c=SHORT, d=SHORT, e=SHORT, f=SHORT, g=SHORT) == ["abc", "def", "g"]


async def test_little_things_in_different_turns_do_not_add_up() -> None:
    """Nobody waits while the loop turns anyway."""
    streams = Streams()
    for _ in range(20):
        await streams.message("a", SHORT)
        await asyncio.sleep(0)
        assert streams.turn.is_free


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
    streams.turn.end(SHORT)
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
    streams.turn.end(LONG)
    await asyncio.sleep(0)  # all but the last have been called
    for each in leaving:
        each.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await staying
    assert (streams.read, streams.turn.is_free) == ("c", True)


@pytest.mark.parametrize("slices", [1, 7])
async def test_the_loop_turns_often_before_more_is_read(often: None, slices: int) -> None:
    """Whoever reads: others need several turns for one call, and more after a message that took long."""
    streams = Streams()
    other = ReadingTurn(streams.turns)
    async with streams.turning():
        reads = (("a", None), ("b", other), ("c", None), ("d", other))
        await asyncio.gather(*(streams.message(name, slices * LONG, turn) for name, turn in reads))
    turns = streams.read.split("/")
    read = [number for number, turn in enumerate(turns) if turn]
    assert sorted(turns[number] for number in read) == ["a", "b", "c", "d"]
    between = [later - sooner for sooner, later in pairwise(read)]
    assert slices * TURNS <= min(between) <= max(between) <= slices * (TURNS + 1)


async def test_a_message_that_takes_long_has_the_loop_turn_often(often: None) -> None:
    streams = Streams()
    streams.turn.begin()
    async with streams.turning():
        assert not streams.turn.is_over(SHORT)
        assert streams.turn.is_over(LONG)
        before = streams.read.count("/")
        await streams.turn.pause(LONG)
        assert streams.read.count("/") - before >= TURNS
    assert not streams.turn.is_free
    streams.turn.end(SHORT)
    assert streams.turn.is_free


async def test_a_process_that_was_suspended_meanwhile_is_not_held_up_for_long(often: None) -> None:
    """Nor is the caller whose message was being read then."""
    streams = Streams()
    other = ReadingTurn(streams.turns)
    async with streams.turning():
        await streams.message("a", 3600.0)
        others = (streams.message("o", LONGEST_SECONDS / 3, other) for _ in range(9))
        await asyncio.gather(streams.message("b", SHORT), *others)
    first, *_ = streams.read.removeprefix("a").split("o")
    assert len(first) <= TURNS * LONGEST_SECONDS / SLICE_SECONDS + 1
    assert 3 <= streams.read.replace("/", "").removeprefix("a").index("b") <= 4


async def test_callers_together_read_no_more_in_a_turn_than_one() -> None:
    """However many there are, the loop does not keep others waiting for longer."""
    streams = Streams()
    callers = [ReadingTurn(streams.turns) for _ in range(5)]
    async with streams.turning():
        await asyncio.gather(*(streams.message(str(n), SHORT, caller) for n, caller in enumerate(callers)))
    assert [turn for turn in streams.read.split("/") if turn] == ["012", "34"]


async def test_who_has_read_least_is_next() -> None:
    """A caller with many streams has no more turns than one with a single stream; a new one is ahead of both."""
    streams = Streams()
    many, single, new = (ReadingTurn(streams.turns) for _ in range(3))

    async def one_after_the_other(name: str, turn: ReadingTurn) -> None:
        for _ in range(4):
            await streams.message(name, LONG, turn)

    async def comes_later() -> None:
        await streams.message("s", LONG, single)
        await streams.message("n", LONG, new)

    async with streams.turning():
        await asyncio.gather(
            *(one_after_the_other("m", many) for _ in range(3)), one_after_the_other("s", single), comes_later()
        )
    assert streams.read.replace("/", "") == "msms" + "n" + "msmsms" + 7 * "m"


async def test_who_comes_later_has_no_more_turns_than_who_was_there() -> None:
    """Else it would read, for as long as the other has read before, without the other's having a turn."""
    streams = Streams()
    first, later = ReadingTurn(streams.turns), ReadingTurn(streams.turns)
    async with streams.turning():
        for _ in range(5):
            await streams.message("f", LONG, first)
        reads = (*[("f", first)] * 4, *[("l", later)] * 4)
        await asyncio.gather(*(streams.message(name, LONG, turn) for name, turn in reads))
    assert streams.read.replace("/", "")[5:] in ("lflflflf", "flflflfl", "lfflflfl")


async def test_who_has_read_more_does_not_read_before_those_in_line(often: None) -> None:
    """Its message comes when they have been called."""
    streams = Streams()
    much, little = ReadingTurn(streams.turns), ReadingTurn(streams.turns)
    async with streams.turning():
        for name, turn in (("l", little), ("m", much)):
            await streams.message(name, LONG, turn)
        await streams.message("m", LONG, much)
        lined = [asyncio.create_task(streams.message("l", SHORT / 9, little)) for _ in range(5)]
        for _ in range(PLENTY):
            await asyncio.sleep(0)
            if streams.turns.are_open:
                break
        assert not much.is_free
        await streams.message("m", LONG, much)
        await asyncio.gather(*lined)
    assert streams.read.replace("/", "") == "lmmlllllm"


async def test_each_caller_in_line_has_its_places_among_those_called(often: None) -> None:
    """However many streams of one are in line."""
    streams = Streams()
    many, single = ReadingTurn(streams.turns), ReadingTurn(streams.turns)
    async with streams.turning():
        await streams.message("a", LONG)
        reads = [*[("m", many)] * (2 * CALLED), ("s", single)]
        await asyncio.gather(*(streams.message(name, 0.0, turn) for name, turn in reads))
    first, *_ = [turn for turn in streams.read.split("/")[1:] if turn]
    assert first == CALLED // 2 * "m" + "s"


async def test_who_pauses_is_ahead_of_the_callers_other_streams() -> None:
    streams = Streams()
    streams.turn.begin()
    waiting = asyncio.create_task(streams.message("b", LONG))
    await asyncio.sleep(0)
    async with streams.turning():
        await streams.turn.pause(LONG)
        for _ in range(3):
            await asyncio.sleep(0)
    assert "b" not in streams.read
    streams.turn.end(SHORT)
    async with asyncio.timeout(PATIENCE_S):
        await waiting


async def test_one_that_leaves_while_it_pauses_holds_up_nobody() -> None:
    streams = Streams()
    streams.turn.begin()
    leaving = asyncio.create_task(streams.turn.pause(LONG))
    staying = asyncio.create_task(streams.message("b", SHORT))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    streams.turn.end(SHORT)
    async with asyncio.timeout(PATIENCE_S):
        await staying
    assert streams.turn.is_free


@pytest.mark.parametrize("leaves", [False, True])
async def test_the_loop_is_left_alone_once_nobody_is_in_line(leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    turned = 0

    def turn(turns: ReadingTurns, turns_again: Callable[[ReadingTurns], None] = ReadingTurns._turned) -> None:
        nonlocal turned
        turned += 1
        turns_again(turns)

    monkeypatch.setattr(ReadingTurns, "_turned", turn)
    streams = Streams()
    first, second = (asyncio.create_task(streams.message(name, LONG)) for name in "ab")
    await first
    if leaves:
        second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    for _ in range(10):
        await asyncio.sleep(0)
    before = turned
    for _ in range(10):
        await asyncio.sleep(0)
    assert turned == before > 0
    assert streams.turn.is_free


async def test_each_caller_has_its_own_turns_for_as_long_as_it_has_streams() -> None:
    turns, one, another = ReadingTurns(), Share(), Share()
    turn = turns.of(one)
    assert turns.of(one) is turn is not turns.of(another)
    kept = [ref(one), ref(another), ref(turn)]
    del one, another
    assert [each() is None for each in kept] == [False, True, False]
    del turn
    assert [each() is None for each in kept] == [True] * 3
