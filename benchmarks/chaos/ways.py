"""The two ways to ask a server: calls on a stream, as the SDK makes them, and each as an RPC, as any gRPC client can.

In: a channel to the server, and requests. Out: a reply each, with the error of a call that failed in it.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Final

from google.rpc.status_pb2 import Status
from grpc import aio

from attnserve.v1 import attention_pb2 as pb

STREAM: Final = "/attnserve.v1.AttentionService/AttendStream"
APPLY: Final = "/attnserve.v1.AttentionService/Apply"
DETAILS: Final = "grpc-status-details-bin"


class Stream:
    """One caller: calls on one stream."""

    def __init__(self, channel: aio.Channel) -> None:
        self._call: aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(STREAM)()
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

    async def _write(self) -> None:
        while True:
            await self._call.write(await self._unsent.get())

    async def _read(self) -> None:
        while isinstance(message := await self._call.read(), bytes):
            for reply in pb.AttendStreamResponse.FromString(message).replies:
                self._waiting.pop(reply.id).set_result(reply)


class Unary:
    """One caller: each call an RPC."""

    def __init__(self, channel: aio.Channel) -> None:
        self._apply: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(APPLY)

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
        """Nothing is open."""
