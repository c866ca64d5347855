"""When a call is sent again, and after how long. The one place that decides it, for every transport.

The rule: attention is pure, so that a call that may or may not have run can be sent again; what is appended to a cache
comes with an id and the length that the cache is expected to have, so that a second attempt is recognised
(`_caching.plans`). It is, up to `retries` times and within its deadline, when the server is unavailable (a reply or a
status UNAVAILABLE, or what gRPC says of connections that fail), when the stream that carried it breaks for a reason
that is not the call's, or when the server has no room for it now, and then no sooner than it says. Nothing else is
retried: an error that would come again, and a call that changes the server. Of what full servers refused, no more is
sent again than is answered, or those who suffer from an overload would make it last.
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
        grpc.StatusCode.OK,  # the server ended the stream in good order, with calls unanswered
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
    )
)

_PASSES: Final = frozenset(("OVERLOADED", "SHARE_EXCEEDED"))
"""The reasons of an overload that passes by itself."""


def breaks_only_the_stream(code: int) -> bool:
    """Whether a stream that ended with this status code may be followed by one that works: what servers and proxies
    report when they go away.
    """
    return code in _OF_THE_CONNECTION


def _of_the_connection(status: Status) -> bool:
    """Whether the status of a call that travelled by itself tells of the connection, or of a server that ends.

    What the service says comes with details. Without them it is gRPC's word: INTERNAL or UNKNOWN where a connection
    carried what is not HTTP/2, CANCELLED where a server ended before it began the call.
    """
    unavailable = status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    return unavailable or (breaks_only_the_stream(status.code) and not status.details)


BUDGET_WINDOW_S: Final = 10
BUDGET_ALWAYS: Final = 10
"""So many calls in that time may be sent again whatever was answered: somebody with few calls has few answers."""


class RetryBudget:
    """How many calls that full servers refused a client may send again: in `BUDGET_WINDOW_S` as many as were answered,
    and `BUDGET_ALWAYS`. Where most are answered that is all of them; where few are, those who come back would but keep
    the servers busy with refusing. (Retry budgets, as in Finagle and in the SRE book, chapter 22.)

    For any number of threads, without a lock: at worst some counts of one second are lost.
    """

    def __init__(self) -> None:
        self._seconds = [-BUDGET_WINDOW_S] * BUDGET_WINDOW_S
        self._balances = [0] * BUDGET_WINDOW_S
        """Answers less what was sent again, in each of the last seconds."""

    def answered(self, calls: int, now: float) -> None:
        """Counts calls that servers have answered."""
        second = int(now)
        slot = second % BUDGET_WINDOW_S
        if self._seconds[slot] != second:
            self._seconds[slot], self._balances[slot] = second, 0
        self._balances[slot] += calls

    def take(self, now: float) -> bool:
        """Whether a call may be sent again; counts it if so."""
        oldest = int(now) - BUDGET_WINDOW_S
        recent = zip(self._seconds, self._balances, strict=True)
        if BUDGET_ALWAYS + sum(balance for second, balance in recent if second > oldest) <= 0:
            return False
        self.answered(-1, now)
        return True


class Again(NamedTuple):
    """A call is to be sent again."""

    pause: float
    """In so many seconds."""
    refusal: AttnServeError | None = None
    """The error with which it ends instead if then there is no budget for it: a server had no room."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with jitter, so that the callers of a server that went away do not return all at once."""

    retries: int
    """How often a call is sent again at most."""
    first_delay: float = 0.1
    """The longest that the first retry waits, in seconds; each further one waits up to twice as long."""
    longest_delay: float = 5.0
    """The longest that any retry waits, in seconds."""
    random: Callable[[], float] = field(default=random.random, repr=False)
    """Numbers from 0 to 1; a retry waits for half its delay and this share of the other half."""
    budget: RetryBudget = field(default_factory=RetryBudget, repr=False)
    """Of what full servers refuse."""

    def delay(self, attempts: int, now: float, deadline: float) -> float | None:
        """How long to wait before the next attempt, in seconds, after so many; None to give up."""
        if attempts > self.retries:
            return None
        longest = min(self.longest_delay, self.first_delay * 2.0 ** min(attempts - 1, 30))
        delay = longest * (0.5 + 0.5 * self.random())
        return delay if now + delay < deadline else None

    def after_overload(self, error: AttnServeError, attempts: int, now: float, deadline: float) -> float | None:
        """How long to wait, in seconds, after so many attempts of which a full server refused the last; None to give
        up, or if the error is another. A server that is full again is left alone for twice as long as it says.
        """
        if not isinstance(error, OverloadedError) or error.reason not in _PASSES or attempts > self.retries:
            return None
        told = (error.retry_delay or 0.0) * 2.0 ** min(attempts - 1, 30)
        delay = max(told, self.first_delay / 10) * (1.0 + 0.5 * self.random())
        return delay if told <= self.longest_delay and now + delay < deadline else None

    def after(
        self, status: Status, attempts: int, now: float, deadline: float, resent: bool = False
    ) -> Again | AttnServeError:
        """What follows a call that has failed so many times, now with a status: another attempt, or the error to give
        up with. `resent` says that an attempt before this one may have been carried out.
        """
        if not _of_the_connection(status):
            error = error_from_status(status, resent=resent)
            pause = self.after_overload(error, attempts, now, deadline)
            return error if pause is None else Again(pause, error)
        delay = self.delay(attempts, now, deadline)
        return given_up(status, attempts) if delay is None else Again(delay)


NO_RETRIES: Final = RetryPolicy(0)
"""For calls that must not be sent again."""


def given_up(status: Status, attempts: int) -> AttnServeError:
    """The error of a call that is not sent again, after so many attempts of which the last ended with a status."""
    error = error_from_status(status) if status.code else UnavailableError("the server ended the stream")
    tried = "" if attempts == 1 else f" (attempt {attempts})"
    return UnavailableError(f"{error.code.name}: {error}{tried}", code=error.code, details=error.details)
