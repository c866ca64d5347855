"""A server that is killed under load, and started again."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

import numpy as np

from attnserve import AttnServeError, Cache, Client, NotFoundError
from benchmarks.chaos.callers import TRANSPORTS, Tally, in_tasks, in_threads
from benchmarks.chaos.outcome import Figure, exactly
from benchmarks.chaos.questions import Array
from benchmarks.chaos.rolling import address_of
from benchmarks.chaos.victim import Victim, start_all

PROMISE: Final = (
    "SIGKILL under load: calls that only compute continue on another server, and not one fails. Callers that have no "
    "other server are told that it is unavailable, within their retries; nobody hangs; when it is back they go on by "
    "themselves. Its caches are gone, and it says so."
)
CALLERS: Final = 2


def run(minutes: float) -> list[Figure]:
    """Runs the experiment."""
    del minutes
    with ExitStack() as stack:
        victims = [Victim(), Victim()]
        for victim in victims:
            stack.push(victim)
        start_all(victims)
        return _under_load(*victims)


def _under_load(victim: Victim, other: Victim) -> list[Figure]:
    both, alone = Tally(), Tally()
    with ExitStack() as stack:
        for address, tally in ((address_of([victim, other]), both), (victim.address, alone)):
            for transport in TRANSPORTS:
                client = stack.enter_context(Client(address, transport=transport))
                stack.enter_context(in_threads(client, CALLERS, tally))
                stack.enter_context(in_tasks(address, CALLERS, tally, transport=transport))
        client = stack.enter_context(Client(victim.address))
        cache = client.create_cache(2, 8)
        token = np.ones((2, 1, 8), np.float32)
        cache.append(token, token)
        both.until(200)
        alone.until(100)
        victim.kill()
        both.until(200)
        victim.start()
        alone.until(100)
        forgotten = _append(cache, token)
    unavailable = alone.errors.pop("UnavailableError", 0)
    return [
        Figure("two servers: calls answered", both.right, at_least=400),
        exactly("two servers: calls that failed", both.failed, 0),
        Figure("one server: calls answered", alone.right, at_least=200),
        Figure("one server: calls told that it is unavailable", unavailable, at_least=1),
        exactly("one server: calls that failed otherwise", alone.failed, 0),
        exactly("wrong answers", both.wrong + both.anothers + alone.wrong + alone.anothers, 0),
        exactly("appends to its cache told NOT_FOUND", isinstance(forgotten, NotFoundError), 1),
    ]


def _append(cache: Cache, token: Array) -> AttnServeError | None:
    """The error of an append, if it has one."""
    try:
        cache.append(token, token)
    except AttnServeError as error:
        return error
    return None
