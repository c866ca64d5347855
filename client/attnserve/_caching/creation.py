"""The creation of a cache whose caller may never get it: it was given up, or timed out, or the connection broke once
too often. Such a cache would stay until its lease ends, if it has one, and nobody would know its name.

In: the request of a creation or a fork, the servers that were asked, how it ended. Out: requests to those servers to
delete what they may have made, and not to make it later. No I/O: the clients send them, and wait for none.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from sys import float_info
from types import TracebackType
from typing import Any, Final, Self

from attnserve._errors import (
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    UnavailableError,
)
from attnserve._requests import cache_requests
from attnserve._rpc import Rpc

_REFUSALS: Final = (
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
)
"""A server that answers with one of these has made nothing, except perhaps at an earlier attempt: it may refuse before
it checks for that."""


def _until_room(error: OverloadedError | UnavailableError) -> float:
    """In how many seconds a server may have room; very many if it does not say, infinite if it is out of reach."""
    if isinstance(error, UnavailableError):
        return inf
    return float_info.max if error.retry_delay is None else error.retry_delay


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
        self._asked: list[str | None] = []
        self.failure: OverloadedError | UnavailableError = UnavailableError("there is no server")
        """The error if no server has made the cache: that of the one that has room soonest, if any is full."""

    def at(self, home: str | None) -> None:
        """Notes that another server is about to be asked."""
        self._asked.append(home)

    def failed(self, error: OverloadedError | UnavailableError) -> None:
        """Notes that the last server is full or out of reach, and another is to be asked."""
        self._note(error)
        self.failure = min(error, self.failure, key=_until_room)

    def done(self) -> None:
        """Notes that the last server has made the cache, and its reply has arrived."""
        self._asked.pop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, GeneratorExit):  # a discarded coroutine, perhaps when its loop is closed
            return
        self._note(error)
        for home in self._asked:
            self._send(cache_requests.give_up(self._rpc), home)

    def _note(self, error: BaseException | None) -> None:
        # Only a server's error has details, and this one came from the server that was asked last.
        if isinstance(error, _REFUSALS) and error.details and not error.resent:
            self._asked.pop()
