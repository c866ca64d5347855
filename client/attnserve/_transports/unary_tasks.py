"""Calls that each travel by themselves, for a client for asyncio.

In: the pieces of a request, and what gives the connection for an attempt. Out: a settled `CallFuture`. A call is a task
through all its attempts. Nothing is decided here; see `unary`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import grpc.aio

from attnserve._errors import AttnServeError, ClientClosedError, ProtocolError, unreadable
from attnserve._fields import Buffer
from attnserve._settings.credentials import Bearer
from attnserve._settings.retry import NO_RETRIES, RetryPolicy
from attnserve._transports.tasks import CallFuture
from attnserve._transports.unary import UnaryCall

if TYPE_CHECKING:
    from attnserve._transports.task_connection import Connection

    Call: TypeAlias = UnaryCall[CallFuture[bytes, Any], Connection]


class UnaryTransport:
    """Calls that each travel by themselves, and find their server anew with every attempt."""

    def __init__(self, policy: RetryPolicy, bearer: Bearer) -> None:
        self._bearer = bearer
        self._policy = policy
        self._tasks: dict[asyncio.Task[None], CallFuture[bytes, Any]] = {}
        self._closed = False

    def submit(
        self,
        future: CallFuture[bytes, Any],
        path: str,
        pieces: list[Buffer],
        timeout: float | None,
        route: Callable[[float | None], Connection],
        *,
        repeatable: bool = True,
        find: Callable[[float | None], Awaitable[object]] | None = None,
    ) -> None:
        """Sends a call of a method, once if it is not repeatable. The future is settled when its outcome is there.

        `route` gives the connection for an attempt; `find`, if it is there, is to be awaited before the first one. Both
        are told how many seconds are left.
        """
        if self._closed:
            raise ClientClosedError
        call = UnaryCall(future, path, pieces, timeout, self._policy if repeatable else NO_RETRIES, route)
        task = asyncio.get_running_loop().create_task(self._carry_out(call, find))
        self._tasks[task] = future
        future.withdraw = task.cancel
        task.add_done_callback(self._tasks.pop)
        task.add_done_callback(future.left_by)

    async def close(self) -> None:
        """Gives up all calls."""
        self._closed = True
        tasks = dict(self._tasks)
        for task, future in tasks.items():
            future.settle(ClientClosedError())
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, call: Call, find: Callable[[float | None], Awaitable[object]] | None) -> None:
        outcome: bytes | AttnServeError
        try:
            if find is not None:
                await find(call.left())
            outcome = await self._reply(call)
        except AttnServeError as error:
            outcome = error.with_traceback(None)  # which leads here, and to all that the call holds
        except Exception as error:  # of which asyncio would only tell when the task is collected
            outcome = ProtocolError(unreadable(error))
        call.future.settle(outcome)

    async def _reply(self, call: Call) -> bytes:
        """The reply to a call, by as many attempts as it may have. Raises an AttnServeError."""
        metadata = () if call.future.span is None else call.future.span.metadata
        while True:
            connection, timeout = call.connect()
            connection.unary.add(call)
            try:
                method = connection.method(call.path)
                reply: bytes = await method(call.message, timeout=timeout, metadata=self._bearer.metadata + metadata)
                call.answered(connection)
                return reply
            except grpc.RpcError as raised:
                error = raised.with_traceback(None)  # which leads here, and is not to be the context of what follows
            finally:
                connection.unary.discard(call)
            await asyncio.sleep(call.failed(connection, error))
