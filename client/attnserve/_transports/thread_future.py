"""The future that callers of a threaded client get. The thread that brings the outcome settles it; any may cancel it.

In: an outcome, once; callbacks. Out: the result made from the outcome.

Two things may interrupt what happens here at any point:

- **A finalizer may cancel the future.** It cannot wait for a lock: what would have to is left to another thread (see
  `locks`).
- **A signal handler may raise.** The lock of `Future` is a `threading.Condition`, which such an exception may leave
  held (see `_interrupts`): the thread that brings the outcome would wait for it for ever. So cancelling, settling and
  adding a callback take that lock only while signals are delayed. Looking at a future, and waiting for it, take no
  lock: `_state` says that it is done only once the outcome is there.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Final, Generic, Protocol, TypeVar, cast

from attnserve._interrupts import DelayedInterrupt
from attnserve._tracing import CallSpan
from attnserve._transports.locks import LockHeld
from attnserve._transports.outcome import outcome_of

R = TypeVar("R")
T = TypeVar("T")

logger = logging.getLogger("attnserve")


class Withdraw(Protocol):
    """Makes the transport forget a call; false if the call already has its outcome."""

    def __call__(self, *, waits: bool) -> bool:
        """`waits` says whether it may wait for a lock. If not, but it would have to, it raises `LockHeld`."""


def _withdrawn_already(*, waits: bool) -> bool:
    """For a call that no transport has."""
    return False


class Calls(Protocol):
    """A client's calls."""

    @property
    def lacks_threads(self) -> bool:
        """Whether the threads that carry them exist no more. Then there is nothing to withdraw a call from."""


_CANCELLED: Final = ("CANCELLED", "CANCELLED_AND_NOTIFIED")
_DONE: Final = ("FINISHED", *_CANCELLED)
"""The states of a future that is done."""
_SETTLED: Final = ("FINISHED", "CANCELLED_AND_NOTIFIED")
"""The states that nothing follows."""


class _Thread(threading.local):
    transport: object = None
    """The transport whose replies this thread takes, if any. While the thread runs a callback, it takes none."""


_thread: Final = _Thread()


def bring_replies(transport: object) -> None:
    """Notes that this thread takes the replies of a transport."""
    _thread.transport = transport


