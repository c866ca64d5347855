"""The future that callers of a client for threads get: settled by whatever thread brings the outcome, cancelled by any.

In: an outcome, once; callbacks. Out: the result that is made of it. Who cancels may be a finalizer, in the middle of
anything: what would have to wait for a lock is left to another thread (`locks`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Generic, Protocol, TypeVar

from attnserve._tracing import CallSpan
from attnserve._transports.locks import Held

R = TypeVar("R")
T = TypeVar("T")

logger = logging.getLogger("attnserve")


class Withdraw(Protocol):
    """Has a call forgotten; false if the call has its outcome already."""

    def __call__(self, *, waits: bool) -> bool:
        """`Held` if it would have to wait for a lock, and must not."""


def _withdrawn_already(*, waits: bool) -> bool:
    return False


class CallFuture(Future[T], Generic[R, T]):
    """The result of a call, to come. Cancelling it has the server told, if there is time; a finalizer may do it."""

    def __init__(self, finish: Callable[[R], T]) -> None:
        super().__init__()
        self._finish = finish
        self._calling = threading.RLock()  # what is collected while a result is made may ask to be called back
        self._calls_back = False
        self.withdraw: Withdraw = _withdrawn_already
        """Has the transport forget the call."""
        self.calls: object = None
        """All calls of the client, which must not be collected before the reply is there."""
        self.span: CallSpan | None = None
        """The call's span, if it is traced."""

    def cancel(self) -> bool:
        """Gives up the call. False if it is too late."""
        if not super().cancel():
            return False
        self.calls = None
        span, self.span = self.span, None  # who cancels once more ends it no more
        withdraw, self.withdraw = self.withdraw, _withdrawn_already
        try:
            self._give_up(withdraw, span, waits=False)
        except Held:
            with suppress(RuntimeError):  # there is no thread for that: it ends when its outcome is there
                later(0.0, partial(self._give_up, withdraw, span, waits=True))
        return True

    def _give_up(self, withdraw: Withdraw, span: CallSpan | None, *, waits: bool) -> None:
        if span is not None:
            if not waits:  # who takes spans has locks, too
                raise Held
            span.end(CancelledError())
        if withdraw(waits=waits):
            self.set_running_or_notify_cancel()  # for who waits for several futures

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Has a function called with the future when it is done."""
        with self._calling:
            self._calls_back = True
        super().add_done_callback(fn)

    def settle_silently(self, outcome: R | Exception) -> bool:
        """Settles it, unless that would call others, who may do anything. Whether it has."""
        with self._calling:
            silent = not self._calls_back and self.span is None
            if silent:
                self.settle(outcome)
            return silent

    def settle(self, outcome: R | Exception) -> None:
        """Gives the future its result, or the error instead. To be called once."""
        self.calls = None
        self.withdraw = _withdrawn_already  # and not what holds what the call holds
        if not self.set_running_or_notify_cancel():
            return
        error: Exception | None = None
        if isinstance(outcome, Exception):
            error = outcome
        else:
            try:
                result = self._finish(outcome)
            except Exception as raised:  # whatever it is (no memory on the device, too), it is the caller's to see
                error = raised
        if self.span is not None:
            self.span.end(error)
        try:
            if error is None:
                self.set_result(result)
            else:
                self.set_exception(error)
        except SystemExit:  # which is not to end a thread that others need
            logger.exception("a callback of a call wanted to end its thread")


def later(delay: float, function: Callable[[], object]) -> threading.Timer:
    """Calls a function after some seconds, in a thread of its own."""
    timer = threading.Timer(min(delay, threading.TIMEOUT_MAX), function)
    timer.daemon = True
    timer.start()
    return timer
