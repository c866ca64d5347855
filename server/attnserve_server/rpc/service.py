"""The RPCs of `AttentionService`: bytes in, bytes out.

The handlers decode and encode messages themselves, with the wire codec; gRPC sees only bytes. An error of a unary call
is the status of its RPC; an error of a call on a stream travels in its reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Final, TypeAlias, get_args

import grpc
from grpc import aio

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.access.callers import Caller, Role
from attnserve_server.errors import CallerChanged, RequestError, error_for_caller
from attnserve_server.observability.tracing import Trace
from attnserve_server.requests.work import Work
from attnserve_server.rpc.answers import encoded
from attnserve_server.rpc.calls import Read
from attnserve_server.rpc.fast_path import Answered, FastPath
from attnserve_server.rpc.open_rpcs import OpenRpcs
from attnserve_server.rpc.rpcs import Context, Handler, Received, Rpcs, when_sent
from attnserve_server.rpc.stream import ATTENDED, CallStream, Streams
from attnserve_server.rpc.stream_life import StreamLife
from attnserve_server.scheduling.entry import Entry, Held, Outcome, StillHeld

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["AttentionService"].full_name

ReadWhole: TypeAlias = Callable[[Caller, bytes], Work]
"""Reads a caller's request from a message. Raises RequestError."""


class AttentionService:
    """The service for one engine: that of `streams`, whose readers, fast path and the like are for unary calls too.
    `info` is the reply to ServerInfo, serialised.
    """

    def __init__(
        self,
        streams: Streams,
        rpcs: Rpcs,
        info: bytes,
        max_caller_streams: int,
        stream_life: StreamLife | None,
    ) -> None:
        self._streams = streams
        self._engine = streams.engine
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
            "Attend": self.handler("attend", _whole(readers["attend"]), self._streams.fast_path),
            "Apply": self.handler("apply", _whole(readers["apply"])),
            "AttendStream": grpc.stream_stream_rpc_method_handler(self._attend_stream),
            "ServerInfo": self._rpcs.answering(
                "server_info", pb.ServerInfoRequest, lambda caller, request: self._info, *get_args(Role)
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    def check_open(self) -> None:
        """Raises what any request would be refused with because the server is starting, ending or failed."""
        self._engine.check_open()

    def end_streams(self) -> None:
        """Ends every stream once what is in flight on it has been answered."""
        for stream in self._serving:
            stream.end()

    def handler(self, operation: str, read: ReadWhole, fast_path: FastPath | None = None) -> Handler:
        """The handler of a unary RPC whose requests go through the engine, unless the fast path has an answer."""
        answer = partial(self._answer, read, fast_path)
        return self._rpcs.unary(operation, self._admit, answer, self._streams.tracing)

    def _admit(self, caller: Caller) -> None:
        """Raises RequestError for one who may not use the service, or for whom there is no room."""
        caller.require("use")
        self._engine.check(caller.share, 0)

    async def _answer(self, read: ReadWhole, fast_path: FastPath | None, received: Received) -> bytes:
        """The reply to a unary call, which is released when it has been sent. Raises RequestError."""
        message, held = await self._reply_to(read, fast_path, *received)
        when_sent(partial(self._engine.release, held))
        return message

    async def _reply_to(
        self,
        read: ReadWhole,
        fast_path: FastPath | None,
        caller: Caller,
        message: bytes,
        arrival: float,
        timeout: float | None,
        trace: Trace | None,
    ) -> tuple[bytes, Held]:
        """The reply to a unary call, and what is to be released when it has been sent. Raises RequestError."""
        learns, usage = False, self._metrics.usage.of(caller.name)
        if fast_path is not None and trace is None:
            answered = fast_path.answer_request(caller, message, arrival, timeout)
            if isinstance(answered, Answered):
                usage.computed(answered.query_tokens, answered.flops)
                return answered.message, answered
            learns = answered.learns
        self._engine.check(caller.share, len(message))
        request = read(caller, message)
        if learns and fast_path is not None:
            fast_path.learn_from(request, message, 0)
        outcomes: asyncio.Future[Outcome | RequestError] = asyncio.get_running_loop().create_future()

        def reply(entry: Entry, outcome: Outcome | RequestError) -> None:
            if outcomes.done():  # its caller has gone
                if isinstance(outcome, Outcome):
                    usage.computed(entry.request.query_tokens, entry.request.flops)
                self._engine.release(entry)
            else:
                outcomes.set_result(outcome)

        deadline = float("inf") if timeout is None else arrival + timeout
        entry = Entry(request, reply, arrival, deadline, perf_counter() - arrival, caller.share, trace)
        self._engine.submit(entry)
        try:
            outcome = await outcomes
        except asyncio.CancelledError:
            self._engine.cancel((entry,))
            if outcomes.done() and not outcomes.cancelled():  # the outcome came as the caller went
                self._engine.release(entry)
            raise
        try:
            if isinstance(outcome, RequestError):
                raise outcome
            reply_message = encoded(entry, outcome, self._metrics, usage, lambda pieces, size: b"".join(pieces))
            return reply_message, StillHeld.of(entry)
        except BaseException:
            self._engine.release(entry)
            raise

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
            if not isinstance(error, CallerChanged):  # which fails no call
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
