"""The connection of a client for threads to one server: gRPC's channel, and the streams on it. See `_connection`."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
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
        self._lost: list[grpc.Channel] = []
        _connections.add(self)

    def lose_channel(self) -> None:
        """Takes another channel than one for which gRPC had no thread: no reply is ever read there any more, and who
        closes it, or lets go of it, waits for that thread.
        """
        self._lost.append(self._channel)
        self._channel = self._new_channel()
        self._methods.clear()
        for stream in self._streams:
            stream.channel = self._channel

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
        for channel in self._lost:
            with suppress(RuntimeError):  # there is no thread for that, either
                threading.Thread(target=channel.close, name="attnserve-lost", daemon=True).start()


_connections: Final[WeakSet[Connection]] = WeakSet()


def _forked() -> None:
    for connection in tuple(_connections):
        connection.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
