"""The connection of a client for asyncio to one server: gRPC's channel, and the streams on it. See `_connection`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import grpc
import grpc.aio

from attnserve._config import Settings
from attnserve._connection import BaseConnection
from attnserve._credentials import Bearer
from attnserve._multiplexer import Call
from attnserve._replicas import Replica
from attnserve._retry import RetryPolicy
from attnserve._tasks import StreamFuture, StreamTransport


class Connection(BaseConnection[StreamTransport]):
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
        """`others` says whether other servers could answer, and `move` makes a call at one of them."""
        options = settings.channel_options(replica.address)
        if credentials is None:
            channel = grpc.aio.insecure_channel(replica.address, options=options)
        else:
            channel = grpc.aio.secure_channel(replica.address, credentials, options=options)
        policy = RetryPolicy(settings.retries)
        stream = partial(StreamTransport, channel, policy, bearer, replica, partial(others, self), move)
        super().__init__(settings, replica, channel, stream)

    async def close(self) -> None:
        """Gives up the calls on its streams and ends the connection."""
        for stream in self._streams:
            await stream.close()
        await self._channel.close()
