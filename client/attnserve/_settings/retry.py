"""When a call is sent again, and after how long: decided here alone, for every transport.

**What may be sent again.** Attention is pure, so a call that may or may not have run can be repeated. Operations that
change caches have ids, by which the server recognises a second attempt (`_caching.plans`). Loading and unloading layers
is not repeated, nor is a call whose error would recur.

**When.** A call is sent again, up to `retries` times and within its deadline, if

- the server is unavailable: a reply or a status UNAVAILABLE, or gRPC's errors for failed connections;
- its stream breaks, and the call is not the cause;
- the server has no room for it now; then no sooner than the server says.

**Full servers.** Calls on a stream wait for room within their deadlines, however often they are refused, and no more
are sent than the server has had room for (`_transports.window`). With `retries=0` they do not wait, but fail. Unary
calls do not wait in line. Two kinds of calls have a `Budget` instead, since they would prolong the overload:

- unary calls that were refused, and are sent again;
- new unary calls, and new calls of any kind without retries, to a server that has said that it has no room, until it
  should have some (`_servers.room`). Those beyond the budget are treated as if the server had refused them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import grpc
from google.rpc.status_pb2 import Status

from attnserve._errors import AttnServeError, OverloadedError, UnavailableError, error_from_status

_OF_THE_CONNECTION: Final = frozenset(
    code.value[0]
    for code in (
        grpc.StatusCode.OK,  # the server ended the stream normally, with calls unanswered
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
    )
)

_PASSES: Final = frozenset(("OVERLOADED", "SHARE_EXCEEDED", "TOO_MANY_STREAMS", "TOO_MANY_UNSENT", "TOO_MANY_UNREAD"))
"""The reasons of overloads that pass by themselves."""


def room_after(error: AttnServeError | None) -> float | None:
    """After how many seconds the server that ended a call with this error should have room for others. None if it did
    not say that it lacks room, or lacks it for caches only.
    """
    if not isinstance(error, OverloadedError) or error.reason not in _PASSES or error.bound == "caches":
        return None
    return error.retry_delay


def breaks_only_the_stream(code: int) -> bool:
    """Whether a new stream may work after one that ended with this status code: servers and proxies report such codes
    when they go away.
    """
    return code in _OF_THE_CONNECTION


def _of_the_connection(status: Status) -> bool:
    """Whether the status of a unary call means that the connection failed or the server is going away.

    Statuses from the service have details. Those without come from gRPC: INTERNAL or UNKNOWN if the connection carried
    something other than HTTP/2, CANCELLED if a server ended before it began the call.
    """
    unavailable = status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    return unavailable or (breaks_only_the_stream(status.code) and not status.details)


BUDGET_WINDOW_S: Final = 10
BUDGET_ALWAYS: Final = 10
"""Calls allowed in that time however many were answered: a client with few calls gets few answers."""


class Budget:
    """How many calls a client may send that full servers will probably refuse: in `BUDGET_WINDOW_S` as many as were
    answered, plus `BUDGET_ALWAYS`. If most calls are answered, that is all of them; if few are, more would only keep
    the servers busy with refusing. (Client-side throttling and retry budgets, as in the SRE book, chapters 21 and 22,
    and in Finagle.)

    For any number of threads, without a lock: at worst some counts of one second are lost.
    """

    def __init__(self) -> None:
        self._seconds = [-BUDGET_WINDOW_S] * BUDGET_WINDOW_S
        self._balances = [0] * BUDGET_WINDOW_S
        """Answers minus what was taken, in each of the last seconds."""

    def answered(self, calls: int, now: float) -> None:
        """Counts calls that servers have answered."""
        second = int(now)
        slot = second % BUDGET_WINDOW_S
        if self._seconds[slot] != second:
            self._seconds[slot], self._balances[slot] = second, 0
        self._balances[slot] += calls

    def take(self, now: float) -> bool:
        """Whether a call may be sent; if so, it is counted."""
        oldest = int(now) - BUDGET_WINDOW_S
        recent = zip(self._seconds, self._balances, strict=True)
        if BUDGET_ALWAYS + sum(balance for second, balance in recent if second > oldest) <= 0:
            return False
        self.answered(-1, now)
        return True


class Again(NamedTuple):
    """The decision to send a call again, or for the first time."""

    pause: float = 0.0
    """After how many seconds."""
    refusal: AttnServeError | None = None
    """If a server had no room: the error with which the call ends if the budget does not allow a retry then."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with jitter, so that the callers of a server that went away do not all return at once. A call
    that another server should answer tries that one first, without waiting.
    """

    retries: int
    """How often a call is sent again at most. Not counted are refusals of calls on a stream, which wait for room; but
    if this is 0, they do not wait.
    """
    first_delay: float = 0.1
    """The longest that the first retry waits, in seconds; each further one waits up to twice as long."""
    longest_delay: float = 5.0
    """The longest that any retry waits, in seconds."""
    random: Callable[[], float] = field(default=random.random, repr=False)
    """Numbers from 0 to 1; a retry waits for half its delay and this share of the other half."""
    retried: Budget = field(default_factory=Budget, repr=False)
    """The budget for calls that full servers have refused."""
    begun: Budget = field(default_factory=Budget, repr=False)
    """The budget for new calls to servers that have said that they are full. It is apart from that of retries, which
    have waited already.
    """

    def answered(self, calls: int, now: float) -> None:
        """Counts calls that servers have answered."""
        self.retried.answered(calls, now)
        self.begun.answered(calls, now)

    def delay(self, attempts: int, now: float, deadline: float, *, elsewhere: bool = False) -> float | None:
        """How long to wait before the next attempt, in seconds, after `attempts` failed ones; None to give up.
        `elsewhere`: it may go to another server, which should answer; the first retry then does so at once.
        """
        if attempts > self.retries:
            return None
        if elsewhere and attempts == 1:
            return 0.0 if now < deadline else None
        longest = min(self.longest_delay, self.first_delay * 2.0 ** min(attempts - 1, 30))
        delay = longest * (0.5 + 0.5 * self.random())
        return delay if now + delay < deadline else None

    def after_overload(self, error: AttnServeError, attempts: int, now: float, deadline: float) -> float | None:
        """How long to wait, in seconds, if a full server refused the last of `attempts`; None to give up, or for any
        other error. The delay that the server asks for is doubled with each further attempt.
        """
        if not isinstance(error, OverloadedError) or error.reason not in _PASSES:
            return None
        if attempts > self.retries:
            return None
        told = (error.retry_delay or 0.0) * 2.0 ** min(attempts - 1, 30)
        delay = max(told, self.first_delay / 10) * (1.0 + 0.5 * self.random())
        return delay if told <= self.longest_delay and now + delay < deadline else None

    def until_room(self, error: AttnServeError, attempts: int, now: float, deadline: float) -> float | None:
        """How long a call on a stream is to wait, in seconds, if a full server refused the last of `attempts`. None if
        it is not to wait, because there are no retries or its time does not suffice. Otherwise the number of retries is
        no bound: the stream decides how many calls it sends to a full server (`_transports.window`).
        """
        if not self.retries or not isinstance(error, OverloadedError):
            return None
        told = error.retry_delay or 0.0
        doubled = max(told * 2.0 ** min(attempts - 1, 30), self.first_delay / 10)
        delay = min(doubled, max(told, self.longest_delay)) * (1.0 + 0.5 * self.random())
        return delay if now + delay < deadline else None

    def after(
        self, status: Status, attempts: int, now: float, deadline: float, *, resent: bool, elsewhere: bool = False
    ) -> Again | AttnServeError:
        """What follows the last of `attempts` failed ones, which ended with `status`: another attempt, or the error to
        give up with. `resent` says whether an attempt before this one may have run; `elsewhere` is as in `delay`.
        """
        if not _of_the_connection(status):
            error = error_from_status(status, resent=resent)
            pause = self.after_overload(error, attempts, now, deadline)
            return error if pause is None else Again(pause, error)
        delay = self.delay(attempts, now, deadline, elsewhere=elsewhere)
        return given_up(status, attempts) if delay is None else Again(delay)


NO_RETRIES: Final = RetryPolicy(0)
"""For calls that must not be sent again."""


def given_up(status: Status, attempts: int) -> AttnServeError:
    """The error of a call that is not sent again, after `attempts` of which the last ended with `status`."""
    error = error_from_status(status) if status.code else UnavailableError("the server ended the stream")
    tried = "" if attempts == 1 else f" (attempt {attempts})"
    return UnavailableError(f"{error.code.name}: {error}{tried}", code=error.code, details=error.details)
