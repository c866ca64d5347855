"""A stand-in for gRPC's context of a stream, for tests that look at a message's way from inside."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from attnserve.v1 import attention_pb2 as pb


class StreamContext:
    """That of a stream whose caller sends some messages, with so many calls in all, and never ends it."""

    def __init__(self, messages: Iterable[bytes], calls: int) -> None:
        self._messages = iter(messages)
        self._calls = calls
        self.read_all = asyncio.Event()
        """Set once the last message has been read, and another is waited for."""
        self.replies: list[int] = []
        """The ids of the calls that have replies, in the order of these."""
        self.answered = asyncio.Event()
        """Set once each call has a reply."""

    async def read(self) -> object:
        for message in self._messages:
            return message
        self.read_all.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def write(self, message: bytes) -> None:
        self.replies += [reply.id for reply in pb.AttendStreamResponse.FromString(message).replies]
        if len(self.replies) == self._calls:
            self.answered.set()

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "here"

    async def send_initial_metadata(self, _: object) -> None:
        pass
