"""How an asyncio client's calls travel: gRPC's asyncio channel, and the tasks around it.

In: encoded calls, all from one event loop. Out: settled futures. An open stream has two tasks: one writes what is ready
as soon as the last write is done, one reads replies. Either may be cancelled by code that cancels all tasks of the
loop; the stream then ends, and its calls are sent again. A timer of the loop serves deadlines and retries. Nothing is
decided here; see `multiplexer` and `_settings.retry`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from functools import partial
from math import inf
from typing import Any, Final, Generic, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.rpc.status_pb2 import Status

from attnserve._errors import ClientClosedError, UnavailableError, unreadable
from attnserve._memory import joined
from attnserve._requests.reply import Response, decode_replies
from attnserve._servers.replicas import Replica
from attnserve._settings.config import SERVICE
from attnserve._settings.credentials import Bearer
from attnserve._settings.retry import RetryPolicy
from attnserve._tracing import CallSpan
from attnserve._transports.connection import BaseStream, Others
from attnserve._transports.ending import Ending
from attnserve._transports.in_flight import Call, Outcome
from attnserve._transports.outcome import outcome_of

R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=asyncio.Future[Any])

_FAREWELL_S: Final = 0.2
"""How long closing waits for the server to end a stream on which no call is in flight. If we cancel it instead, gRPC
gets some events of it later, and prints an error if the loop is closed by then and another one is running.
"""


def _withdrawn_already() -> None:
    """For a call that no transport has."""


class CallFuture(asyncio.Future[T], Generic[R, T]):
    """The future result of a call. Cancelling it also tells the server; a finalizer may cancel it."""

    def __init__(self, finish: Callable[[R], T]) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._finish = finish
        self.withdraw: Callable[[], object] = _withdrawn_already
        """Makes the transport forget the call."""
        self.span: CallSpan | None = None
        """The call's span, if it is traced."""

    def cancel(self, msg: Any | None = None) -> bool:
        """Gives up the call. False if it is too late."""
        if not super().cancel(msg):
            return False
        withdraw, self.withdraw = self.withdraw, _withdrawn_already
        try:
            # Later, in the loop: here may be a finalizer, which interrupts anything, in any thread.
            self.get_loop().call_soon_threadsafe(self._give_up, withdraw)
        except RuntimeError:  # the loop is closed, and nothing is left to withdraw
            self._give_up(_withdrawn_already)
        return True

    def _give_up(self, withdraw: Callable[[], object]) -> None:
        if self.span is not None:
            self.span.end(CancelledError())
        withdraw()

    def settle(self, outcome: R | Exception) -> None:
        """Gives the future its result, or the error instead."""
        self.withdraw = _withdrawn_already  # drop the reference, which keeps alive all that the call holds
        if self.done():
            return
        result, error = outcome_of(self._finish, outcome)
        if self.span is not None and not self.done():
            self.span.end(error)
        try:
            if error is None:
                self.set_result(result)
            else:
                self.set_exception(error)
        except asyncio.InvalidStateError:  # a finalizer has cancelled it meanwhile
            return

    def forsake(self, error: BaseException) -> None:
        """Gives up the future of a call that could not be made: ends its span, and drops its references, which may form
        cycles.
        """
        self.withdraw = _withdrawn_already
        if self.span is not None:
            self.span.end(error)

    def left_by(self, task: asyncio.Task[None]) -> None:
        """The task that was to settle the future is over. Code that cancels all tasks of a loop cancels it, too."""
        if task.cancelled():
            self.settle(UnavailableError("the task that carried the call was cancelled"))


StreamFuture: TypeAlias = CallFuture[Response, Any]


def _settle(outcomes: Iterable[Outcome[StreamFuture]]) -> None:
    """Delivers outcomes."""
    for call, outcome in outcomes:
        call.owner.settle(outcome)


