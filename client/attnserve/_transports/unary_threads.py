"""How a threaded client's unary calls travel: gRPC's futures, and the threads that settle ours.

In: calls. Out: their futures, settled. These threads take part:

- The caller's thread makes the first attempt.
- gRPC's threads bring the replies (`_done`), and settle futures without callbacks.
- A thread of our own settles futures with callbacks (`callbacks`): a callback may close the client, or wait for another
  reply.
- One more thread makes the next attempts of all calls (`timers`).

Nothing is decided here; see `unary`.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from attnserve._errors import AttnServeError, ClientClosedError, ProtocolError, UnavailableError, unreadable
from attnserve._interrupts import DelayedInterrupt
from attnserve._settings.credentials import Bearer
from attnserve._transports.callbacks import Callbacks
from attnserve._transports.locks import at_once
from attnserve._transports.thread_future import CallFuture
from attnserve._transports.timers import Timer, Timers
from attnserve._transports.unary import UnaryCall

if TYPE_CHECKING:
    from attnserve._transports.thread_connection import Connection


class ThreadCall(UnaryCall[CallFuture[bytes, Any], "Connection"]):
    """A call, and its attempt or pause in progress."""

    connection: Connection | None = None
    rpc: Any = None
    """gRPC's call, while it is in progress. The main thread drops it only while signals are delayed: its finalizer
    takes a lock, and a signal handler's exception in a finalizer would be lost.
    """
    timer: Timer | None = None
    """What makes the next attempt, while there is a pause."""


class UnaryTransport:
    """Unary calls, which choose their server anew for every attempt."""

    def __init__(self, bearer: Bearer) -> None:
        self._bearer = bearer
        self._lock = threading.Lock()
        self._calls: set[ThreadCall] = set()
        self._callbacks = Callbacks()
        self._timers = Timers()
        self._closed = False

    def submit(self, call: ThreadCall) -> None:
        """Sends a call. Its future is settled when the outcome is known."""
        with self._lock:
            if self._closed:
                raise ClientClosedError()
            call.future.withdraw = partial(self._withdraw, call)
            self._calls.add(call)
        try:
            if call.pause:
                self._send_later(call, call.pause)
            else:
                self._try(call)
        except BaseException:  # what a signal handler raises: nobody gets the future
            self._withdraw(call)
            raise

    def close(self) -> None:
        """Gives up all calls."""
        with self._lock:
            self._closed = True
            calls = list(self._calls)
        for call in calls:
            if self._withdraw(call):
                call.future.settle(ClientClosedError())
        self._timers.close()

    def _try(self, call: ThreadCall) -> None:
        """Makes an attempt. The first is made in the caller's thread, where signal handlers may raise anything."""
        try:
            self._begin(call)
        except AttnServeError as error:
            self._answer(call, error)

    def _try_again(self, call: ThreadCall) -> None:
        call.timer = None
        try:
            self._try(call)
        except Exception as error:  # in the timers' thread nobody else would hear of it
            self._answer(call, ProtocolError(unreadable(error)))

    def _begin(self, call: ThreadCall) -> None:
        connection, timeout = call.connect()
        if (pause := call.held_back(connection)) is not None:
            self._send_later(call, pause)
            return
        message = call.message
        span = call.future.span
        metadata = self._bearer.metadata + (() if span is None else span.metadata)
        with DelayedInterrupt():
            self._send(call, connection, message, timeout, metadata)

    def _send(
        self, call: ThreadCall, connection: Connection, message: bytes, timeout: float | None, metadata: Any
    ) -> None:
        """Hands an attempt to gRPC, unless the call was given up. Signals must be delayed."""
        with self._lock:
            if call not in self._calls:
                return
            connection.unary.add(call)
            call.connection = connection
            try:
                rpc = connection.method(call.path).future(message, timeout=timeout, metadata=metadata)
            except RuntimeError as error:
                connection.lose_channel()
                raise UnavailableError(f"gRPC has no thread for the call: {error}") from None
            call.rpc = rpc
        rpc.add_done_callback(partial(self._done, call))

    def _done(self, call: ThreadCall, rpc: Any) -> None:
        try:
            self._take(call, rpc)
        except AttnServeError as error:
            self._answer(call, error)
        except Exception as error:  # gRPC would only log it
            self._answer(call, ProtocolError(unreadable(error)))

    def _take(self, call: ThreadCall, rpc: Any) -> None:
        connection, call.rpc = call.connection, None
        assert connection is not None  # it made the attempt
        connection.unary.discard(call)
        if rpc.code() is grpc.StatusCode.OK:
            call.answered(connection)
            self._answer(call, rpc.result())
            return
        self._send_later(call, call.failed(connection, rpc))

    def _send_later(self, call: ThreadCall, pause: float) -> None:
        with self._lock:
            if call in self._calls:
                try:
                    call.timer = self._timers.later(pause, partial(self._try_again, call))
                except RuntimeError as error:
                    raise UnavailableError(f"there is no thread for another attempt: {error}") from None

    def _withdraw(self, call: ThreadCall, *, waits: bool = True) -> bool:
        with DelayedInterrupt():
            with self._lock if waits else at_once(self._lock):
                if call not in self._calls:
                    return False
                self._calls.remove(call)
            self._stop(call)
        return True

    def _answer(self, call: ThreadCall, outcome: bytes | AttnServeError) -> None:
        """Ends a call. This runs in a thread that other calls need, so another settles a future with callbacks."""
        if self._withdraw(call) and not call.future.settle_silently(outcome):
            self._callbacks.settle(call.future, outcome)

    def _stop(self, call: ThreadCall) -> None:
        """Ends an attempt or pause in progress. Signals must be delayed."""
        timer, call.timer = call.timer, None
        rpc, call.rpc = call.rpc, None
        if timer is not None:
            timer.cancel()
        if rpc is not None:
            rpc.cancel()
        if call.connection is not None:
            call.connection.unary.discard(call)
