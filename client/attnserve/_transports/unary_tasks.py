"""Unary calls of an asyncio client.

In: calls. Out: their futures, settled. One task makes all attempts of a call. Nothing is decided here; see `unary`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import grpc.aio

from attnserve._errors import AttnServeError, ClientClosedError, ProtocolError, unreadable
from attnserve._settings.credentials import Bearer
from attnserve._transports.tasks import CallFuture, unended
from attnserve._transports.unary import UnaryCall

if TYPE_CHECKING:
    from attnserve._transports.task_connection import Connection

    Call: TypeAlias = UnaryCall[CallFuture[bytes, Any], Connection]


class UnaryTransport:
    """Unary calls, which choose their server anew for every attempt."""

    def __init__(self, bearer: Bearer) -> None:
        self._bearer = bearer
        self._tasks: dict[asyncio.Task[None], CallFuture[bytes, Any]] = {}
        self._closed = False

    def submit(self, call: Call, find: Callable[[float | None], Awaitable[object]] | None = None) -> None:
        """Sends a call. Its future is settled when the outcome is known. `find`, if given, is awaited before the first
        attempt, and passed how many seconds are left.
        """
        if self._closed:
            raise ClientClosedError
        task = asyncio.get_running_loop().create_task(self._carry_out(call, find))
        self._tasks[task] = call.future
        call.future.withdraw = task.cancel
        task.add_done_callback(self._tasks.pop)
        task.add_done_callback(call.future.left_by)

    async def close(self) -> None:
        """Gives up all calls."""
        self._closed = True
        tasks = unended(self._tasks)
        for task in tasks:
            self._tasks[task].settle(ClientClosedError())
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    async def _carry_out(self, call: Call, find: Callable[[float | None], Awaitable[object]] | None) -> None:
        outcome: bytes | AttnServeError
        try:
            if find is not None:
                await find(call.left())
            if call.pause:
                await asyncio.sleep(call.pause)
            outcome = await self._reply(call)
        except AttnServeError as error:
            outcome = error
        except Exception as error:  # asyncio would report it only when the task is collected
            outcome = ProtocolError(unreadable(error))
        call.future.settle(outcome)

    async def _reply(self, call: Call) -> bytes:
        """The reply to a call, after as many attempts as are allowed. Raises an AttnServeError."""
        metadata = () if call.future.span is None else call.future.span.metadata
        while True:
            connection, timeout = call.connect()
            if (pause := call.held_back(connection)) is not None:
                await asyncio.sleep(pause)
                continue
            connection.unary.add(call)
            try:
                method = connection.method(call.path)
                reply: bytes = await method(call.message, timeout=timeout, metadata=self._bearer.metadata + metadata)
                call.answered(connection)
                return reply
            except grpc.RpcError as raised:
                # Without the traceback, which holds this frame; handled below, so as not to be a later error's context.
                error = raised.with_traceback(None)
            finally:
                connection.unary.discard(call)
            await asyncio.sleep(call.failed(connection, error))
