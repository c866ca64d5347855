"""A threaded client's connection to one server: gRPC's channel, and the streams on it. See `connection`."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any, ClassVar, Final
from weakref import WeakSet

import grpc

from attnserve._process import inherited
from attnserve._servers.replicas import Replica
from attnserve._settings.credentials import Bearer
from attnserve._settings.retry import RetryPolicy
from attnserve._transports.connection import BaseConnection, Others
from attnserve._transports.threads import StreamTransport


class Connection(BaseConnection[StreamTransport]):
    """The channel to one server and the streams on it."""

    library: ClassVar = grpc

    def __init__(self, *arguments: Any) -> None:
        """Arguments are those of `BaseConnection`."""
        super().__init__(*arguments)
        self._is_lost = False
        self._lost: list[grpc.Channel] = []
        _connections.add(self)

    def _new_stream(self, policy: RetryPolicy, bearer: Bearer, replica: Replica, others: Others) -> StreamTransport:
        return StreamTransport(self.channel, self.lose_channel, policy, bearer, replica, others)

    def channel(self) -> grpc.Channel:
        """The channel for the next call; a new one, if the last was lost. RuntimeError if there are no threads for a
        new one. That is tried first, since every lost channel costs memory and a file descriptor until the process
        ends.
        """
        if self._is_lost:
            _find_threads()
            self._lost.append(self._channel)
            self._channel = self._new_channel()
            self._methods.clear()
            self._is_lost = False
        channel: grpc.Channel = self._channel
        return channel

    def lose_channel(self) -> None:
        """Makes the next call use a new channel, because gRPC had no thread for this one. No reply is ever read on it
        again; and closing it, or dropping the last reference to it, would wait for that thread.
        """
        self._is_lost = True

    def method(self, path: str) -> Any:
        """A unary method. RuntimeError if there is no thread for it."""
        self.channel()
        return super().method(path)

    def close(self) -> None:
        """Gives up the calls on its streams and ends the connection."""
        for stream in self._streams:
            stream.close()
        if (anyhow := self._end()) is not None:
            anyhow.close()
        if self._is_lost:
            self._lost.append(self._channel)
        else:
            self._channel.close()
        for channel in self._lost:
            with suppress(RuntimeError):  # there is no thread for closing it, either
                threading.Thread(target=channel.close, name="attnserve-lost", daemon=True).start()


_THREADS: Final = 3
"""The threads that a stream needs: its own, its channel's, and the one that takes its messages."""


def _find_threads() -> None:
    """Starts as many threads for a moment. RuntimeError if that is not possible."""
    found = threading.Event()
    try:
        for _ in range(_THREADS):
            threading.Thread(target=found.wait, name="attnserve-found", daemon=True).start()
    finally:
        found.set()


_connections: Final[WeakSet[Connection]] = WeakSet()

_inherited: Final = inherited(lambda: tuple(_connections))
