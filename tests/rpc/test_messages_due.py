"""Unary calls whose messages have not come: those that may take long make room for others as they end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from stream_context import StreamContext

from attnserve_server.errors import InvalidRequest, Overloaded
from attnserve_server.no_room import too_many_unsent
from attnserve_server.rpc import messages_due
from attnserve_server.rpc.messages_due import MessagesDue
from attnserve_server.rpc.open_rpcs import OpenRpcs


def waiting(due: MessagesDue, *messages: bytes) -> asyncio.Task[bytes]:
    """A call that waits for its message, of one caller."""
    context: Any = StreamContext(messages, 0)
    return asyncio.create_task(due.message(context, "a"))


async def test_one_that_may_take_long_and_ends_leaves_that_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """However it ends."""
    monkeypatch.setattr(messages_due, "CROWDED_S", 0.01)
    due = MessagesDue(10, 10, None, OpenRpcs(1, 1, too_many_unsent))
    assert await waiting(due, b"the message") == b"the message"
    for _ in range(3):
        patient, *others = (waiting(due) for _ in range(3))
        assert [type(each) for each in await asyncio.gather(*others, return_exceptions=True)] == [Overloaded] * 2
        assert not patient.done()
        patient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await patient


async def test_whoever_no_longer_waits_makes_room() -> None:
    due = MessagesDue(2, 10, 0.01)
    for _ in range(2):
        assert await waiting(due, b"the message") == b"the message"
        first, second, third = (waiting(due) for _ in range(3))
        with pytest.raises(Overloaded, match=r"the caller has as many calls whose messages have not come .*: 2"):
            await third
        for late in (first, second):
            with pytest.raises(InvalidRequest, match=r"a message within 0\.01 s"):
                await late
