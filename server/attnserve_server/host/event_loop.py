"""The event loop of a server, which measures how much of its time it is busy.

In: nothing. Out: a loop for `asyncio.Runner`. All requests are decoded and encoded on it, and small ones computed: once
it is busy all of the time, further requests wait in their connections, where no queue sees them. Where connections
cannot be accepted, because there are no file descriptors left, it says so in a line.

gRPC's thread tells the loop of each event by a byte in a socket. The callback that gRPC adds for that socket handles
all events there are, but reads one byte. When some 280 have not been read, gRPC's thread waits: then all connections,
whoever they belong to, get on by an event for each turn of the loop. While it turns quickly that is as it should
be: what the server is not ready for stays with those who sent it, and who sends little does not wait behind it. But
where turns are long, everybody waits for many of them, for seconds. So of what a turn has left, a byte is read for each
`SECONDS_OF_AN_EVENT` that it took, before the callback is called.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import selectors
import socket
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, TypeVarTuple

if TYPE_CHECKING:
    from _typeshed import HasFileno

_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
ACCEPTS_AGAIN_S: Final = 1.0
"""After how long asyncio tries to accept connections again."""

SECONDS_OF_AN_EVENT: Final = 0.001
"""The longest time that an event of gRPC's takes, whatever the loop does between any two."""
MOST_BYTES: Final = 4096
"""More than there is room for in gRPC's socket: each takes as much as a whole packet."""

Ts = TypeVarTuple("Ts")

logger = logging.getLogger(__name__)


class EventLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop for sockets, with a clock."""

    def __init__(self) -> None:
        self._waits = _Selector()
        super().__init__(self._waits)
        self._made = perf_counter()
        self._exhausted = float("-inf")

    @property
    def busy_seconds(self) -> float:
        """The time since the loop was made in which it did not wait for events. Read on the loop."""
        return perf_counter() - self._made - self._waits.seconds

    def add_reader(self, fd: int | HasFileno, callback: Callable[[*Ts], Any], *args: *Ts) -> None:
        """Has a callback called when there is something to read. If it is a socket, that is gRPC's: see above."""
        if isinstance(fd, socket.socket):
            super().add_reader(fd, _Events(fd).call, callback, *args)
        else:
            super().add_reader(fd, callback, *args)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Logs what went wrong where nobody could be told. For each connection that waits to be accepted when there are
        no descriptors left, asyncio comes here with a traceback: of those, one a second is said, in a line.
        """
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _EXHAUSTED and "accept" in context.get("message", "")):
            super().call_exception_handler(context)
        elif (now := perf_counter()) - self._exhausted >= ACCEPTS_AGAIN_S:
            self._exhausted = now
            logger.error("no connection can be accepted: %s", error.strerror)


class _Events:
    """The socket by which gRPC tells of events."""

    def __init__(self, bytes_of_events: socket.socket) -> None:
        self._bytes = bytes_of_events
        self._called = perf_counter()

    def call(self, callback: Callable[[*Ts], Any], *args: *Ts) -> None:
        """Calls a callback that reads one byte, after having read those that may be read besides. What a byte tells of
        is there before the byte is, so that the callback handles all that these did.
        """
        now = perf_counter()
        more = int((now - self._called) / SECONDS_OF_AN_EVENT)
        self._called = now
        if more:
            written = len(self._bytes.recv(min(more + 1, MOST_BYTES), socket.MSG_PEEK))
            if written > 1:
                self._bytes.recv(written - 1)
        callback(*args)


class _Selector(selectors.DefaultSelector):
    """Waits for sockets, and adds up for how long, at a cost of 0.3 us each time that the loop turns."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        begin = perf_counter()
        ready = super().select(timeout)
        self.seconds += perf_counter() - begin
        return ready
