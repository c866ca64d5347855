"""An asyncio client's connection to one server: gRPC's channel, and the streams on it. See `connection`."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress
from typing import Any, ClassVar, Final
from weakref import WeakSet

import grpc.aio

from attnserve._errors import ClientClosedError
from attnserve._process import inherited
from attnserve._servers.replicas import Replica
from attnserve._settings.credentials import Bearer
from attnserve._settings.retry import RetryPolicy
from attnserve._transports.connection import BaseConnection, Others
from attnserve._transports.tasks import StreamTransport

_FORKED: Final = "an AsyncClient was there as the process was forked, and gRPC knows no other asyncio; spawn processes"


class Connection(BaseConnection[StreamTransport]):
    """The channel to one server and the streams on it."""

    library: ClassVar = grpc.aio

    def __init__(self, *arguments: Any) -> None:
        """Arguments are those of `BaseConnection`. ClientClosedError in a forked child whose parent had such
        connections: gRPC has one thread for everything asyncio, for as long as any of it exists, and would wait for
        that of the parent.
        """
        if _inherited:
            raise ClientClosedError(_FORKED)
        super().__init__(*arguments)
        self._loop: Final = asyncio.get_running_loop()
        _connections.add(self)

    def _new_stream(self, policy: RetryPolicy, bearer: Bearer, replica: Replica, others: Others) -> StreamTransport:
        return StreamTransport(self._channel, policy, bearer, replica, others)

    async def close(self) -> None:
        """Gives up the calls on its streams, ends the connection, and keeps nothing of gRPC's.

        gRPC's asyncio ends with its last channel. If one outlived this loop, in a client that is not collected yet,
        events of calls that were just cancelled would be handled in the next loop, and gRPC would print an error.
        """
        await asyncio.gather(*(stream.close() for stream in self._streams))
        if (anyhow := self._end()) is not None:
            await anyhow.close()
        if self._channel is not None:  # else this completes a closing that was cancelled after it got this far
            # RuntimeError: calls of a loop that is closed cannot be told that gRPC has cancelled them.
            with suppress(RuntimeError) if self._loop.is_closed() else nullcontext():
                await self._channel.close()
            self._channel = None
            self._methods.clear()


_connections: Final[WeakSet[Connection]] = WeakSet()

_inherited: Final = inherited(lambda: tuple(_connections))