class CallFuture(Future[T], Generic[R, T]):
    """The future result of a call. Cancelling it also tells the server, if there is time; a finalizer may cancel it."""

    def __init__(self, finish: Callable[[R], T]) -> None:
        super().__init__()
        self._finish = finish
        self._calling = threading.RLock()  # not a `Lock`: a finalizer that runs while it is held may add a callback
        self._calls_back = False
        """Whether a callback was ever added."""
        self.withdraw: Withdraw = _withdrawn_already
        """Makes the transport forget the call."""
        self.calls: Calls | None = None
        """The client's calls, kept from being garbage-collected before the reply arrives."""
        self.transport: object = None
        """The transport that carries the call, if that is a stream, until the future is settled."""
        self.span: CallSpan | None = None
        """The call's span, if it is traced."""
        self.timeout: float | None = None
        """Within how many seconds it is settled; None for no limit."""
        self._latch = threading.Lock()
        """Locked until the future is done. A thread that waits acquires it, and then releases it for the next."""
        self._latch.acquire()

    def __repr__(self) -> str:
        """Which one it is, and its state."""
        return f"<{type(self).__name__} at {id(self):#x} state={self._state.lower()}>"

    def done(self) -> bool:
        """Whether it has its outcome, or is cancelled."""
        return self._state in _DONE

    def cancelled(self) -> bool:
        """Whether it is cancelled."""
        return self._state in _CANCELLED

    def running(self) -> bool:
        """Whether its outcome is being made, so that it can no longer be cancelled."""
        return self._state == "RUNNING"

    def is_done_within(self, timeout: float | None) -> bool:
        """Waits until it is done, but not longer than some seconds. Returns whether it is. RuntimeError as for
        `result`.
        """
        if self._state in _DONE:
            return True
        self._check_wait(timeout)
        seconds = -1.0 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        try:
            self._latch.acquire(timeout=seconds)
        finally:
            # Let the next thread that waits pass, too. Not in a function: a handler could raise before it begins.
            if self._state in _DONE:
                try:  # noqa: SIM105
                    self._latch.release()
                except RuntimeError:
                    pass
        return self._state in _DONE

    def cancel(self) -> bool:
        """Gives up the call. False if it is too late."""
        if not self._is_cancelled_now():
            return False
        calls, self.calls, self.transport = self.calls, None, None
        span, self.span = self.span, None  # a second cancellation must not end it again
        withdraw, self.withdraw = self.withdraw, _withdrawn_already
        lacks_threads = sys.is_finalizing() if calls is None else calls.lacks_threads
        if lacks_threads:  # gRPC, asked to cancel, would wait for them
            if withdraw is not _withdrawn_already:
                self._tell_of_cancellation()
            return True
        try:
            self._give_up(withdraw, span, waits=False)
        except LockHeld:
            with suppress(RuntimeError):  # no thread can be started: the call goes on until its outcome arrives
                later(0.0, partial(self._give_up, withdraw, span, waits=True))
        return True

    def _is_cancelled_now(self) -> bool:
        """Does and returns what `Future.cancel` does, but calls the callbacks when signals are no longer delayed."""
        is_first = False
        try:
            with DelayedInterrupt(), self._condition:  # of two threads that cancel it, only one is the first
                is_first = self._state == "PENDING"
                return super().cancel()
        finally:
            if is_first and self._state in _CANCELLED:
                self._call_back()

    def _invoke_callbacks(self) -> None:
        """Lets those who wait pass. `Future` calls this as it becomes done. Its own version calls the callbacks, which
        may take their time; but signals are still delayed here, so `_call_back` calls them afterwards.
        """
        try:  # noqa: SIM105  # `suppress` takes longer, and this runs for each call
            self._latch.release()
        except RuntimeError:  # somebody who waited has released it already
            pass

    def _call_back(self) -> None:
        super()._invoke_callbacks()  # type: ignore[misc]  # a method of `Future` that has no types

    def _tell_of_cancellation(self) -> None:
        """Tells `concurrent.futures.wait` and `as_completed`."""
        with DelayedInterrupt():
            self.set_running_or_notify_cancel()

    def _give_up(self, withdraw: Withdraw, span: CallSpan | None, *, waits: bool) -> None:
        """Ends the span, and has the transport forget the call. `waits` as for `Withdraw`."""
        if span is not None:
            if not waits:  # span processors have locks, too
                raise LockHeld
            span.end(CancelledError())
        if withdraw(waits=waits):
            self._tell_of_cancellation()

    def result(self, timeout: float | None = None) -> T:
        """Waits for the result and returns it, or raises the error. RuntimeError in a callback that would hold up the
        reply.
        """
        error = self.exception(timeout)
        try:
            if error is None:
                return cast(T, self._result)
            raise error
        finally:
            del self, error  # breaks a cycle: a raised error holds this frame, and the future holds the error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the outcome, and returns the error; None if there is a result. RuntimeError as for `result`."""
        if not self.is_done_within(timeout):
            raise TimeoutError
        if self._state in _CANCELLED:
            raise CancelledError
        return self._exception

    def _check_wait(self, timeout: float | None) -> None:
        if self.transport is not None and self.transport is _thread.transport and timeout != 0 and not self.done():
            raise RuntimeError(
                "a callback of a client's future cannot wait for another call on the same stream, whose reply it holds "
                "up: wait in another thread"
            )

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Has a function called with the future when it is done; at once, in this thread, if it is done already."""
        with DelayedInterrupt():
            with self._calling:
                self._calls_back = True
            with self._condition:
                if self._state not in _DONE:
                    self._done_callbacks.append(fn)  # type: ignore[attr-defined]  # `Future` has no types for it
                    return
        try:  # not while signals are delayed: it may take its time
            fn(self)
        except Exception:
            logger.exception("a callback of a call that is done has failed")

    def settle_silently(self, outcome: R | Exception) -> bool:
        """Settles the future, unless it has callbacks or a span, which may do anything. Returns whether it did."""
        with self._calling:
            silent = not self._calls_back and self.span is None
            if silent:
                self.settle(outcome)
            return silent

    def settle(self, outcome: R | Exception) -> None:
        """Gives the future its result, or the error instead. To be called once; and again, if a signal handler's
        exception ended the first call.
        """
        self.calls = self.transport = None
        self.withdraw = _withdrawn_already  # drop the reference, which keeps alive all that the call holds
        with DelayedInterrupt():
            if self._state in _SETTLED or not (self._state == "RUNNING" or self.set_running_or_notify_cancel()):
                return
        result, error = outcome_of(self._finish, outcome)
        if self.span is not None:
            self.span.end(error)
        try:
            with DelayedInterrupt():
                if error is None:
                    self.set_result(result)
                else:
                    self.set_exception(error)
        finally:
            try:
                self._call_back()
            except KeyboardInterrupt:
                raise
            except BaseException:  # such as SystemExit: it must not end a thread that other calls need
                logger.exception("a callback of a call wanted to end its thread")

    def forsake(self, error: BaseException) -> None:
        """Gives up the future of a call that could not be made: ends its span, and drops its references, which may form
        cycles.
        """
        self.calls = self.transport = None
        self.withdraw = _withdrawn_already
        if self.span is not None:
            self.span.end(error)


def later(delay: float, function: Callable[[], object]) -> threading.Timer:
    """Calls a function after some seconds, in a thread of its own."""
    timer = threading.Timer(min(delay, threading.TIMEOUT_MAX), function)
    timer.daemon = True
    with DelayedInterrupt():  # `start` waits for an event: that the thread has begun
        timer.start()
    return timer
