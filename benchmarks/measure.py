"""One workload measured by every way of calling, round after round, so that drift of the machine affects all alike.

In: a workload, a server that computes nothing, peers, and how long and often to measure. Out: a `WorkloadResult`. The
servers are started anew, so that their memory is for this workload, and every way is checked before it is timed.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Final

import numpy as np

from attnserve_server.host.cpus import usable_cpus
from benchmarks.arrivals import Arrivals, ClosedLoop, OpenLoop
from benchmarks.loads import LOADS, Load, in_process
from benchmarks.meters import WARM_UP, Check, Clock, Measurement, Meter, OpenClock
from benchmarks.peers.peer import Peer
from benchmarks.plain import Array
from benchmarks.resident import weights
from benchmarks.results import FIGURES, GOAL_S, NOISY, OPEN_FIGURES, Figure, Figures, Memory, OpenResult, WorkloadResult
from benchmarks.servers import Running, attnserve, running
from benchmarks.workload import Workload

RoundFigures = dict[str, float | None]
"""`FIGURES` by name; None for those that do not exist."""

IN_PROCESS: Final = "torch in process"
TRANSPORT_LOADS: Final = ("stream", "unary")
"""The loads that transport alone is measured with."""
SERVICE: Final = "attnserve, stream"
"""The way of calling the service that is compared with others: encoded messages on one stream."""
NO_COMPUTE: Final = "transport, stream"
"""The same to a server that computes nothing."""

ATTEMPTS: Final = 3
"""How often a measurement is made at most, if other processes take too much of the machine meanwhile."""

SHARES: Final = (0.5, 0.9)
"""The shares of capacity at which open loops run."""
OPEN_SECONDS: Final = 4.0
"""Open loops run longer than closed ones by this factor, since they are measured for their tails."""


@dataclass(frozen=True)
class Way:
    """A way of calling: the server, or None for torch in process; the load generator; the peer, if it is a peer's."""

    server: Running | None
    load: Load
    peer: Peer | None = None
    values: bool = True
    """Whether the values of its answers are checked; a server that computes nothing gets only the shape right."""
    prepared: bool = False
    """Whether the workload has to prepare the server."""
    refused: Counter[str] = field(default_factory=Counter)
    """The server's refusals while it was measured, and how often each was given."""


@dataclass(frozen=True)
class Timing:
    """How long each measurement takes, in seconds, and the number of rounds."""

    seconds: float
    rounds: int


