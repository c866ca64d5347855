"""The connection of a client for asyncio to one server: gRPC's channel, and the streams on it.

In: a server, and how the client is set up. Out: streams and unary methods, and how many calls are in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio

from attnserve._config import Settings
from attnserve._credentials import Bearer
from attnserve._multiplexer import Call
from attnserve._replicas import Replica
from attnserve._retry import RetryPolicy
from attnserve._tasks import StreamFuture, StreamTransport


class Connection:
    """The channel to one server and the streams on it."""

    def __init__(
        self,
        settings: Settings,
        credentials: grpc.ChannelCredentials | None,
        bearer: Bearer,
        replica: Replica,
        others: Callable[[Connection], bool],
        move: Callable[[Call[StreamFuture]], object],
    ) -> None:
        self.replica: Final = replica
        """The server."""
        self.unary: Final[set[object]] = set()
        """The calls by themselves that it has not answered."""
        address = replica.address
        options = settings.channel_options(address)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=options)
        self._methods: dict[str, Any] = {}
        self._streams = [
            StreamTransport(self._channel, RetryPolicy(settings.retries), bearer, replica, partial(others, self), move)
            for _ in range(settings.streams if settings.transport == "stream" else 0)
        ]

    @property
    def in_flight(self) -> int:
        """How many calls the server has not answered."""
        return sum(map(len, self._streams)) + len(self.unary)

    def stream(self) -> StreamTransport:
        """What a call travels on."""
        return self._streams[0] if len(self._streams) == 1 else min(self._streams, key=len)

    def method(self, path: str) -> Any:
        """A unary method."""
        method = self._methods.get(path)
        if method is None:
            method = self._methods[path] = self._channel.unary_unary(path, None, None)
        return method

    def leave(self) -> None:
        """Has calls on streams made elsewhere, as far as they have not been sent."""
        for stream in self._streams:
            stream.leave()

    async def close(self) -> None:
        """Gives up the calls on its streams and ends the connection."""
        for stream in self._streams:
            await stream.close()
        await self._channel.close()
