"""Three servers that are started again, one after the other, under load."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from attnserve import Client
from benchmarks.chaos.callers import TRANSPORTS, Tally, in_tasks, in_threads, until_all
from benchmarks.chaos.outcome import Figure, exactly
from benchmarks.chaos.victim import Victim, start_all

PROMISE: Final = (
    "A rolling restart of three servers under load, through the SDK (for threads and for asyncio, streams and unary "
    "calls): not one call fails."
)
SERVERS: Final = 3
CALLERS: Final = 2
DELAY: Final = "1s"
"""How long a server takes calls after it is told to end: enough for clients to notice, even on a busy machine."""


def address_of(victims: Sequence[Victim]) -> str:
    """One address that lists all servers."""
    return "ipv4:" + ",".join(victim.address for victim in victims)


def run(minutes: float) -> list[Figure]:
    """Runs the experiment."""
    del minutes
    with ExitStack() as stack:
        victims = [Victim("--drain-delay", DELAY) for _ in range(SERVERS)]
        for victim in victims:
            stack.push(victim)
        start_all(victims)
        tallies = _under_load(victims)
        for victim in victims:
            victim.terminate()
    return [
        figure
        for name, tally in tallies.items()
        for figure in (
            Figure(f"{name}: calls answered", tally.right, at_least=100 * SERVERS),
            exactly(f"{name}: calls that failed", tally.failed, 0),
            exactly(f"{name}: wrong answers", tally.wrong + tally.anothers, 0),
        )
    ] + [exactly("servers that did not end well", sum(victim.ends != [0, 0] for victim in victims), 0)]


def _under_load(victims: Sequence[Victim]) -> dict[str, Tally]:
    """Restarts each server while callers of four kinds are busy; returns the outcomes of their calls."""
    tallies: dict[str, Tally] = {}
    with ExitStack() as stack:
        for transport in TRANSPORTS:
            tally = tallies[f"threads, {transport}"] = Tally()
            client = stack.enter_context(Client(address_of(victims), transport=transport))
            stack.enter_context(in_threads(client, CALLERS, tally))
            tally = tallies[f"asyncio, {transport}"] = Tally()
            stack.enter_context(in_tasks(address_of(victims), CALLERS, tally, transport=transport))
        for victim in victims:
            _start_again(victim, [*tallies.values()])
    return tallies


def _start_again(victim: Victim, tallies: Sequence[Tally]) -> None:
    until_all(tallies, 50)
    victim.terminate()
    victim.wait()
    until_all(tallies, 50)  # by the others
    victim.start()
