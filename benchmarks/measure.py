"""One workload measured by every way, round after round, so that a machine that drifts drifts for all of them.

In: a workload, a server that computes nothing, and how long and often to measure. Out: a `WorkloadResult`. The service
is started afresh, so that its memory is that of this workload, and every way is checked before any is timed.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from attnserve_server.cpus import usable_cpus
from benchmarks.loads import LOADS, in_process
from benchmarks.meters import Check, Clock, Measurement, Meter
from benchmarks.results import FIGURES, NOISY, Figure, WorkloadResult
from benchmarks.servers import Running, attnserve, running
from benchmarks.workload import Workload

Load = Callable[[Workload, Meter], Awaitable[None] | None]
RoundFigures = dict[str, float | None]
"""`FIGURES` by name; None where there is no such thing."""

IN_PROCESS: Final = "torch in process"
TRANSPORT: Final = ("stream", "unary")
"""The loads that transport alone is measured with."""

ATTEMPTS: Final = 3
"""How often a measurement is made, at most, while others take too much of the machine."""


def measure(
    loop: asyncio.Runner,
    workload: Workload,
    echo: Running,
    *,
    seconds: float,
    rounds: int,
    server_flags: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> WorkloadResult:
    """Checks and measures a workload. All that is asynchronous shares one event loop, as grpc.aio wants it.

    Raises WrongAnswerError; `progress` is told what is done next.
    """
    with tempfile.TemporaryDirectory(prefix="attnserve-bench-") as directory:
        flags = [*server_flags, "--cache-bytes", str(workload.cache_bytes), *workload.server_flags(Path(directory))]
        progress("starting the service")
        with running(*attnserve(*flags)) as service:
            idle = service.resident_bytes()
            ways = _ways(service, echo)
            for way, (server, load) in ways.items():
                progress(f"checking {way}")
                _prepare(workload, server)
                _run(loop, load, workload, Check(workload, way, values=server is not echo))
            found: dict[str, dict[str, list[float | None]]] = defaultdict(lambda: defaultdict(list))
            for round_number in range(1, rounds + 1):
                for way, (server, load) in ways.items():
                    progress(f"round {round_number} of {rounds}: {way}")
                    timed = partial(_time, loop, load, workload, server, seconds)
                    for name, value in quietest(timed).items():
                        found[way][name].append(value)
            peak = service.peak_resident_bytes()
    return WorkloadResult(
        workload.name,
        workload.description,
        workload.in_flight,
        workload.mean_tokens,
        idle,
        peak,
        {way: {name: _figure(figures[name]) for name in FIGURES} for way, figures in found.items()},
    )


def _ways(service: Running, echo: Running) -> dict[str, tuple[Running | None, Load]]:
    """Every way, by name: the server that it calls, and the load generator."""

    def to(server: Running, name: str) -> tuple[Running, Load]:
        return server, lambda workload, meter: LOADS[name](server.address, workload, meter)

    return {
        IN_PROCESS: (None, in_process),
        **{f"transport, {name}": to(echo, name) for name in TRANSPORT},
        **{f"attnserve, {name}": to(service, name) for name in LOADS},
    }


def baseline(way: str) -> str:
    """The way of transport alone that a way is compared with."""
    return "transport, unary" if way.endswith("unary") else "transport, stream"


def _run(loop: asyncio.Runner, load: Load, workload: Workload, meter: Meter) -> None:
    if (pending := load(workload, meter)) is not None:
        loop.run(_awaited(pending))


def _prepare(workload: Workload, server: Running | None) -> None:
    """Has a workload prepare the service, which has metrics; nothing else has a state."""
    if server is not None and server.http_address is not None:
        workload.prepare(server.address)


async def _awaited(pending: Awaitable[None]) -> None:
    await pending


def quietest(timed: Callable[[], RoundFigures]) -> RoundFigures:
    """The first measurement that the machine was quiet enough for, or that of several in which it was quietest."""

    def others(figures: RoundFigures) -> float:
        return figures["other_cores"] or 0.0

    best = timed()
    for _ in range(ATTEMPTS - 1):
        if others(best) <= NOISY * usable_cpus():
            break
        best = min(best, timed(), key=others)
    return best


def _time(loop: asyncio.Runner, load: Load, workload: Workload, server: Running | None, seconds: float) -> RoundFigures:
    """The figures of one round of one way."""
    _prepare(workload, server)
    batches_before, requests_before = server.batches() if server else (0.0, 0.0)
    clock = Clock(workload, seconds, server.cpu if server else lambda: 0.0)
    _run(loop, load, workload, clock)
    found = clock.measurement
    batches, requests = server.batches() if server else (1.0, float(workload.in_flight))
    return _figures(found, server is not None, batches - batches_before, requests - requests_before)


def _figures(found: Measurement, has_server: bool, batches: float, requests: float) -> RoundFigures:
    """FIGURES of a measurement. The batches are those of its warm-up too."""
    count = len(found.latencies)
    p50, p99 = np.percentile(found.latencies, (50, 99))
    return {
        "requests_per_second": count / found.seconds,
        "tokens_per_second": found.tokens / found.seconds,
        "p50_us": float(p50) * 1e6,
        "p99_us": float(p99) * 1e6,
        "server_cpu_us": found.server_cpu / count * 1e6 if has_server else None,
        "client_cpu_us": found.client_cpu / count * 1e6,
        "batch_requests": requests / batches if batches else None,
        "other_cores": found.other_cpu / found.seconds,
    }


def _figure(rounds: list[float | None]) -> Figure | None:
    values = [value for value in rounds if value is not None]
    return Figure.of(values) if values else None
