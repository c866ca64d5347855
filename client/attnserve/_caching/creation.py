"""The creation of a cache, such that none is left behind if the caller does not get it.

A creation may be given up, time out, or lose its connection once too often, and the server may have made the cache all
the same. That would stay until its lease ends, or for ever if it has none, and nobody would know its name.

In: the request of a creation, or of one or several forks, the servers that there are, how each attempt ended. Out:
which server to ask next, and after how long; at the end, a request to each server that may have made what was asked
for, to delete it, or not to make it if the creation arrives later. No I/O: the clients send these requests, and do not
wait for the replies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from math import inf
from sys import float_info
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from attnserve._errors import (
    AttnServeError,
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    UnavailableError,
)
from attnserve._requests import cache_requests
from attnserve._rpc import Rpc
from attnserve._settings.retry import Again, RetryPolicy

_REFUSALS: Final = (
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
)
"""A server that answers with one of these has made nothing in this attempt. It may have in an earlier one, since it may
refuse before it looks for that.
"""


def _until_room(error: OverloadedError | UnavailableError) -> float:
    """In how many seconds a server may have room; very many if it does not say, infinite if it is out of reach."""
    if isinstance(error, UnavailableError):
        return inf
    return float_info.max if error.retry_delay is None else error.retry_delay


class Attempt(NamedTuple):
    """The decision to ask a server."""

    address: str
    timeout: float | None
    """Within how many seconds it is to answer, the pause included."""
    again: Again
    """After which pause, and which refusal."""


class _Failure(NamedTuple):
    """How the last of some attempts at a server ended, and when."""

    error: OverloadedError | UnavailableError
    at: float
    attempts: int
    was_sent: bool
    """False if the retry budget did not allow the last attempt: its error is then the refusal before it."""


class Making:
    """The creation of one cache, tried at one server or at several in turn, as a context manager.

        with Making(rpc, send) as making:
            making.at(home)
            info = ask(rpc, home)
            making.done()

    Each server that may have made the cache is told to give it up, except the one that answered with it.
    """

    def __init__(self, rpc: Rpc[Any, Any], send: Callable[[Rpc[Any, Any], str | None], object]) -> None:
        """`send` sends a request to the server at an address, or to any, without waiting for the reply."""
        self._rpc: Final = rpc
        self._send: Final = send
        self._last: str | None = None
        self._suspected = False
        """Whether an earlier attempt at the last server may have made the cache."""
        self._perhaps: set[str | None] = set()
        """The servers that may have made it."""
        self._failures: dict[str | None, _Failure] = {}
        self._refusal: AttnServeError | None = None
        """The refusal that the last attempt followed, with which it ends if it is not allowed (`Again.refusal`)."""

    def attempts(self, servers: Iterable[str], policy: RetryPolicy, timeout: float | None) -> Iterator[Attempt]:
        """What to try until an attempt succeeds. First each server once, since another may have room now. Then, again
        and again, the one to be asked soonest, of those that were full or out of reach. The policy's number of retries
        bounds the retries at all full servers together, and those at each server that is out of reach. Each server has
        `timeout` seconds in all.
        """
        deadlines: dict[str | None, float] = {}
        for address in servers:
            deadlines[address] = inf if timeout is None else time.monotonic() + timeout
            self.at(address)
            yield Attempt(address, timeout, Again())
        waits = policy.retries
        while True:
            soonest: Attempt | None = None
            now = time.monotonic()
            for home, (error, at, attempts, _) in self._failures.items():
                if isinstance(error, UnavailableError):
                    refusal, delay = None, policy.delay(attempts, at, deadlines[home])
                else:
                    refusal, delay = error, policy.after_overload(error, attempts, at, deadlines[home])
                if delay is None or (refusal is not None and not waits):
                    continue
                pause = max(0.0, at + delay - now)
                in_time = now + pause < deadlines[home]  # another server's attempts may have taken the time
                if in_time and (soonest is None or pause < soonest.again.pause):
                    left = None if timeout is None else deadlines[home] - now
                    soonest = Attempt(str(home), left, Again(pause, refusal))
            if soonest is None:
                return
            waits -= soonest.again.refusal is not None
            self.at(soonest.address)
            self._refusal = soonest.again.refusal
            yield soonest
            if not self._failures[soonest.address].was_sent:  # nor will any other retry be
                return

    @property
    def failure(self) -> OverloadedError | UnavailableError:
        """The error if no server has made the cache: that of the one that has room soonest, if any is full."""
        errors = (failure.error for failure in self._failures.values())
        return min(errors, key=_until_room, default=UnavailableError("there is no server"))

    def at(self, home: str | None) -> None:
        """Notes that a server is about to be asked."""
        self._last, self._suspected = home, home in self._perhaps
        self._perhaps.add(home)

    def failed(self, error: OverloadedError | UnavailableError) -> None:
        """Notes that the last server is full or out of reach, and another is to be asked, or the same again."""
        self._note(error)
        before = self._failures.get(self._last)
        attempts, was_sent = 1 if before is None else before.attempts + 1, error is not self._refusal
        self._failures[self._last] = _Failure(error, time.monotonic(), attempts, was_sent)

    def done(self) -> None:
        """Notes that the last server has made the cache, and its reply has arrived."""
        self._perhaps.discard(self._last)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, GeneratorExit):  # a discarded coroutine, perhaps when its loop is closed
            return
        self._note(error)
        for home in self._perhaps:
            self._send(cache_requests.give_up(self._rpc), home)

    def _note(self, error: BaseException | None) -> None:
        if isinstance(error, AttnServeError) and not isinstance(error, UnavailableError):
            error.resent = error.resent or self._suspected
        # Only a server's error has details, and this one came from the server that was asked last.
        if isinstance(error, _REFUSALS) and error.details and not error.resent:
            self._perhaps.discard(self._last)
