"""What the services of one server have in common: who calls, when a message is received, and how an RPC ends, with a
reply or with the status of an error, which is logged.

Messages are parsed here and not by gRPC, which would report malformed ones in its own words, and as a fault of the
server.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from attnserve_server.access.callers import Caller, Callers, Role
from attnserve_server.errors import LIMIT_EXCEEDED, InvalidRequest, Malformed, RequestError, error_for_caller
from attnserve_server.observability.metrics import Metrics, Operation
from attnserve_server.observability.refusals import request_id_of
from attnserve_server.observability.tracing import Trace, Tracing, in_metadata
from attnserve_server.rpc.caller_turns import CallerTurns
from attnserve_server.rpc.endings import Endings
from attnserve_server.rpc.messages_due import MessagesDue
from attnserve_server.rpc.replies_due import RepliesDue
from attnserve_server.rpc.unread import Handle, UnreadReplies

Context: TypeAlias = aio.ServicerContext[bytes, bytes]
Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"
M = TypeVar("M", bound=Message)
Reply: TypeAlias = Message | bytes

MAX_PLAIN_BYTES: Final = 4 << 20
"""The longest message without tensors: 160 000 names of caches. Parsed, empty names take 16 times as much."""


class Received(NamedTuple):
    """The message of a unary call, and whose it is. `arrival` is when it came (seconds of `time.perf_counter`).
    `timeout` is for how many seconds from then on its caller waits; None if for ever.
    """

    caller: Caller
    message: bytes
    arrival: float
    timeout: float | None
    trace: Trace | None


class _Refused(NamedTuple):
    """What a unary call ends with, and whose it was, if that is known."""

    error: RequestError
    caller: Caller | None


class Rpcs:
    """What the services of one server have in common: identifying callers, and what becomes of errors."""

    def __init__(
        self,
        callers: Callers,
        metrics: Metrics,
        endings: Endings,
        messages_due: MessagesDue,
        unread: UnreadReplies,
        tracing: Tracing | None = None,
    ) -> None:
        """`unread` ends unary calls whose replies are not read. `tracing` records unary calls; None if nothing does."""
        self.callers = callers
        self.endings = endings
        self._metrics = metrics
        self._messages_due = messages_due
        self.replies_due = RepliesDue()
        self._unread = unread
        self._tracing = tracing

    def unary(
        self,
        operation: Operation,
        admit: Callable[[Caller], object],
        answer: Callable[[Received], Awaitable[bytes]],
        *,
        counted_elsewhere: bool = True,
    ) -> Handler:
        """The handler of a unary RPC. `admit` raises RequestError for a caller whose message is not to be received,
        `answer` makes the reply or raises one. `operation` is the RPC's name in metrics, traces and the log.
        `counted_elsewhere` says that something else counts the call until gRPC has sent the reply.

        To gRPC it is a handler that takes a stream of messages, because such a handler is called before a message has
        come. So callers who are not known, or for whom there is no room, are refused without receiving their messages.
        To receive one takes memory, and as long as all else about a refusal.
        """

        async def attempt(context: Context) -> bytes | _Refused:
            """The reply, or what the call ends with instead."""
            arrival = perf_counter()
            trace = None
            if self._tracing is not None:
                trace = self._tracing.begin(operation, in_metadata(context.invocation_metadata()), arrival)
            caller: Caller | None = None
            try:
                caller = self.callers.identify(context)
                admit(caller)
                message = await self._messages_due.message(context, caller.share)
                arrival = perf_counter()
                self._metrics.received(len(message))
                if trace is not None:
                    trace.received(arrival)
                if not counted_elsewhere:
                    self.replies_due.require_room(context.peer())
                reply = await answer(Received(caller, message, arrival, context.time_remaining(), trace))
                if not counted_elsewhere:
                    self.replies_due.begin(context.peer())
            except Exception as raised:
                error = error_for_caller(raised)
                self.endings.ended(operation, error.code.name, arrival, trace)
                return _Refused(error, caller)
            except asyncio.CancelledError:
                self.endings.ended(operation, "CANCELLED", arrival, trace)
                raise
            self._metrics.sent(len(reply))
            self.endings.ended(operation, "OK", arrival, trace)
            return reply

        async def handle(_: object, context: Context) -> bytes:
            outcome = await attempt(context)
            if isinstance(outcome, _Refused):
                # Refused here and not in `attempt`, whose frame has the message: gRPC keeps the frames in which an RPC
                # is refused until garbage collection.
                await self.refuse(context, operation, outcome.error, outcome.caller)
            return outcome

        return self.watched(operation, handle)

    def watched(self, operation: str, handle: Handle) -> Handler:
        """The handler of a unary RPC (for gRPC, of one with a stream of messages) whose reply is to be read in time."""
        return grpc.stream_unary_rpc_method_handler(self._unread.watched(operation, handle))

    def answering(
        self,
        operation: Operation,
        request_type: type[M],
        answer: Callable[[Caller, M], Reply | Awaitable[Reply]],
        *roles: Role,
        one_at_a_time: bool = False,
    ) -> Handler:
        """The handler of a unary RPC that is answered at once, or by a coroutine, with a message, which may be
        serialised already. `answer` may raise RequestError.

        It is for callers with one of the roles. If `one_at_a_time`, a caller's next call waits until gRPC has sent the
        reply to the one before: replies are long.
        """
        turns = CallerTurns()

        async def serialised(received: Received) -> bytes:
            request = parsed(request_type, received.message)
            if one_at_a_time:
                when_sent(await turns.take(received.caller.share))
            reply = answer(received.caller, request)
            if inspect.isawaitable(reply):
                reply = await reply
            return reply if isinstance(reply, bytes) else reply.SerializeToString()

        return self.unary(operation, lambda caller: caller.require(*roles), serialised, counted_elsewhere=one_at_a_time)

    async def refuse(self, context: Context, operation: str, error: RequestError, caller: Caller | None) -> NoReturn:
        """Ends an RPC with an error; a rejection is counted."""
        self.endings.refused(operation, error, caller, lambda: request_id_of(context))
        await context.abort(error.code, error.message, error.trailers())


def when_sent(do: Callable[[], object]) -> None:
    """Does something when gRPC has sent all of the reply to the RPC whose handler calls this, or never will.

    That is when the handler's task ends. (A callback of the context would be part of a reference cycle with it, and so
    keep what gRPC holds of the RPC until garbage collection.)
    """
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda _: do())


def parsed(message_type: type[M], data: bytes) -> M:
    """Parses a message without tensors. Raises Malformed, and InvalidRequest if it is too long."""
    if len(data) > MAX_PLAIN_BYTES:
        expected, found = f"a message of at most {MAX_PLAIN_BYTES} bytes", f"{len(data)} bytes"
        raise InvalidRequest("", expected, found, LIMIT_EXCEEDED, limit="max_plain_message_bytes")
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        raise Malformed("", error) from None


def connection_of(context: aio.ServicerContext[Any, Any]) -> str | None:
    """The connection, by which callers are told apart where an RPC is for anybody. None on a unix socket, where all of
    them have the same address.
    """
    peer: str = context.peer()
    return None if peer.startswith("unix") else peer
