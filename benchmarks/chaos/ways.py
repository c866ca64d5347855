"""The ways to ask a server: calls on a stream and unary calls, made once, as any gRPC client can make them; and both by
the SDK, which sends refused calls again.

In: the address of the server, and requests. Out: a reply each, with the error of a call that failed in it.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import ClassVar, Final, Literal, Protocol

import numpy as np
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc import aio

from attnserve import AsyncClient, AttnServeError, OverloadedError
from attnserve.v1 import attention_pb2 as pb

STREAM: Final = "/attnserve.v1.AttentionService/AttendStream"
APPLY: Final = "/attnserve.v1.AttentionService/Apply"
DETAILS: Final = "grpc-status-details-bin"


class Way(Protocol):
    """One caller, who has a connection of its own."""

    told_within: ClassVar[float]
    """By the median, how many seconds it should take until a caller is told that the server is full."""
    slower: ClassVar[float | None]
    """How many times as long as at 90 % load accepted calls may take, by the 99th percentile. None if no bound is
    promised, because calls may have waited and come back.
    """
    timeout: ClassVar[float | None]
    """How many seconds a call waits for its reply, and so for room, too; None for no limit."""

    def __init__(self, address: str) -> None: ...

    async def ask(self, request: pb.ApplyRequest) -> pb.AttendStreamReply:
        """The reply to one call."""

    async def close(self) -> None:
        """Ends what is open."""


def _channel(address: str) -> aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    return aio.insecure_channel(address, options)


class Stream:
    """One caller: calls on one stream."""

    told_within: ClassVar[float] = 0.01
    slower: ClassVar[float | None] = 3.0
    timeout: ClassVar[float | None] = None

    def __init__(self, address: str) -> None:
        self._channel = _channel(address)
        self._call: aio.StreamStreamCall[bytes, bytes] = self._channel.stream_stream(STREAM)()
        self._unsent: asyncio.Queue[bytes] = asyncio.Queue()
        self._waiting: dict[int, asyncio.Future[pb.AttendStreamReply]] = {}
        self._numbers = count(1)
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    async def ask(self, request: pb.ApplyRequest) -> pb.AttendStreamReply:
        """The reply to one call."""
        number = next(self._numbers)
        self._waiting[number] = reply = asyncio.get_running_loop().create_future()
        calls = [pb.AttendStreamCall(id=number, apply=request)]
        self._unsent.put_nowait(pb.AttendStreamRequest(calls=calls).SerializeToString())
        answer: pb.AttendStreamReply = await reply
        return answer

    async def close(self) -> None:
        """Ends the stream."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _write(self) -> None:
        while True:
            await self._call.write(await self._unsent.get())

    async def _read(self) -> None:
        while isinstance(message := await self._call.read(), bytes):
            for reply in pb.AttendStreamResponse.FromString(message).replies:
                self._waiting.pop(reply.id).set_result(reply)


class Unary:
    """One caller: unary calls on one channel."""

    told_within: ClassVar[float] = 0.01
    slower: ClassVar[float | None] = 3.0
    timeout: ClassVar[float | None] = None

    def __init__(self, address: str) -> None:
        self._channel = _channel(address)
        self._apply: aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(APPLY)

    async def ask(self, request: pb.ApplyRequest) -> pb.AttendStreamReply:
        """The reply to one call. What gRPC ends by itself comes without details."""
        try:
            reply = await self._apply(request.SerializeToString())
        except aio.AioRpcError as error:
            trailing = dict(error.trailing_metadata() or ())
            status = Status(code=error.code().value[0], message=f"{error.code().name}: {error.details()}")
            if (details := trailing.get(DETAILS)) is not None:
                status = Status.FromString(details)
            return pb.AttendStreamReply(error=status)
        return pb.AttendStreamReply(apply=pb.ApplyResponse.FromString(reply))

    async def close(self) -> None:
        """Ends the connection."""
        await self._channel.close()


class Sdk:
    """One caller: the SDK as it comes. It asks a full server again when that says so, if the server answers others."""

    transport: ClassVar[Literal["stream", "unary"]] = "stream"

    told_within: ClassVar[float] = 2.0
    slower: ClassVar[float | None] = None
    timeout: ClassVar[float | None] = 2.0

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address, transport=self.transport, timeout=self.timeout)

    async def ask(self, request: pb.ApplyRequest) -> pb.AttendStreamReply:
        """The reply to one call, after all attempts, without the result: that there is one, or the error."""
        try:
            await self._client.apply(request.layer, np.frombuffer(request.input.data, "<i8"))
        except AttnServeError as error:
            status = Status(code=error.code.value[0], message=str(error))
            if isinstance(error, OverloadedError) and error.retry_delay is not None:
                told = RetryInfo()
                told.retry_delay.FromNanoseconds(round(error.retry_delay * 1e9))
                status.details.add().Pack(told)
            return pb.AttendStreamReply(error=status)
        return pb.AttendStreamReply(apply=pb.ApplyResponse())

    async def close(self) -> None:
        """Ends the client."""
        await self._client.close()


class SdkUnary(Sdk):
    """The same with unary calls."""

    transport = "unary"
