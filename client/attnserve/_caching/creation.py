"""The making of a cache, of which nobody may ever hear: its caller gave it up, or its time was over, or the connection
broke once too often. Such a cache would be there until its lease ends, if it has one, and nobody could name it.

In: the request of a creation or a fork, the servers that were asked, how it ended. Out: requests to those servers to
delete what they may have made, and to make it no more. No I/O: the clients send them, and wait for none.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from attnserve._errors import (
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
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
"""A server that answers so has made nothing, unless at an earlier attempt: it may refuse before it looks for that."""


class Making:
    """One cache in the making, at one server or at several in turn, as a context manager.

        with Making(rpc, send) as making:
            making.at(home)
            info = ask(rpc, home)
            making.done()

    Each server that may have made it, and is not the one that did, is told to give it up.
    """

    def __init__(self, rpc: Rpc[Any, Any], send: Callable[[Rpc[Any, Any], str | None], object]) -> None:
        """`send` sends a request to the server at an address, or to any, and waits for nothing."""
        self._rpc: Final = rpc
        self._send: Final = send
        self._asked: list[str | None] = []

    def at(self, home: str | None) -> None:
        """Another server is about to be asked."""
        self._asked.append(home)

    def done(self) -> None:
        """The last one has made it, and its answer is there."""
        self._asked.pop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, GeneratorExit):  # a coroutine that is thrown away, perhaps when its loop is closed
            return
        # Only what a server says has details, and what ended this is what the last one said.
        if isinstance(error, _REFUSALS) and error.details and not error.resent:
            self._asked.pop()
        for home in self._asked:
            self._send(cache_requests.give_up(self._rpc), home)
