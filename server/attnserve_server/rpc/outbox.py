"""The replies of one stream on their way to its caller.

In: replies, as they become ready. Out: messages, one at a time. Each holds the replies that became ready while the one
before was being written, up to a size that every client accepts. No reply waits for others to join it. On the event
loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, NamedTuple

from grpc import aio

from attnserve import _fields
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.errors import Cancelled, RepliesUnread
from attnserve_server.observability.metrics import Metrics
from attnserve_server.rpc.eager import EagerCoroutine
from attnserve_server.rpc.unread import UnreadReplies
from attnserve_server.scheduling.engine import Engine
from attnserve_server.scheduling.entry import Held

MAX_JOINED_BYTES: Final = 1 << 20
"""Replies are put into one message up to this size, which is below gRPC's default bound of 4 MiB."""


class Unsent(NamedTuple):
    """A reply that is ready, or several, and what admission counts until it has been sent."""

    pieces: list[_fields.Buffer]
    size: int
    held: Held | None
    replies: int = 1


_PLEASE_CLOSE: Final = pb.AttendStreamResponse(closing=True).SerializeToString()
CLOSING: Final = Unsent([_PLEASE_CLOSE], len(_PLEASE_CLOSE), None, replies=0)
"""Asks a caller to close a stream: a message by itself, or part of one with replies."""


class Outbox:
    """The replies that are ready, and how they are written."""

    def __init__(
        self,
        context: aio.ServicerContext[bytes, bytes],
        engine: Engine,
        metrics: Metrics,
        unread: UnreadReplies,
    ) -> None:
        self._context = context
        self._engine = engine
        self._metrics = metrics
        self._unread = unread
        self._peer = context.peer()
        self._late = False
        """Whether the caller does not read its replies (`RepliesUnread`)."""
        self._unsent: deque[Unsent] = deque()
        self._writing: EagerCoroutine | None = None
        self._write_due: asyncio.Handle | None = None
        self._holds = False
        self._closed = False
        self.replies = 0
        """How many replies are ready and not being written yet."""
        self.bytes = 0
        """The bytes of replies that have not been sent."""
        self.progress = asyncio.Event()
        """Set whenever something has been sent."""
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception if writing fails: Cancelled if the caller has left, RepliesUnread if it does not read."""
        self.kept: list[Held] = []
        """What admission counts for a message that is late, once the outbox is closed: gRPC still has it in memory.
        Whoever closes the outbox releases this when gRPC lets go.
        """

    def put(self, unsent: Unsent) -> None:
        """Takes a reply, to be written soon."""
        self._unsent.append(unsent)
        self.bytes += unsent.size
        self.replies += unsent.replies
        if not self._holds:
            self._write_soon()

    def hold(self) -> None:
        """Holds back what comes from now on until `write` is called: there may be more."""
        self._holds = True

    def write(self) -> None:
        """Starts writing what is ready; if something is being written already, that comes first."""
        self._holds = False
        if self._write_due is not None:
            self._write_due.cancel()
            self._write_due = None
        if self._writing is None and self._unsent and not self._closed:
            writing = EagerCoroutine(self._write(), self._written)
            if not writing.has_ended:
                self._writing = writing

    def ask_to_close(self) -> None:
        """Asks the caller to close the stream, ahead of all replies: there might always be another one."""
        self._unsent.appendleft(CLOSING)
        self.bytes += CLOSING.size
        self._write_soon()

    def close(self) -> None:
        """Writes no more, and releases all that is unsent, except what is `kept`."""
        self._closed = True
        self._engine.release(*[unsent.held for unsent in self._unsent if unsent.held is not None])
        self._unsent.clear()
        if self._writing is not None:
            self._writing.close()
        self.broken.cancel()

    def _write_soon(self) -> None:
        """Schedules writing for the loop's next turn, together with what becomes ready in this one."""
        if self._writing is None and self._write_due is None:
            self._write_due = asyncio.get_running_loop().call_soon(self.write)

    async def _write(self) -> None:
        """Writes until nothing is ready. Raises Cancelled if the caller leaves meanwhile."""
        try:
            while self._unsent:
                unsent, size = self._next()
                sending = self._unread.begin(self._peer, size, self._is_late)
                # Counted before it is sent: a caller that has what it wanted may leave before gRPC says that it is.
                self._metrics.sent(size)
                held = [each.held for each in unsent if each.held is not None]
                try:
                    await self._context.write(_joined(unsent))
                finally:
                    self.bytes -= size
                    if self._late:
                        self.kept += held
                    else:
                        self._engine.release(*held)
                    self._unread.end(sending)
                    self.progress.set()
        except aio.InternalError:
            raise Cancelled from None

    def _is_late(self, error: RepliesUnread) -> None:
        if not self.broken.done():
            self._late = True
            self.broken.set_exception(error)

    def _written(self, writing: EagerCoroutine) -> None:
        self._writing = None
        if writing.error is not None and not self.broken.done():
            self.broken.set_exception(writing.error)

    def _next(self) -> tuple[list[Unsent], int]:
        """Takes what is ready, as much as one message may hold; returns that and its length."""
        unsent = [self._unsent.popleft()]
        size = unsent[0].size
        while self._unsent and size + self._unsent[0].size <= MAX_JOINED_BYTES:
            unsent.append(self._unsent.popleft())
            size += unsent[-1].size
        self.replies -= sum([each.replies for each in unsent])
        return unsent, size


def _joined(unsent: list[Unsent]) -> bytes:
    """One message of several replies. It lets go of their pieces: while the message is being sent, only itself and
    gRPC's copy of it are in memory.
    """
    message = b"".join([piece for each in unsent for piece in each.pieces])
    unsent.clear()
    return message
