"""How a threaded client's calls travel on streams: gRPC's synchronous channel, and the threads around it.

In: encoded calls, from any number of threads. Out: settled `CallFuture`s. These threads, all daemons, take part:

- gRPC's thread for the stream takes messages from `_messages`, as fast as the connection does.
- gRPC's thread for the channel calls `_arrived` with each message of replies. It settles futures without callbacks at
  once: waking another thread takes longer than computing a small call.
- Our thread for the stream runs `_read`. It does what `_arrived` leaves: it settles futures with callbacks or spans and
  those of large messages, moves calls to other servers, and handles the end of the stream.
- Our thread for the transport, started with the first call, runs `_watch`: it watches deadlines and retries.

If no thread can be started for a stream, its calls are sent again a little later. Nothing is decided here; see
`multiplexer` and `_settings.retry`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, TypeAlias

import grpc
from google.rpc.status_pb2 import Status

from attnserve._errors import ClientClosedError, status_from_rpc_error, unreadable
from attnserve._interrupts import DelayedInterrupt
from attnserve._memory import joined
from attnserve._requests.reply import Response, decode_replies
from attnserve._servers.replicas import Replica
from attnserve._settings.config import SERVICE
from attnserve._settings.credentials import Bearer
from attnserve._settings.retry import RetryPolicy
from attnserve._transports.connection import BaseStream, Others
from attnserve._transports.in_flight import Call, Outcome
from attnserve._transports.locks import at_once
from attnserve._transports.thread_future import CallFuture, bring_replies, later

_PROMPT_BYTES: Final = 1 << 20
"""Up to this size, a message's results are made in gRPC's thread. Larger ones would keep that thread from its work."""


StreamFuture: TypeAlias = CallFuture[Response, Any]


def _settle(outcomes: Iterable[Outcome[StreamFuture]]) -> None:
    """Delivers outcomes. No lock may be held: callbacks may do anything. If a signal handler's exception ends this, in
    the main thread, another thread delivers the rest: callers in other threads wait for it.
    """
    rest = deque(outcomes)
    try:
        while rest:
            call, outcome = rest[0]
            call.owner.settle(outcome)
            rest.popleft()
    except BaseException:
        later(0.0, partial(_settle, rest))
        raise


class _Arrived(NamedTuple):
    """What is left to do after a message of replies."""

    outcomes: list[Outcome[StreamFuture]]
    """Outcomes to deliver."""
    leaving: list[Call[StreamFuture]]
    """Calls to move to other servers."""


class StreamTransport(BaseStream[StreamFuture]):
    """Calls over one stream at a time, with any number in flight."""

    def __init__(
        self,
        channel: Callable[[], grpc.Channel],
        lose_channel: Callable[[], object],
        policy: RetryPolicy,
        bearer: Bearer,
        replica: Replica,
        others: Others,
    ) -> None:
        """`channel` returns the channel for the next stream, or raises RuntimeError if there is no thread for it;
        `lose_channel` is called when gRPC had no thread for that channel.
        """
        super().__init__(policy, bearer, replica, others)
        self._channel = channel
        self._lose_channel = lose_channel
        self._lock = threading.Lock()
        self._writable = threading.Condition(self._lock)
        self._timer = threading.Condition(self._lock)
        self._rpcs: dict[int, Any] = {}
        self._watcher: threading.Thread | None = None

    def adopt(self, call: Call[StreamFuture]) -> None:
        """Takes over a call, and sends it. It may have been tried elsewhere; it is not sent if its caller gave it up in
        between, when no transport had it. ClientClosedError if this transport is closed, and RuntimeError if there is
        no thread to watch deadlines.
        """
        call.owner.withdraw, call.owner.transport = partial(self._withdraw, call), self
        outcomes: list[Outcome[StreamFuture]] = []
        try:
            with self._lock:
                if self._closed:
                    raise ClientClosedError()
                if not (given_up := call.owner.cancelled()):  # from here on, `_withdraw` finds the call
                    self._add(call, outcomes)
        finally:
            _settle(outcomes)
        if given_up:
            call.owner.settle(CancelledError())  # tells `concurrent.futures.wait` and `as_completed`

    def _add(self, call: Call[StreamFuture], outcomes: list[Outcome[StreamFuture]]) -> None:
        """Takes a call, and adds to the `outcomes` to deliver. The lock must be held."""
        self._multiplexer.add(call, time.monotonic())
        try:
            if self._watcher is None:
                with DelayedInterrupt():  # if a handler raised before it is noted, another would be started
                    self._watcher = self._begin_to_watch()
            self._advance(outcomes)
        except BaseException:  # no thread can be started, or a signal handler raises: nobody gets the future
            self._multiplexer.cancel(call)
            raise

    def leave(self) -> None:
        """Moves unsent calls to other servers, and ends the stream once all replies are in."""
        outcomes: list[Outcome[StreamFuture]] = []
        with self._lock:
            self._multiplexer.leave()
            leaving = self._multiplexer.take_leaving()
            self._advance(outcomes)
        self._part_with(leaving)
        _settle(outcomes)

    def close(self) -> None:
        """Gives up all calls and ends the streams."""
        with self._lock:
            self._closed = True
            outcomes = self._multiplexer.close()
            rpcs = list(self._rpcs.values())
            self._writable.notify_all()
            self._timer.notify_all()
        try:
            with DelayedInterrupt():  # also because gRPC's calls have finalizers: what is raised in one is lost
                while rpcs:
                    rpcs.pop().cancel()
        finally:
            _settle(outcomes)

    def _withdraw(self, call: Call[StreamFuture], *, waits: bool) -> bool:
        with DelayedInterrupt(), self._lock if waits else at_once(self._lock):
            withdrawn = self._multiplexer.cancel(call)
            self._writable.notify_all()
            self._timer.notify_all()
        return withdrawn

    def _advance(self, outcomes: list[Outcome[StreamFuture]]) -> None:
        """Opens a stream if one is needed, and wakes the threads that have something to do. Adds to the `outcomes` to
        deliver. The lock must be held.
        """
        if self._multiplexer.wants_stream and not self._closed:
            with DelayedInterrupt():  # or a handler's exception would look as if no stream could be opened
                self._begin_stream(outcomes)
                self._notify()
        else:
            self._notify()

    def _begin_stream(self, outcomes: list[Outcome[StreamFuture]]) -> None:
        stream = self._multiplexer.opened(time.monotonic())
        try:
            self._open(stream)
        except BaseException as error:
            outcomes += self._multiplexer.unopened(stream, error, time.monotonic())
            if (rpc := self._rpcs.pop(stream, None)) is not None:
                rpc.cancel()
            if not isinstance(error, Exception):
                raise

    def _notify(self) -> None:
        """Wakes the threads that have something to do."""
        if self._multiplexer.wants_writer:
            self._writable.notify_all()
        if (wakeup := self._multiplexer.wakeup) < self._watched:
            self._timer.notify()  # first: if a signal handler raises here, the next call notifies again
            self._watched = wakeup

    def _open(self, stream: int) -> None:
        """Opens a stream. Raises RuntimeError if there is no thread for it. Our own thread is started first, so that a
        lack of threads mostly shows before gRPC needs one: a channel for which gRPC had none is useless from then on.
        """
        opened: SimpleQueue[Any] = SimpleQueue()
        rpc = None
        try:
            threading.Thread(target=self._read, args=(stream, opened), name="attnserve-replies", daemon=True).start()
            arrived = partial(self._arrived, stream)
            attend_stream: Any = self._channel().stream_stream(SERVICE + "AttendStream", None, arrived)
            try:
                rpc = self._rpcs[stream] = attend_stream(self._messages(stream), metadata=self._bearer.metadata)
            except RuntimeError:
                self._lose_channel()
                raise
        finally:
            opened.put(rpc)

    def _begin_to_watch(self) -> threading.Thread:
        watcher = threading.Thread(target=self._watch, name="attnserve-deadlines", daemon=True)
        watcher.start()
        return watcher

    def _messages(self, stream: int) -> Iterator[bytes]:
        """The messages of a stream, as long as it is in use. gRPC asks for the next when it has sent the last."""
        while True:
            with self._lock:
                while (message := self._multiplexer.next_message(stream, time.monotonic())) is None:
                    if not self._multiplexer.writes(stream):
                        return
                    self._writable.wait()
            yield joined(message)

    def _read(self, stream: int, opened: SimpleQueue[Any]) -> None:
        """Takes replies until the stream ends, then handles its end. Does nothing if the stream was not opened."""
        if (rpc := opened.get()) is None:
            return
        bring_replies(self)
        status = Status()
        try:
            for arrived in rpc:
                if isinstance(arrived, Exception):
                    raise arrived
                try:
                    self._part_with(arrived.leaving)
                finally:
                    _settle(arrived.outcomes)
                del arrived  # keep nothing alive while awaiting the next message
        except grpc.RpcError as error:
            # Without the traceback, which would make a cycle: the error is `rpc`, and this frame holds that.
            status = status_from_rpc_error(error.with_traceback(None))
        except Exception as error:  # malformed replies, or whatever else prevents reading them: no memory, a bug
            self._distrust(stream, rpc, error)
        with self._lock:
            outcomes = self._multiplexer.broken(stream, status, time.monotonic())
            self._rpcs.pop(stream, None)  # missing if the opening failed
            self._advance(outcomes)
        _settle(outcomes)

    def _distrust(self, stream: int, rpc: Any, error: Exception) -> None:
        """Gives up a stream whose replies cannot be read, and the calls on it."""
        with self._lock:
            outcomes = self._multiplexer.distrusted(stream, unreadable(error))
        rpc.cancel()
        _settle(outcomes)

    def _arrived(self, stream: int, data: bytes) -> _Arrived | Exception:
        """Takes a message of replies. To gRPC this is the deserializer, which it calls in the thread that the message
        arrives in. Returns what is left for `_read` to do, or what went wrong.
        """
        try:
            replies, closing = decode_replies(data)
            leaving: list[Call[StreamFuture]] = []
            with self._lock:
                outcomes = self._multiplexer.resolve(stream, replies, time.monotonic())
                if closing:
                    self._multiplexer.asked_to_leave(stream, time.monotonic())
                    leaving = self._multiplexer.take_leaving()
                self._advance(outcomes)
            if len(data) <= _PROMPT_BYTES:
                outcomes = [each for each in outcomes if not each[0].owner.settle_silently(each[1])]
            return _Arrived(outcomes, leaving)
        except Exception as error:  # gRPC would only log that there was one
            return error

    def _watch(self) -> None:
        """Does what is due when it is due, whatever the streams do."""
        while True:
            with self._lock:
                while not self._closed and (pause := self._multiplexer.wakeup - time.monotonic()) > 0:
                    self._watched = self._multiplexer.wakeup
                    self._timer.wait(min(pause, threading.TIMEOUT_MAX) if pause < inf else None)
                if self._closed:
                    return
                outcomes = self._multiplexer.tick(time.monotonic())
                leaving = self._multiplexer.take_leaving()
                self._watched = self._multiplexer.wakeup
                self._advance(outcomes)
            self._part_with(leaving)
            _settle(outcomes)
            del outcomes, leaving