class StreamTransport(BaseStream[StreamFuture]):
    """Calls over one stream at a time, with any number in flight."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        policy: RetryPolicy,
        bearer: Bearer,
        replica: Replica,
        others: Others,
    ) -> None:
        super().__init__(policy, bearer, replica, others)
        self._attend_stream: Any = channel.stream_stream(SERVICE + "AttendStream", None, None)
        self._loop = asyncio.get_running_loop()
        self._writable = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def adopt(self, call: Call[StreamFuture]) -> None:
        """Takes over a call, and sends it. It may have been tried elsewhere; it is not sent if its caller gave it up in
        between, when no transport had it. ClientClosedError if this transport is closed.
        """
        if self._closed:
            raise ClientClosedError
        if call.owner.done():
            return
        call.owner.withdraw = partial(self._withdraw, call)
        self._multiplexer.add(call, time.monotonic())
        self._advance()

    def leave(self) -> None:
        """Moves unsent calls to other servers, and ends the stream once all replies are in."""
        self._multiplexer.leave()
        self._part_with(self._multiplexer.take_leaving())
        self._advance()

    async def close(self) -> None:
        """Gives up all calls and ends the streams."""
        self._closed = True
        given_up = self._multiplexer.close()
        if self._loop.is_closed():  # nothing of it can be told anything, or ends
            self._tasks.clear()
            self._attend_stream = None
            return
        _settle(given_up)
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        if tasks and not given_up:
            self._writable.set()
            await asyncio.wait(tasks, timeout=_FAREWELL_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._attend_stream = None  # it holds the channel: see `task_connection`

    def _withdraw(self, call: Call[StreamFuture]) -> None:
        self._multiplexer.cancel(call)
        self._advance()

    def _advance(self) -> None:
        """Opens a stream if one is needed, wakes its writer if that has something to do, and sets the timer."""
        if self._closed:
            return
        if self._multiplexer.wants_stream:
            self._open()
        if self._multiplexer.wants_writer:
            self._writable.set()
        if self._multiplexer.wakeup < self._watched:
            self._watched = self._multiplexer.wakeup
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(max(0.0, self._watched - time.monotonic()), self._tick)

    def _open(self) -> None:
        """Opens a stream. If it cannot be opened, the calls that were ready for it are sent again, or fail."""
        stream = self._multiplexer.opened(time.monotonic())
        try:
            rpc = self._attend_stream(metadata=self._bearer.metadata)
            ending = Ending(rpc)
        except Exception as error:  # the channel is closed, or there is no memory: `submit` may have returned
            _settle(self._multiplexer.unopened(stream, error, time.monotonic()))
            return
        writing = self._loop.create_task(self._write(stream, rpc))
        reading = self._loop.create_task(self._read(stream, rpc, ending))
        self._tasks.update((writing, reading))
        writing.add_done_callback(partial(self._written, rpc))
        reading.add_done_callback(partial(self._ended, stream, rpc))

    async def _write(self, stream: int, rpc: Any) -> None:
        """Sends the messages of a stream, as long as it is in use."""
        try:
            while self._multiplexer.writes(stream):
                message = self._multiplexer.next_message(stream, time.monotonic())
                if message is None:
                    self._writable.clear()
                    await self._writable.wait()
                else:
                    await rpc.write(joined(message))
            await rpc.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the stream has ended, and the reading task says why
        except Exception as error:
            self._distrust(stream, rpc, error)

    def _written(self, rpc: Any, writing: asyncio.Task[None]) -> None:
        """The writing task of a stream is over."""
        self._tasks.discard(writing)
        if writing.cancelled():  # there may be more to send, and nothing else would send it
            rpc.cancel()

    async def _read(self, stream: int, rpc: Any, ending: Ending) -> Status:
        """Takes replies until the stream ends, and returns its status."""
        try:
            while (data := await rpc.read()) is not grpc.aio.EOF:
                replies, closing = decode_replies(data)
                outcomes = self._multiplexer.resolve(stream, replies, time.monotonic())
                try:
                    if closing:
                        self._multiplexer.asked_to_leave(stream, time.monotonic())
                        self._part_with(self._multiplexer.take_leaving())
                    self._advance()
                finally:
                    _settle(outcomes)
                del data, outcomes, replies  # keep nothing alive while awaiting the next message
        except grpc.RpcError as error:
            return ending.status(error)
        return Status()

    def _ended(self, stream: int, rpc: Any, reading: asyncio.Task[Status]) -> None:
        """Handles the end of a stream or of its reading task, even if that was cancelled before it began."""
        self._tasks.discard(reading)
        status = Status()
        if reading.cancelled():  # by other code; or by gRPC, after `_written` cancelled the stream
            rpc.cancel()
        elif (error := reading.exception()) is not None:  # malformed replies, or whatever else prevents reading them
            self._distrust(stream, rpc, error)
        else:
            status = reading.result()
        outcomes = self._multiplexer.broken(stream, status, time.monotonic())
        self._writable.set()  # its writing task ends, too
        self._advance()
        _settle(outcomes)

    def _distrust(self, stream: int, rpc: Any, error: BaseException) -> None:
        """Gives up a stream that cannot be read or written, and the calls on it."""
        _settle(self._multiplexer.distrusted(stream, unreadable(error)))
        rpc.cancel()

    def _tick(self) -> None:
        """Does what is due, whatever the streams do."""
        outcomes = self._multiplexer.tick(time.monotonic())
        self._watched = inf
        self._timer = None
        try:
            self._part_with(self._multiplexer.take_leaving())
            self._advance()
        finally:
            _settle(outcomes)


def unended(tasks: Iterable[F]) -> list[F]:
    """The tasks or futures, without those of a closed loop: these never end, and cancelling one raises RuntimeError."""
    return [task for task in tasks if not task.get_loop().is_closed()]


def later(delay: float, function: Callable[[], object]) -> asyncio.TimerHandle:
    """Calls a function after some seconds, in the running loop."""
    return asyncio.get_running_loop().call_later(delay, function)
