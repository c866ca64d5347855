"""The connection of a client for threads to one server: gRPC's channel, and the streams on it. See `_connection`."""

from __future__ import annotations

from typing import ClassVar

import grpc

from attnserve._connection import BaseConnection
from attnserve._threads import StreamTransport


class Connection(BaseConnection[StreamTransport]):
    """The channel to one server and the streams on it."""

    library: ClassVar = grpc
    transport: ClassVar = StreamTransport

    def close(self) -> None:
        """Gives up the calls on its streams and ends the connection."""
        for stream in self._streams:
            stream.close()
        self._channel.close()
