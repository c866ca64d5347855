"""Log lines for requests that were refused or failed: one for each, until there are too many of a kind.

In: the error that a request ends with, and whose request it was. Out: a line with the reason and the request's id; for
each reason at most a few per second, and then a line that says how many were left out. No contents of requests are in
them, and what a caller names (an id, a cache) is cut short.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
from collections.abc import Callable, Iterable
from functools import cache
from time import monotonic
from typing import Any, Final

import grpc
from grpc import aio

from attnserve_server.errors import RequestError
from attnserve_server.no_room import NoRoom
from attnserve_server.observability.rate_limit import RateLimit

logger = logging.getLogger(__name__)

LINES_PER_SECOND: Final = 5.0
"""For one reason, in the long run."""
BURST: Final = 20.0
SUMMARY_AFTER: Final = 1.0
"""Seconds from the first line left out to the line that says how many were."""
REQUEST_ID: Final = "x-request-id"
MAX_ID: Final = 128

_NOT_FOR_LOGS: Final = re.compile(r"[^\x21-\x7e]")
_LEVELS: Final = {
    grpc.StatusCode.INTERNAL: logging.ERROR,
    grpc.StatusCode.RESOURCE_EXHAUSTED: logging.WARNING,
    grpc.StatusCode.UNAVAILABLE: logging.WARNING,
    grpc.StatusCode.CANCELLED: logging.NOTSET,
}
"""Mistakes of callers are INFO. A request that its caller gives up is no refusal."""

_PROCESS: Final = secrets.token_hex(3)
"""In the ids of this process, so that those of several replicas differ."""
_numbers = itertools.count(1)


def request_id_of(context: aio.ServicerContext[Any, Any]) -> str:
    """An RPC's id in the log."""
    return request_id("rpc", context.invocation_metadata() or ())


def request_id(kind: str, fields: Iterable[tuple[str, str | bytes]]) -> str:
    """A request's id in the log: the one that its caller gave in the metadata or header field `x-request-id`, else a
    number of our own, behind what tells this process from others.
    """
    for key, value in fields:
        if key == REQUEST_ID and isinstance(value, str) and value:
            return _NOT_FOR_LOGS.sub("?", value[:MAX_ID])
    return f"{kind}-{_PROCESS}-{next(_numbers)}"


@cache
def _level_of(error: type[RequestError | NoRoom]) -> int:
    """The log level of a kind of error. Cached: hashing a status code is a call into Python, and floods come here."""
    return _LEVELS.get(error.code, logging.INFO)


class Refusals:
    """The lines of one server. Lives on the event loop."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._limits: dict[str, RateLimit] = {}
        self._summaries: dict[str, tuple[asyncio.TimerHandle, int]] = {}
        """The summaries that are due, by their reasons: when, and at which level."""

    def note(
        self, operation: str, error: RequestError | NoRoom, request_id: Callable[[], str], caller: str | None
    ) -> None:
        """Writes a line for a request that ends with an error, unless there have been too many for its reason.

        `request_id` is called only if a line is written.
        """
        level = _level_of(type(error))  # type: ignore[arg-type]  # mypy takes no union of classes to be hashable
        if not level or not logger.isEnabledFor(level):
            return
        now = self._clock()
        limit = self._limits.get(error.reason)
        if limit is None:  # reasons are the server's own words, and few
            limit = self._limits[error.reason] = RateLimit(LINES_PER_SECOND, BURST, now)
        if not limit.take(now):
            if error.reason not in self._summaries:
                timer = asyncio.get_running_loop().call_later(SUMMARY_AFTER, self._summarise, error.reason, level)
                self._summaries[error.reason] = timer, level
            return
        fields = {"operation": operation, "code": error.code.name, "reason": error.reason, "request_id": request_id()}
        if caller is not None:
            fields["caller"] = caller
        logger.log(level, "refused: %s", error.message, extra=fields)

    def close(self) -> None:
        """Writes the summaries that are still due."""
        for reason, (timer, level) in list(self._summaries.items()):
            timer.cancel()
            self._summarise(reason, level)

    def _summarise(self, reason: str, level: int) -> None:
        del self._summaries[reason]
        limit = self._limits[reason]
        left_out, limit.left_out = limit.left_out, 0
        logger.log(
            level, "refused %d more for the same reason", left_out, extra={"reason": reason, "left_out": left_out}
        )
