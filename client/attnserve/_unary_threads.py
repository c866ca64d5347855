"""Calls that each travel by themselves, for a client for threads.

In: the pieces of a request, and what gives the connection for an attempt. Out: a settled `CallFuture`. gRPC's threads
bring the answers; a timer waits before another attempt. Nothing is decided here; see `_retry`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

import grpc

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
from attnserve._threads import CallFuture
from attnserve._wire import Buffer

if TYPE_CHECKING:
    from attnserve._thread_connection import Connection


class _UnaryCall:
    """One call that travels by itself, through all its attempts."""

    __slots__ = (
        "attempts",
        "connection",
        "deadline",
        "future",
        "metadata",
        "path",
        "pieces",
        "policy",
        "route",
        "rpc",
        "timer",
    )

    def __init__(
        self,
        future: CallFuture[bytes, Any],
        path: str,
        pieces: list[Buffer],
        deadline: float,
        policy: RetryPolicy,
        route: Callable[[float | None], Connection],
    ) -> None:
        self.future: Final = future
        self.metadata: Final = () if future.span is None else future.span.metadata
        self.path: Final = path
        self.pieces: Final = pieces
        self.deadline: Final = deadline
        self.policy: Final = policy
        self.route: Final = route
        self.connection: Connection | None = None
        self.attempts = 0
        self.rpc: Any = None
        self.timer: threading.Timer | None = None


class UnaryTransport:
    """Calls that each travel by themselves, and find their server anew with every attempt."""

    def __init__(self, policy: RetryPolicy, bearer: Bearer) -> None:
        self._bearer = bearer
        self._policy = policy
        self._lock = threading.Lock()
        self._calls: set[_UnaryCall] = set()
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

        `route` gives the connection for an attempt, within so many seconds.
        """
        deadline = inf if timeout is None else time.monotonic() + timeout
        with self._lock:
            if self._closed:
                raise ClientClosedError()
            policy = self._policy if repeatable else NO_RETRIES
            call = _UnaryCall(future, path, pieces, deadline, policy, route)
            future.withdraw = partial(self._withdraw, call)
            self._calls.add(call)
        self._send(call)

    def close(self) -> None:
        """Gives up all calls."""
        with self._lock:
            self._closed = True
            calls = list(self._calls)
        for call in calls:
            self._finish(call, ClientClosedError())

    def _send(self, call: _UnaryCall) -> None:
        try:
            self._begin(call)
        except AttnServeError as error:
            self._finish(call, error)
        except Exception as error:  # in the thread of a timer nobody else would hear of it
            self._finish(call, ProtocolError(unreadable(error)))

    def _begin(self, call: _UnaryCall) -> None:
        connection = call.route(_left(call.deadline))
        remaining = _left(call.deadline)
        if remaining is not None and remaining <= 0:
            self._finish(call, DeadlineExceededError("no reply within the timeout"))
            return
        method, metadata = connection.method(call.path), self._bearer.metadata + call.metadata
        message = b"".join(call.pieces)
        with self._lock:
            if call not in self._calls:
                return
            connection.unary.add(call)
            call.connection = connection
            call.rpc = method.future(message, timeout=remaining, metadata=metadata)
        call.rpc.add_done_callback(partial(self._done, call))

    def _done(self, call: _UnaryCall, rpc: Any) -> None:
        try:
            self._take(call, rpc)
        except Exception as error:  # which gRPC would only log
            self._finish(call, ProtocolError(unreadable(error)))

    def _take(self, call: _UnaryCall, rpc: Any) -> None:
        now = time.monotonic()
        assert call.connection is not None  # it made the attempt
        replica = call.connection.replica
        call.connection.unary.discard(call)
        if rpc.code() is grpc.StatusCode.OK:
            replica.worked(now)
            self._finish(call, rpc.result())
            return
        if rpc.code() is grpc.StatusCode.UNAVAILABLE:
            replica.failed(now)
        call.attempts += 1
        verdict = call.policy.after(status_from_rpc_error(rpc), call.attempts, now, call.deadline)
        if isinstance(verdict, AttnServeError):
            self._finish(call, verdict)
            return
        with self._lock:
            if call in self._calls:
                call.timer = threading.Timer(verdict, self._send, (call,))
                call.timer.daemon = True
                call.timer.start()

    def _withdraw(self, call: _UnaryCall) -> bool:
        with self._lock:
            if call not in self._calls:
                return False
            self._calls.remove(call)
        self._stop(call)
        return True

    def _finish(self, call: _UnaryCall, outcome: bytes | AttnServeError) -> None:
        if self._withdraw(call):
            call.future.settle(outcome)

    def _stop(self, call: _UnaryCall) -> None:
        if call.timer is not None:
            call.timer.cancel()
        if call.rpc is not None:
            call.rpc.cancel()
        if call.connection is not None:
            call.connection.unary.discard(call)


def _left(deadline: float) -> float | None:
    """The seconds until a deadline; None if there is none."""
    return None if deadline == inf else deadline - time.monotonic()
