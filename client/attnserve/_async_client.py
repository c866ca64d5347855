"""The client for asyncio: the surface of `Client`, awaited.

In: the arguments of an attention. Out: its result, or a future of it. The parts: `_request` encodes, `_tasks` carries,
`_result` decodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Self, Unpack

import grpc.aio

from attnserve._config import DEFAULT_ADDRESS, Settings, Transport, checked_timeout
from attnserve._errors import ClientClosedError
from attnserve._info import ServerInfo, decode_info
from attnserve._request import ArrayLike, ArrayT, AttendOptions, encode_attend
from attnserve._result import AttentionResult, attention_result, decode_response
from attnserve._retry import RetryPolicy
from attnserve._tasks import CallFuture, StreamTransport, UnaryTransport


class AsyncClient:
    """A connection to an attention service, for one event loop.

        async with AsyncClient("127.0.0.1:8001") as client:
            result = await client.attend(query, key, value, causal=True)

    It belongs to the loop in which it is first used; gRPC wants one event loop in a process to be the only one that it
    meets. Otherwise everything is as with `Client`, but that it must be closed: it does not notice being forgotten.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        transport: Transport = "stream",
        timeout: float | None = 60.0,
        retries: int = 3,
        streams: int = 1,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """Sets up a client, as `Client` does. ValueError names an argument that is wrong."""
        self._settings = Settings(address, transport, timeout, retries, streams, tuple(options))
        self._connection: _Connection | None = None
        self._closed = False

    async def attend(
        self, query: ArrayT, key: ArrayLike, value: ArrayLike, **options: Unpack[AttendOptions]
    ) -> AttentionResult[ArrayT]:
        """Computes one attention. Arguments, result and errors are those of `Client.attend`.

        Cancelling the task that awaits it has the server told.
        """
        return await self.submit(query, key, value, **options)

    def submit(
        self, query: ArrayT, key: ArrayLike, value: ArrayLike, **options: Unpack[AttendOptions]
    ) -> asyncio.Future[AttentionResult[ArrayT]]:
        """Asks for one attention and returns a future of its result. Arguments are those of `Client.attend`.

        What is wrong with the arguments themselves is raised here; everything else is raised by the future.
        """
        connection = self._connected()
        call = encode_attend(query, key, value, default_timeout=self._settings.timeout, **options)
        future: CallFuture[Any, AttentionResult[ArrayT]]
        if connection.streams:
            future = CallFuture(partial(attention_result, call))
            streams = connection.streams
            stream = streams[0] if len(streams) == 1 else min(streams, key=len)
            stream.submit(future, call.pieces, call.size, call.timeout)
        else:
            future = CallFuture(lambda data: attention_result(call, decode_response(data)))
            connection.unary.submit(future, "Attend", call.pieces, call.timeout)
        return future

    async def server_info(self, *, timeout: float | None = 60.0) -> ServerInfo:
        """What the server is. `timeout` in seconds; None for no limit. Raises an `AttnServeError`."""
        future = CallFuture(decode_info)
        self._connected().unary.submit(future, "ServerInfo", [], checked_timeout(timeout))
        return await future

    async def close(self) -> None:
        """Ends the connection. Calls in flight fail with `ClientClosedError`."""
        self._closed = True
        if self._connection is not None:
            await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _connected(self) -> _Connection:
        """The connection, made in the running loop when it is first needed."""
        if self._closed:
            raise ClientClosedError
        if self._connection is None:
            self._connection = _Connection(self._settings)
        return self._connection


class _Connection:
    """The channel of a client and what travels on it."""

    def __init__(self, settings: Settings) -> None:
        self._channel = grpc.aio.insecure_channel(settings.address, options=settings.channel_options)
        policy = RetryPolicy(settings.retries)
        self.unary = UnaryTransport(self._channel, policy)
        self.streams = (
            [StreamTransport(self._channel, policy) for _ in range(settings.streams)]
            if settings.transport == "stream"
            else []
        )

    async def close(self) -> None:
        await self.unary.close()
        for stream in self.streams:
            await stream.close()
        await self._channel.close()