def measure(
    loop: asyncio.Runner,
    workload: Workload,
    echo: Running,
    timing: Timing,
    *,
    peers: Sequence[Peer] = (),
    opened: bool = False,
    server_flags: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> WorkloadResult:
    """Checks and measures a workload, with open loops, too, if `opened`.

    All asynchronous code shares one event loop, as grpc.aio requires. Raises WrongAnswerError; `progress` is told what
    is done next.
    """
    with servers(workload, peers, server_flags, progress) as (found_servers, ways):
        idle = {name: server.resident_bytes() for name, server in found_servers.items()}
        ways = {IN_PROCESS: Way(None, in_process), **_transport(echo), **ways}
        expected = cache(workload.expected)
        for name, way in ways.items():
            progress(f"checking {name}")
            check(loop, workload, name, way, expected)
        found: dict[str, dict[str, list[float | None]]] = defaultdict(lambda: defaultdict(list))
        for round_number in range(1, timing.rounds + 1):
            for name, way in ways.items():
                progress(f"round {round_number} of {timing.rounds}: {name}")
                timed = partial(closed, loop, way, workload, timing.seconds)
                for figure, value in quietest(timed).items():
                    found[name][figure].append(value)
        figures = {name: _medians(each, FIGURES) for name, each in found.items()}
        loops = _open_loops(loop, workload, ways, figures, timing, progress) if opened else []
        peaks = {name: server.peak_resident_bytes() for name, server in found_servers.items()}
    return WorkloadResult(
        workload.name,
        workload.description,
        workload.in_flight,
        workload.mean_tokens,
        {name: Memory(idle[name], peaks[name]) for name in idle},
        figures,
        loops,
        {name: dict(way.refused) for name, way in ways.items() if way.refused},
    )


@contextmanager
def servers(
    workload: Workload,
    peers: Sequence[Peer],
    server_flags: Sequence[str],
    progress: Callable[[str], None],
    cache_bytes: int | None = None,
    tuned: str | None = None,
) -> Iterator[tuple[dict[str, Running], dict[str, Way]]]:
    """Runs the service, and the peers if they can serve a workload: the servers by name, and the ways of calling them.

    `cache_bytes` is the service's pool of caches; by default what the workload needs. Peers have their settings for the
    workload that is called `tuned`; by default for this one.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attnserve-bench-")))
        pool = str(workload.cache_bytes if cache_bytes is None else cache_bytes)
        flags = [*server_flags, "--cache-bytes", pool, *workload.server_flags(directory)]
        progress("starting the service")
        service = stack.enter_context(running(*attnserve(*flags)))
        found = {"attnserve": service}
        ways = {f"attnserve, {name}": Way(service, load, prepared=True) for name, load in LOADS.items()}
        for peer in peers if workload.peers else ():
            progress(f"starting {peer.name}")
            settings = peer.settings_for(tuned or workload.name)
            found[peer.name] = stack.enter_context(serving(peer, workload, settings, directory))
            for name, load in peer.loads.items():
                ways[f"{peer.name}, {name}"] = Way(found[peer.name], load, peer)
        yield found, ways


@contextmanager
def serving(peer: Peer, workload: Workload, settings: Mapping[str, int], directory: Path) -> Iterator[Running]:
    """Runs a peer that can serve a workload, until the block ends; its files go below a directory."""
    own = directory / peer.name
    own.mkdir()
    file = own / "weights.npz"
    np.savez(file, **weights())  # type: ignore[arg-type]
    with peer.serve(workload.plain(0), settings, file, own) as server:
        yield server


def _transport(echo: Running) -> dict[str, Way]:
    return {f"transport, {name}": Way(echo, LOADS[name], values=False) for name in TRANSPORT_LOADS}


def baseline(way: str) -> str:
    """The transport-only way that a way is compared with."""
    return "transport, unary" if way.endswith("unary") else NO_COMPUTE


def check(
    loop: asyncio.Runner, workload: Workload, name: str, way: Way, expected: Callable[[int], Array] | None = None
) -> None:
    """Compares all answers with the exact ones, which `expected` may cache. Raises WrongAnswerError."""
    prepare(workload, way)
    peer = way.peer
    output = None if peer is None else lambda number, reply: peer.output(workload.output_shape(number), reply)
    meter = Check(workload, name, values=way.values, output=output, expected=expected)
    run(loop, way, workload, ClosedLoop(workload.numbers, workload.in_flight), meter)


def prepare(workload: Workload, way: Way) -> None:
    """Lets a workload prepare the service; the other servers have no state."""
    if way.prepared and way.server is not None:
        workload.prepare(way.server.address)


def run(loop: asyncio.Runner, way: Way, workload: Workload, arrivals: Arrivals, meter: Meter) -> None:
    """Sends a workload until the meter says stop."""
    address = "" if way.server is None else way.server.address
    if (pending := way.load(address, workload, arrivals, meter)) is not None:
        loop.run(_awaited(pending))


async def _awaited(pending: Awaitable[None]) -> None:
    await pending


def quietest(timed: Callable[[], RoundFigures]) -> RoundFigures:
    """The first measurement on a sufficiently quiet machine, or else the one for which the machine was quietest."""

    def others(figures: RoundFigures) -> float:
        return figures["other_cores"] or 0.0

    best = timed()
    for _ in range(ATTEMPTS - 1):
        if others(best) <= NOISY * usable_cpus():
            break
        best = min(best, timed(), key=others)
    return best


def closed(loop: asyncio.Runner, way: Way, workload: Workload, seconds: float) -> RoundFigures:
    """The figures of one round of one way, in a closed loop."""
    prepare(workload, way)
    batches = _Batches(way, workload)
    clock = Clock(workload, seconds, way.server.cpu if way.server else lambda: 0.0)
    run(loop, way, workload, ClosedLoop(workload.numbers, workload.in_flight), clock)
    way.refused.update(clock.measurement.refused)
    return _figures(clock.measurement, way, batches.mean())


def _open_loops(
    loop: asyncio.Runner,
    workload: Workload,
    ways: dict[str, Way],
    figures: dict[str, Figures],
    timing: Timing,
    progress: Callable[[str], None],
) -> list[OpenResult]:
    """The service and each peer at shares of their own capacity, and the service also at shares of the best peer's."""
    capacity = {name: each["requests_per_second"] for name, each in figures.items()}
    rates = {name: figure.median for name, figure in capacity.items() if figure is not None}
    fastest: dict[str, str] = {}
    for name, way in ways.items():
        server = name.partition(",")[0]
        if way.values and way.server is not None and (server not in fastest or rates[name] > rates[fastest[server]]):
            fastest[server] = name
    fastest["attnserve"] = SERVICE
    peers = [name for server, name in fastest.items() if server != "attnserve"]
    runs = [(name, name, share) for name in fastest.values() if rates[name] for share in SHARES]
    if peers := [name for name in peers if rates[name]]:
        best = max(peers, key=rates.__getitem__)
        runs += [(SERVICE, best, share) for share in SHARES]
    found: dict[tuple[str, str, float], dict[str, list[float | None]]] = defaultdict(lambda: defaultdict(list))
    for round_number in range(timing.rounds):
        for name, of, share in runs:
            progress(f"open loop, round {round_number + 1} of {timing.rounds}: {name}, {share:.0%} of {of}")
            timed = partial(
                opened_loop, loop, ways[name], workload, timing.seconds * OPEN_SECONDS, share * rates[of], round_number
            )
            for figure, value in quietest(timed).items():
                found[name, of, share][figure].append(value)
    return [OpenResult(*key, _medians(each, OPEN_FIGURES)) for key, each in found.items()]


def opened_loop(
    loop: asyncio.Runner, way: Way, workload: Workload, seconds: float, rate: float, seed: int
) -> RoundFigures:
    """The figures of one round of one way, in an open loop of `seconds` with `rate` requests per second."""
    prepare(workload, way)
    batches = _Batches(way, workload)
    warm_up = seconds * WARM_UP
    arrivals = OpenLoop(workload.numbers, rate, warm_up + seconds, seed)
    clock = OpenClock(workload, arrivals, warm_up, way.server.cpu if way.server else lambda: 0.0)
    run(loop, way, workload, arrivals, clock)
    way.refused.update(clock.measurement.refused)
    latencies = np.asarray(clock.measurement.latencies)
    return {
        **_figures(clock.measurement, way, batches.mean()),
        "offered_per_second": (len(latencies) + clock.measurement.refused.total()) / seconds,
        "goodput_per_second": float((latencies <= GOAL_S).sum()) / max(seconds, clock.measurement.seconds),
        "late_us": float(np.percentile(arrivals.late, 99)) * 1e6,
    }


class _Batches:
    """The batches that a server computes from now on, including those of the warm-up."""

    def __init__(self, way: Way, workload: Workload) -> None:
        self._way, self._in_process = way, float(workload.in_flight)
        self._before = way.server.batches() if way.server else (0.0, 0.0)

    def mean(self) -> float | None:
        """The mean number of requests in a batch; None if nothing counts them."""
        if self._way.server is None:
            return self._in_process
        count, requests = (
            after - before for after, before in zip(self._way.server.batches(), self._before, strict=True)
        )
        return requests / count if count else None


def _figures(found: Measurement, way: Way, batch_requests: float | None) -> RoundFigures:
    """FIGURES of a measurement; latencies and costs per request are None if all requests were refused."""
    count = len(found.latencies)
    p50, p99, p999 = (
        float(np.percentile(found.latencies, percent)) * 1e6 if count >= least else None
        for percent, least in ((50, 1), (99, 100), (99.9, 1000))
    )
    return {
        "requests_per_second": count / found.seconds,
        "tokens_per_second": found.tokens / found.seconds,
        "p50_us": p50,
        "p99_us": p99,
        "p999_us": p999,
        "server_cpu_us": found.server_cpu / count * 1e6 if count and way.server is not None else None,
        "client_cpu_us": found.client_cpu / count * 1e6 if count else None,
        "batch_requests": batch_requests,
        "other_cores": found.other_cpu / found.seconds,
        "requests": float(count),
    }


def _medians(rounds: dict[str, list[float | None]], names: Sequence[str]) -> Figures:
    def figure(values: list[float | None]) -> Figure | None:
        there = [value for value in values if value is not None]
        return Figure.of(there) if there else None

    return {name: figure(rounds[name]) for name in names}
