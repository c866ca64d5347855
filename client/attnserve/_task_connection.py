"""The connection of a client for asyncio to one server: gRPC's channel, and the streams on it. See `_connection`."""

from __future__ import annotations

from typing import ClassVar

import grpc.aio

from attnserve._connection import BaseConnection
from attnserve._tasks import StreamTransport


class Connection(BaseConnection[StreamTransport]):
    """The channel to one server and the streams on it."""

    library: ClassVar = grpc.aio
    transport: ClassVar = StreamTransport

    async def close(self) -> None:
        """Gives up the calls on its streams and ends the connection."""
        for stream in self._streams:
            await stream.close()
        await self._channel.close()
