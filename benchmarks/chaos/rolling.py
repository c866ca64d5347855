"""Three servers that are started again, one after the other, under load."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import Final

from attnserve import AsyncClient, Client
from benchmarks.chaos.callers import Tally, in_tasks, in_threads
from benchmarks.chaos.outcome import Figure, exactly
from benchmarks.chaos.victim import Victim, start_all

PROMISE: Final = (
    "A rolling restart of three servers under load, through the SDK (for threads and for asyncio, streams and unary "
    "calls): not one call fails."
)
SERVERS: Final = 3
CALLERS: Final = 2
DELAY: Final = "2s"
"""Long enough for clients to be told that a server is not ready, on a machine that is busy."""


def address_of(victims: Sequence[Victim]) -> str:
    """The address of all of them together."""
    return "ipv4:" + ",".join(victim.address for victim in victims)


def run(minutes: float) -> list[Figure]:
    """Does it."""
    del minutes
    with ExitStack() as stack:
        victims = [Victim("--drain-delay", DELAY) for _ in range(SERVERS)]
        for victim in victims:
            stack.push(victim)
        start_all(victims)
        tallies = asyncio.run(_under_load(victims))
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


async def _under_load(victims: Sequence[Victim]) -> dict[str, Tally]:
    """Starts each again while callers of four kinds are busy; what came of their calls."""
    tallies = {f"{kind}, {transport}": Tally() for kind in ("threads", "asyncio") for transport in ("stream", "unary")}
    address = address_of(victims)
    async with AsyncExitStack() as stack:
        for name, tally in tallies.items():
            kind, transport = name.split(", ")
            if kind == "threads":
                client = stack.enter_context(Client(address, transport=transport))  # type: ignore[arg-type]
                stack.enter_context(in_threads(client, CALLERS, tally))
            else:
                async_client = await stack.enter_async_context(AsyncClient(address, transport=transport))  # type: ignore[arg-type]
                await stack.enter_async_context(in_tasks(async_client, CALLERS, tally))
        for victim in victims:
            await asyncio.to_thread(_start_again, victim, [*tallies.values()])
    return tallies


def _start_again(victim: Victim, tallies: Sequence[Tally]) -> None:
    for tally in tallies:
        tally.until(50)
    victim.terminate()
    victim.wait()
    for tally in tallies:
        tally.until(50)  # by the others
    victim.start()
