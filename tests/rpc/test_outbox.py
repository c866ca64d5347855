"""Replies to a caller that takes one message at a time, when it likes: the order in which they are sent, and that
nothing is held for those that have been sent or never will be.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import pytest
from engine_bench import BESIDE, Bench, HeldDevice, torch_threads
from rpcs import unread_of

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.rpc.fast_path import Answered
from attnserve_server.rpc.outbox import MAX_JOINED_BYTES, Outbox, Unsent

__all__ = ["torch_threads"]  # a fixture

pytestmark = pytest.mark.usefixtures("torch_threads")

ME = "me"


class Unread:
    """Stands in for gRPC's context of a stream: a written message has been sent once the caller takes it."""

    def __init__(self) -> None:
        self.messages: list[pb.AttendStreamResponse] = []
        self._left: asyncio.Future[None] | None = None

    def peer(self) -> str:
        return ME

    async def write(self, message: bytes) -> None:
        self.messages.append(pb.AttendStreamResponse.FromString(message))
        self._left = asyncio.get_running_loop().create_future()
        await self._left

    async def take(self) -> None:
        """The caller takes the message being written, and everything that follows from that happens."""
        assert self._left is not None
        self._left.set_result(None)
        await asyncio.sleep(0)


class Sending:
    """An outbox whose replies are each too large to be joined with another."""

    def __init__(self) -> None:
        self.bench = Bench(HeldDevice(BESIDE))
        self.context: Any = Unread()
        self.outbox = Outbox(self.context, self.bench.engine, self.bench.metrics, unread_of(self.bench.metrics))

    def put(self, number: int) -> None:
        """Adds a reply to a request that the server still holds."""
        reply = pb.AttendStreamReply(id=number)
        reply.attend.output.data = bytes(MAX_JOINED_BYTES)
        message = pb.AttendStreamResponse(replies=[reply]).SerializeToString()
        answered = Answered(message, ME, requests=1, size=len(message), query_tokens=1, flops=1, device_seconds=0.0)
        self.bench.engine.computed_inline(ME, answered.size, 1, 0.0)
        self.outbox.put(Unsent([message], len(message), answered))

    @property
    def held(self) -> tuple[int, int]:
        """The requests and bytes that the server holds."""
        return self.bench.admission.requests, self.bench.admission.bytes

    @property
    def written(self) -> list[int | str]:
        """What has been written: reply ids, and where the caller was asked to close."""
        written: list[int | str] = []
        for message in self.context.messages:
            written += ["close"] * message.closing + [reply.id for reply in message.replies]
        return written


async def test_who_has_always_more_to_be_told_is_asked_to_leave_before_that() -> None:
    """Otherwise a slow reader would never be asked, and would be cut off with calls that nobody has read."""
    sending = Sending()
    for number in range(3):
        sending.put(number)
    sending.outbox.write()
    sending.outbox.ask_to_close()
    for number in range(3, 6):
        await sending.context.take()
        sending.put(number)
    assert sending.written == [0, "close", 1, 2]


async def test_a_request_to_leave_and_small_replies_are_one_message() -> None:
    sending = Sending()
    for number in range(2):
        message = pb.AttendStreamResponse(replies=[pb.AttendStreamReply(id=number)]).SerializeToString()
        sending.outbox.put(Unsent([message], len(message), None))
    sending.outbox.ask_to_close()
    sending.outbox.write()
    (message,) = sending.context.messages
    assert message.closing
    assert [reply.id for reply in message.replies] == [0, 1]
    assert sending.outbox.replies == 0
    await sending.context.take()
    assert sending.outbox.bytes == 0


async def test_while_a_message_is_sent_what_it_was_made_of_is_let_go() -> None:
    sending = Sending()
    piece = memoryview(pb.AttendStreamResponse(replies=[pb.AttendStreamReply(id=1)]).SerializeToString())
    let_go = weakref.ref(piece)
    sending.outbox.put(Unsent([piece], len(piece), None))
    del piece
    sending.outbox.write()
    assert sending.written == [1]
    assert let_go() is None
    await sending.context.take()
    assert sending.outbox.bytes == 0


@pytest.mark.parametrize("taken", range(5))
async def test_whenever_the_caller_leaves_nothing_is_held_for_it(taken: int) -> None:
    sending = Sending()
    for number in range(3):
        sending.put(number)
    sending.outbox.write()
    sending.outbox.ask_to_close()
    for _ in range(taken):
        await sending.context.take()
    assert sending.written == [0, "close", 1, 2][: taken + 1]
    assert sending.held[0] == [3, 2, 2, 1, 0][taken]
    sending.outbox.close()
    assert sending.held == (0, 0)
    await asyncio.sleep(0)
    assert sending.written == [0, "close", 1, 2][: taken + 1], "nothing is written to who has left"


async def test_what_has_been_sent_is_looked_after_no_longer() -> None:
    sending = Sending()
    sending.put(0)
    sending.outbox.write()
    assert len(sending.outbox._unread._sending) == 1
    await sending.context.take()
    assert not sending.outbox._unread._sending
