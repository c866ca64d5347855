"""Which of several servers has a cache, asked one by one; and what to raise if not all have answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from attnserve._errors import AttnServeError, DeadlineExceededError, NotFoundError, UnavailableError
from attnserve._requests import cache_requests
from attnserve._requests.cache_requests import CacheInfo
from attnserve._settings.config import Timeout

if TYPE_CHECKING:
    from attnserve import _task_calls as task_calls
    from attnserve import _thread_calls as thread_calls

_OUT_OF_REACH: Final = (UnavailableError, DeadlineExceededError)
"""Errors of one server by which nothing is known of what it has."""


def find(calls: thread_calls.Calls, name: str, timeout: Timeout) -> tuple[CacheInfo, str | None]:
    """Describes one cache, and gives the address of its server if the client knows several. Raises what `Caches.get`
    does.
    """
    failures: list[AttnServeError] = []
    for home in calls.servers.homes(calls.seconds(timeout)):
        try:
            return calls.ask(cache_requests.get(name), timeout, home), home
        except (NotFoundError, *_OUT_OF_REACH) as error:
            failures.append(error)
    raise in_vain(failures)


async def find_soon(calls: task_calls.Calls, name: str, timeout: Timeout) -> tuple[CacheInfo, str | None]:
    """The same for asyncio."""
    failures: list[AttnServeError] = []
    for home in await calls.servers.homes_soon(calls.seconds(timeout)):
        try:
            return await calls.ask(cache_requests.get(name), timeout, home), home
        except (NotFoundError, *_OUT_OF_REACH) as error:
            failures.append(error)
    raise in_vain(failures)


def in_vain(failures: Sequence[AttnServeError]) -> AttnServeError:
    """The error to raise of those of several servers: that one is out of reach, if one is."""
    return next((failure for failure in failures if isinstance(failure, _OUT_OF_REACH)), failures[-1])
