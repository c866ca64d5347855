"""The event loop of a server, which measures how much of its time it is busy.

In: nothing. Out: a loop for `asyncio.Runner`. All requests are decoded and encoded on it, and small ones computed: once
it is busy all of the time, further requests wait in their connections, where no queue sees them. Where connections
cannot be accepted, because there are no file descriptors left, it says so in a line.

gRPC's thread tells the loop of each event by a byte in a socket. The callback that gRPC adds for that socket handles
all events there are, but reads one byte. The others make the loop turn for nothing and, when there are some 280, have
gRPC's thread wait for it: then all connections get on by one event in a turn, whoever they belong to. So all bytes but
one are read before the callback is called.
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
            super().add_reader(fd, _after_all_but_one, fd, callback, *args)
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


def _after_all_but_one(bytes_of_events: socket.socket, callback: Callable[[*Ts], Any], *args: *Ts) -> None:
    """Reads all bytes but one, then calls a callback that reads one. What a byte tells of is there before the byte is,
    so that the callback handles all that these did.
    """
    written = len(bytes_of_events.recv(MOST_BYTES, socket.MSG_PEEK))
    if written > 1:
        bytes_of_events.recv(written - 1)
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
