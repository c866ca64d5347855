"""Calls that each travel by themselves, for a client for asyncio.

In: the pieces of a request, and what gives the connection for an attempt. Out: a settled `CallFuture`. A call is a task
through all its attempts. Nothing is decided here; see `_retry`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from attnserve._credentials import Bearer
from attnserve._errors import (
    AttnServeError,
    ClientClosedError,
    DeadlineExceededError,
    ProtocolError,
    status_from_rpc_error,
    unreadable,
)
from attnserve._retry import NO_RETRIES, RetryPolicy
from attnserve._tasks import CallFuture
from attnserve._wire import Buffer

if TYPE_CHECKING:
    from attnserve._task_connection import Connection


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
    ) -> None:
        """Sends a call of a method, once if it is not repeatable. The future is settled when its outcome is there.

        `route` gives the connection for an attempt.
        """
        if self._closed:
            raise ClientClosedError
        deadline = inf if timeout is None else time.monotonic() + timeout
        policy = self._policy if repeatable else NO_RETRIES
        call = self._call(future, path, pieces, deadline, policy, route)
        task = asyncio.get_running_loop().create_task(call)
        self._tasks[task] = future
        future.withdraw = task.cancel
        task.add_done_callback(self._tasks.pop)

    async def close(self) -> None:
        """Gives up all calls."""
        self._closed = True
        tasks = dict(self._tasks)
        for task, future in tasks.items():
            future.settle(ClientClosedError())
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _call(
        self,
        future: CallFuture[bytes, Any],
        path: str,
        pieces: list[Buffer],
        deadline: float,
        policy: RetryPolicy,
        route: Callable[[float | None], Connection],
    ) -> None:
        try:
            await self._attempt(future, path, pieces, deadline, policy, route)
        except AttnServeError as error:
            future.settle(error)
        except Exception as error:  # of which asyncio would only tell when the task is collected
            future.settle(ProtocolError(unreadable(error)))

    async def _attempt(
        self,
        future: CallFuture[bytes, Any],
        path: str,
        pieces: list[Buffer],
        deadline: float,
        policy: RetryPolicy,
        route: Callable[[float | None], Connection],
    ) -> None:
        metadata = () if future.span is None else future.span.metadata
        attempts = 0
        while True:
            connection = route(None if deadline == inf else deadline - time.monotonic())
            remaining = None if deadline == inf else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                future.settle(DeadlineExceededError("no reply within the timeout"))
                return
            connection.unary.add(future)
            try:
                carried = self._bearer.metadata + metadata
                reply = await connection.method(path)(b"".join(pieces), timeout=remaining, metadata=carried)
                connection.replica.worked(time.monotonic())
                future.settle(reply)
                return
            except grpc.RpcError as error:
                attempts += 1
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    connection.replica.failed(time.monotonic())
                verdict = policy.after(status_from_rpc_error(error), attempts, time.monotonic(), deadline)
            finally:
                connection.unary.discard(future)
            if isinstance(verdict, AttnServeError):
                future.settle(verdict)
                return
            await asyncio.sleep(verdict)
