"""Deletes several caches at once: those that a client has, on their servers and in their turn; names, on every server.

In: caches and names, as the caller passed them. Out: one request to a server for as many as it takes; and how many
were there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

from attnserve._caching import plans
from attnserve._caching.finding import in_vain
from attnserve._caching.groups import of_at_most
from attnserve._caching.plans import Plan
from attnserve._caching.state import CacheState, Handle
from attnserve._caching.turns import Turns
from attnserve._errors import AttnServeError, InvalidRequestError
from attnserve._numbers import shown
from attnserve._requests import arguments, cache_requests
from attnserve._settings.config import Timeout

if TYPE_CHECKING:
    from attnserve import _task_calls as task_calls
    from attnserve import _thread_calls as thread_calls

_PORTION: Final = 500
"""How many caches one request deletes at most: servers bound the length of messages, and may bound names, of which so
many are 13 KB.
"""

HandlesOrNames: TypeAlias = Handle | str | Iterable[Handle | str]
"""One cache, as the caller has it or by name, or several."""


def delete(calls: thread_calls.Calls, caches: HandlesOrNames, timeout: Timeout) -> int:
    """Does what `Caches.delete` says, and returns and raises the same."""
    seconds = calls.seconds(timeout)
    states, names = _checked(calls.turns, caches)
    failures: list[AttnServeError] = []
    deleted = 0
    for server in _by_server(states, seconds):
        with _noting(failures):
            for plan in server:
                deleted += calls.perform(plan)
    requests = [cache_requests.delete(some) for some in of_at_most(_PORTION, names)]
    for home in calls.servers.homes(seconds) if requests else ():
        with _noting(failures):
            for rpc in requests:
                deleted += calls.ask(rpc, seconds, home)
    if failures:
        raise in_vain(failures)
    return deleted


async def delete_soon(calls: task_calls.Calls, caches: HandlesOrNames, timeout: Timeout) -> int:
    """The same for asyncio."""
    seconds = calls.seconds(timeout)
    states, names = _checked(calls.turns, caches)
    failures: list[AttnServeError] = []
    deleted = 0
    for server in _by_server(states, seconds):
        with _noting(failures):
            for plan in server:
                deleted += await calls.carry_out(plan)
    requests = [cache_requests.delete(some) for some in of_at_most(_PORTION, names)]
    for home in await calls.servers.homes_soon(seconds) if requests else ():
        with _noting(failures):
            for rpc in requests:
                deleted += await calls.ask(rpc, seconds, home)
    if failures:
        raise in_vain(failures)
    return deleted


@contextmanager
def _noting(failures: list[AttnServeError]) -> Iterator[None]:
    """Around the requests to one server: the first that fails is the last, for each might take the whole timeout. Other
    servers are asked all the same.
    """
    try:
        yield
    except AttnServeError as error:
        failures.append(error)


def _checked(turns: Turns, caches: HandlesOrNames) -> tuple[Sequence[CacheState], Sequence[str]]:
    """The states of the caches, each once, and the names. InvalidRequestError for anything else."""
    every = caches if isinstance(caches, Iterable) and not isinstance(caches, str) else (caches,)
    states: dict[CacheState, None] = {}
    names: list[str] = []
    for each in every:
        if isinstance(each, Handle):
            states[plans.own(turns, each)] = None
        elif isinstance(each, str):
            names.append(arguments.text("caches", each))
        else:
            raise InvalidRequestError(f"caches: expected caches or their names, found {shown(each)}", field="caches")
    return list(states), names


def _by_server(states: Sequence[CacheState], timeout: float | None) -> Iterator[Iterator[Plan[int]]]:
    """For each server, the deletions of what it has."""
    for home in dict.fromkeys(state.home for state in states):
        there = [state for state in states if state.home == home]
        yield (plans.delete(some, timeout) for some in of_at_most(_PORTION, there))
