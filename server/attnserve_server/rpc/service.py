"""The RPCs of `AttentionService`: bytes in, bytes out.

The handlers decode and encode messages themselves, with the wire codec; gRPC sees only bytes. An error of a unary call
is the status of its RPC; an error of a call on a stream travels in its reply.
"""

from __future__ import annotations

from typing import Final, get_args

import grpc
from grpc import aio

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.access.callers import Caller, Role
from attnserve_server.errors import CallerChanged, error_for_caller
from attnserve_server.rpc.calls import Read
from attnserve_server.rpc.engine_calls import EngineCalls, ReadWhole
from attnserve_server.rpc.open_rpcs import OpenRpcs
from attnserve_server.rpc.rpcs import Context, Rpcs
from attnserve_server.rpc.stream import ATTENDED, CallStream, Streams
from attnserve_server.rpc.stream_life import StreamLife

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["AttentionService"].full_name


class AttentionService:
    """The service for one engine, by unary calls and on streams, which have the same readers and the same fast path.
    `info` is the reply to ServerInfo, serialised.
    """

    def __init__(
        self,
        streams: Streams,
        calls: EngineCalls,
        rpcs: Rpcs,
        info: bytes,
        max_caller_streams: int,
        stream_life: StreamLife | None,
    ) -> None:
        self._streams = streams
        self._calls = calls
        self._metrics = streams.metrics
        self._rpcs = rpcs
        self._info = info
        self._open_streams = OpenRpcs(max_caller_streams)
        self._stream_life = stream_life
        self._serving: set[CallStream] = set()

    def register(self, server: aio.Server) -> None:
        """Adds the service to a gRPC server that has not started."""
        readers = self._streams.readers
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Attend": self._calls.handler("attend", _whole(readers["attend"]), self._streams.fast_path),
            "Apply": self._calls.handler("apply", _whole(readers["apply"])),
            "AttendStream": grpc.stream_stream_rpc_method_handler(self._attend_stream),
            "ServerInfo": self._rpcs.answering(
                "server_info", pb.ServerInfoRequest, lambda caller, request: self._info, *get_args(Role)
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    def end_streams(self) -> None:
        """Ends every stream once what is in flight on it has been answered."""
        for stream in self._serving:
            stream.end()

    async def _attend_stream(self, _: object, context: Context) -> None:
        self._metrics.stream_opened()
        caller: Caller | None = None
        try:
            caller = self._rpcs.callers.identify(context)
            caller.require("use")
            with self._open_streams.one_more(caller.share):
                await self._serve(caller, context)
        except Exception as raised:
            error = error_for_caller(raised)
            if not isinstance(error, CallerChanged):  # it fails no call
                self._metrics.stream_failed(error.code.name)
            await self._rpcs.refuse(context, ATTENDED, error, caller)
        finally:
            self._metrics.stream_closed()

    async def _serve(self, caller: Caller, context: Context) -> None:
        """Serves a stream to its end. Raises RequestError."""
        stream = CallStream(self._streams, caller, context)
        self._serving.add(stream)
        retirement = None if self._stream_life is None else self._stream_life.begin(stream)
        try:
            await stream.serve()
        finally:
            self._serving.discard(stream)
            if retirement is not None:
                retirement.cancel()


def _whole(read: Read) -> ReadWhole:
    """Reads requests each of which is a message by itself."""
    return lambda caller, message: read(caller, message, 0, len(message))
