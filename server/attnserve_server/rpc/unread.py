"""Replies that their callers do not take: how long one may be on its way, and what becomes of it then.

In: replies, when gRPC begins to send them and when it has. Out: `Sending.late` is called for a reply that takes too
long; if it is that of a unary call, its connection is closed. gRPC sends no more of a reply than its caller allows
(HTTP/2 flow control). It keeps the rest in memory until the caller has taken it or the connection ends: nothing else
makes it let go of a message that is being sent.

A reply may take the configured time and, beyond that, as long as the slowest links need: a second for each MiB of it.
The replies on a connection take turns. So if it is more, a reply may take a second for each 8 MiB of all that is being
sent on its connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Final, TypeAlias

from grpc import aio

from attnserve_server.access.callers import Callers
from attnserve_server.errors import RepliesUnread, RequestError
from attnserve_server.host.allocator import UnusedMemory
from attnserve_server.host.connections import disconnect
from attnserve_server.observability.refusals import request_id_of
from attnserve_server.rpc.endings import Endings

Handle: TypeAlias = Callable[[Any, aio.ServicerContext[bytes, bytes]], Awaitable[bytes]]
"""What answers a unary RPC: given its messages, of which gRPC has received none yet, and its context."""

logger = logging.getLogger(__name__)

REPLY_BYTES_PER_SECOND: Final = 1 << 20
"""How fast a reply must be taken at least, once it is late."""
CONNECTION_BYTES_PER_SECOND: Final = 8 << 20
"""How fast the replies on a connection must be taken, all together: where there are many, each takes longer."""
FAREWELL_S: Final = 5.0
"""How long it may take to tell a caller why its stream has ended. That is sent after the reply that is late, so it
reaches callers that read slowly. The connection of one that does not read at all is closed."""
LOOKS: Final = 8
"""How often within the configured time replies are looked at, at most."""
LARGE_BYTES: Final = 1 << 20
"""The size from which on a reply's memory is worth giving back."""


@dataclass(slots=True, eq=False)
class Sending:
    """A reply that is being sent."""

    peer: str
    """The connection, as gRPC names its other end."""
    size: int
    begin: float
    """Seconds of the loop's clock."""
    late: Callable[[RepliesUnread], object]
    """Called once if it takes too long."""
    call: asyncio.Task[Any] | None
    """The handler's task of a unary call; None on a stream."""


class UnreadReplies:
    """All replies that are being sent, and how long they may take, in seconds; infinity is no bound."""

    def __init__(
        self, max_time: float, callers: Callers, endings: Endings, unused_memory: UnusedMemory | None = None
    ) -> None:
        """`unused_memory` is told of large replies; None if nobody is."""
        self._max_time = max_time
        self._callers = callers
        self._endings = endings
        self._unused_memory = unused_memory
        self._loop = asyncio.get_running_loop()
        self._sending: dict[Sending, None] = {}
        self._next_look: asyncio.TimerHandle | None = None
        self._leaving: dict[asyncio.Task[Any], str] = {}
        """The tasks of RPCs that are to end, by themselves or with their connection, and those connections."""

    def begin(
        self,
        peer: str,
        size: int,
        late: Callable[[RepliesUnread], object],
        call: asyncio.Task[Any] | None = None,
    ) -> Sending:
        """A reply of `size` bytes begins to be sent; the arguments are those of `Sending`."""
        sending = Sending(peer, size, self._loop.time(), late, call)
        self._sending[sending] = None
        if self._next_look is None and self._max_time < inf:
            self._next_look = self._loop.call_later(self._max_time, self._look)
        return sending

    def end(self, sending: Sending) -> None:
        """A reply has been sent, or never will be."""
        self._sending.pop(sending, None)
        if sending.size >= LARGE_BYTES and self._unused_memory is not None:
            self._unused_memory.let_go()

    def watched(self, operation: str, handle: Handle) -> Handle:
        """What answers a unary RPC as `handle` does, with its reply looked after while it is being sent."""

        async def watched(messages: object, context: aio.ServicerContext[bytes, bytes]) -> bytes:
            reply = await handle(messages, context)
            task = asyncio.current_task()
            assert task is not None
            sending = self.begin(context.peer(), len(reply), partial(self._end_call, operation, context), task)
            task.add_done_callback(lambda _: self.end(sending))  # when gRPC has sent it
            return reply

        return watched

    def bid_farewell(self, peer: str) -> None:
        """Makes sure that the RPC whose handler calls this ends in time. It ends with an error, which is sent after the
        reply that is late. If that takes too long, its connection is closed.
        """
        task = asyncio.current_task()
        assert task is not None
        self._leaving[task] = peer

        def cut_off() -> None:
            if task in self._leaving:  # else the RPC is over, or its connection closed
                self._cut_off(peer)

        timer = self._loop.call_later(FAREWELL_S, cut_off)

        def left(task: asyncio.Task[Any]) -> None:
            timer.cancel()
            self._leaving.pop(task, None)

        task.add_done_callback(left)

    def _look(self) -> None:
        """Ends what is late, and looks again when something else may be."""
        now = self._loop.time()
        of_connections: Counter[str] = Counter()
        for sending in self._sending:
            of_connections[sending.peer] += sending.size
        late: list[Sending] = []
        next_due = inf
        for sending in self._sending:
            due = sending.begin + self._max_time
            if due <= now:
                own, all_there = sending.size, of_connections[sending.peer]
                due += max(own / REPLY_BYTES_PER_SECOND, all_there / CONNECTION_BYTES_PER_SECOND)
                if due <= now:
                    late.append(sending)
                    continue
            next_due = min(next_due, due)
        for sending in late:
            sending.late(RepliesUnread(sending.size, now - sending.begin))
        for peer in dict.fromkeys([sending.peer for sending in late if sending.call is not None]):
            self._cut_off(peer)
        for sending in late:
            self._sending.pop(sending, None)
        soonest = now + self._max_time / LOOKS
        self._next_look = self._loop.call_at(max(next_due, soonest), self._look) if self._sending else None

    def _end_call(self, operation: str, context: aio.ServicerContext[bytes, bytes], error: RepliesUnread) -> None:
        """Counts and logs a unary call that is late. Its caller is told nothing: its status is part of the reply."""
        caller = None
        with suppress(RequestError):  # its token may have been revoked since
            caller = self._callers.identify(context)
        self._endings.refused(operation, error, caller, lambda: request_id_of(context))

    def _cut_off(self, peer: str) -> None:
        """Closes a connection, and cancels the RPCs on it that have not ended yet: otherwise gRPC would log their end
        as an error.
        """
        if not disconnect(peer):
            logger.warning("a connection whose caller does not read cannot be closed: %s", peer)
            return
        for task in [task for task, its_peer in self._leaving.items() if its_peer == peer]:
            del self._leaving[task]
            task.cancel()
        for sending in self._sending:
            if sending.peer == peer and sending.call is not None:
                sending.call.cancel()
