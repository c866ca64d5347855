"""One operation on caches, from its place in the queue to its result: it waits for its turn, then takes its steps one
after the other.

In: a `Plan`. Out: its result, or the error. There are two ways to carry out a plan:

- A `Transaction` is for callers who get a future. Whatever brings a reply, a thread or the event loop, takes the next
  step.
- `perform` is for a thread that waits for the result. That thread takes the steps itself, so that no other has to be
  woken.

The clients provide a way to send a request and get the reply, or a future of it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from math import inf
from typing import Any, Final, Generic, Protocol, TypeVar

from attnserve._caching.plans import Plan, Request
from attnserve._caching.turns import Turn, Turns
from attnserve._errors import AttnServeError, no_reply
from attnserve._settings.config import GRACE_SECONDS

T = TypeVar("T")


class AnyFuture(Protocol):
    """What the futures of threads and of asyncio have in common."""

    def add_done_callback(self, function: Callable[[Any], object], /) -> object:
        """Calls a function with the future when it is done."""

    def cancel(self) -> bool:
        """Gives up the call."""


class Transaction(Turn, Generic[T]):
    """A plan that is being carried out. Once it is over, nothing refers back to it: what it held is freed at once."""

    def __init__(
        self,
        turns: Turns,
        plan: Plan[T],
        send: Callable[[Request, float | None], AnyFuture],
        settle: Callable[[T | Exception], object],
    ) -> None:
        """`send` sends a request with a timeout in seconds; `settle` takes the outcome, once."""
        super().__init__([cache.line for cache in plan.caches], plan.alone, _deadline(plan))
        self._turns: Final = turns
        self._steps: Final = plan.steps
        self._timeout: Final = plan.timeout
        self._send: Final = send
        self._settle: Final = settle
        self._lock: Final = threading.Lock()
        self._answer: AnyFuture | None = None
        """The future of the request that is in flight."""
        self._beginner: int | None = None
        """The thread that is in `begin`, where an interrupt is for the caller."""
        self._begun = False
        """Whether the first step has been taken."""
        self._over = False
        """Whether the operation has ended, or was given up; nothing else may end it then."""

    def begin(self) -> None:
        """Enters the queues of its caches."""
        try:
            self._beginner = threading.get_ident()
            self._turns.take(self)
            self._beginner = None
        except BaseException:  # an interrupt: nobody gets the future
            self.cancel()
            raise

    def cancel(self) -> bool:
        """Gives up the operation, and tells the server. False if it already has its outcome."""
        with self._lock:
            if self._over:
                return False
            self._over = True
            answer, self._answer = self._answer, None
        if answer is not None:
            answer.cancel()
        self._turns.leave(self)
        return True

    def start(self) -> Callable[[], None] | None:
        """Takes the first step. Returns what ends the operation, if there is no other step. Called again, it ends the
        operation, unless that has its request in flight or is over.
        """
        if not self._begun:
            return self._take_step(partial(next, self._steps))
        with self._lock:
            if self._over or self._answer is not None:
                return None
            self._over = True
        # An interrupt, meant for other code, has ended the first step.
        return partial(self._end, CancelledError())

    def expire(self) -> None:
        """Ends the operation, unless it has begun."""
        with self._lock:
            if self._begun or self._over:
                return
            self._over = True
        self._end(no_reply(self._timeout))

    def _answered(self, answer: Any) -> None:
        if answer.cancelled():  # by `cancel`, which ends the operation
            return
        error = answer.exception()
        end = self._take_step(
            partial(self._steps.send, answer.result()) if error is None else partial(self._steps.throw, error)
        )
        if end is not None:
            end()

    def _take_step(self, resume: Callable[[], Request]) -> Callable[[], None] | None:
        """Resumes the plan, up to its next request, which is sent, or to its end. Returns what ends the operation; None
        if it goes on, or is over already.
        """
        answer: AnyFuture | None = None
        outcome: Any = None
        with self._lock:
            if self._over:
                return None
            self._begun = True
            try:
                request = resume()
                answer = self._send(request, _remaining(self.deadline, self._timeout))
            except StopIteration as end:
                outcome = end.value
            except Exception as error:
                if self._beginner == threading.get_ident() and not isinstance(error, AttnServeError):
                    raise  # it may be an interrupt, which is for the caller
                outcome = error.with_traceback(None)  # it would keep this frame alive, and all that it holds
            self._answer = answer  # and drop the previous one, whose callback refers to this object
            self._over = answer is None
        if answer is None:
            return partial(self._end, outcome)
        answer.add_done_callback(self._answered)  # without the lock: it may be done already
        return None

    def _end(self, outcome: T | Exception) -> None:
        self._turns.leave(self)
        self._settle(outcome)


class _Place(Turn):
    """The turn of a waiting thread."""

    def __init__(self, plan: Plan[Any]) -> None:
        super().__init__([cache.line for cache in plan.caches], plan.alone, _deadline(plan))
        self._news: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True when the turn has come, False when its deadline has passed."""

    def start(self) -> None:
        """Lets the thread begin."""
        self._news.put(True)

    def expire(self) -> None:
        """Makes the thread give up, unless it has begun."""
        self._news.put(False)

    def has_come(self) -> bool:
        """Waits for the turn, and returns whether it came in time."""
        patience = None
        if self.deadline < inf:
            left = self.deadline + GRACE_SECONDS - time.monotonic()
            patience = min(max(0.0, left), threading.TIMEOUT_MAX)
        try:
            return self._news.get(timeout=patience)
        except queue.Empty:  # the timer that should have made it expire has not run
            return False


def perform(turns: Turns, plan: Plan[T], ask: Callable[[Request, float | None], Any]) -> T:
    """Carries out a plan. `ask` sends a request with a timeout in seconds; it returns the reply or raises its error."""
    place = _Place(plan)
    try:
        turns.take(place)
        if not place.has_come():
            raise no_reply(plan.timeout)
        resume: Callable[[], Request] = partial(next, plan.steps)
        while True:
            request = resume()
            remaining = _remaining(place.deadline, plan.timeout)
            try:
                resume = partial(plan.steps.send, ask(request, remaining))
            except Exception as error:
                resume = partial(plan.steps.throw, error)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        try:  # nothing may come before this: an interrupt may come after any call
            turns.leave(place)
        except BaseException:  # an interrupt, perhaps before `leave` began; repeating that is safe
            turns.leave(place)
            raise
        finally:
            resume = partial(next, plan.steps)  # break the reference cycle between this frame and an error


def _deadline(plan: Plan[Any]) -> float:
    """The deadline of a plan that begins now, in seconds of `time.monotonic`."""
    return inf if plan.timeout is None else time.monotonic() + plan.timeout


def _remaining(deadline: float, timeout: float | None) -> float | None:
    """The seconds left until a deadline; None for no limit. DeadlineExceededError if none are."""
    if deadline == inf:
        return None
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise no_reply(timeout)
    return remaining
