"""The connection of a client for threads to one server: gRPC's channel, and the streams on it. See `_connection`."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Final
from weakref import WeakSet

import grpc

from attnserve._connection import BaseConnection
from attnserve._threads import StreamTransport


class Connection(BaseConnection[StreamTransport]):
    """The channel to one server and the streams on it."""

    library: ClassVar = grpc
    transport: ClassVar = StreamTransport

    def __init__(self, *arguments: Any) -> None:
        """Arguments are those of `BaseConnection`."""
        super().__init__(*arguments)
        self._forked = False
        _connections.add(self)

    def forked(self) -> None:
        """Takes notice of being in the child of a fork."""
        for stream in self._streams:
            self._forked |= stream.forked()

    def close(self) -> None:
        """Gives up the calls on its streams and ends the connection."""
        for stream in self._streams:
            stream.close()
        if not self._forked:  # gRPC would wait for threads that are its parent's
            self._channel.close()


_connections: Final[WeakSet[Connection]] = WeakSet()


def _forked() -> None:
    for connection in tuple(_connections):
        connection.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
