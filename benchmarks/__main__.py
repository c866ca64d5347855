"""`make bench`: every way of calling the service, side by side with torch in process and with transport alone.

All are measured in turn, round after round, in one run, so that a machine that drifts drifts for all of them; figures
are medians over the rounds. The table goes to the terminal, all figures to a JSON file.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import loads
from benchmarks.loads import LOADS, Measurement
from benchmarks.servers import Running, attnserve, running
from benchmarks.workloads import WORKLOADS, Workload

NOISY = 0.15
"""A spread of the rounds (half their range over their median) above which a figure is marked."""


def measure(loop: asyncio.Runner, load: Any, server: Running, workload: Workload, seconds: float) -> dict[str, float]:
    """The figures of one load against one server. All share one event loop, as grpc.aio wants it."""
    before = server.cpu()
    result = load(server.address, workload, seconds)
    measurement: Measurement = loop.run(result) if inspect.iscoroutine(result) else result
    # The server's CPU is that of the warm-up too: spread it over all of the time.
    server_cpu = (server.cpu() - before) / (1 + loads.WARM_UP)
    return figures(measurement, server_cpu)


def figures(measurement: Measurement, server_cpu: float) -> dict[str, float]:
    """What is reported of one measurement."""
    count = max(1, len(measurement.latencies))
    return {
        "requests_per_second": measurement.rate,
        "p50_us": measurement.percentile(50) * 1e6,
        "p99_us": measurement.percentile(99) * 1e6,
        "server_cpu_us": server_cpu / count * 1e6,
        "client_cpu_us": measurement.client_cpu / count * 1e6,
    }


def run(
    loop: asyncio.Runner, workload: Workload, service: Running, seconds: float, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """The figures of every way, a value a round."""
    loads.check(service.address, workload)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with running("benchmarks.echo", workload.name) as echo:
        for _ in range(rounds):
            measured = {"torch in process": figures(loads.in_process(workload, seconds), 0.0)}
            for name in ("stream", "unary"):
                measured[f"transport, {name}"] = measure(loop, LOADS[name], echo, workload, seconds)
            for name, load in LOADS.items():
                measured[f"attnserve, {name}"] = measure(loop, load, service, workload, seconds)
            for name, values in measured.items():
                for figure, value in values.items():
                    found[name][figure].append(value)
    return found


def table(workload: Workload, found: dict[str, dict[str, list[float]]]) -> Table:
    """The figures of one workload, ratios first."""
    result = Table(title=f"{workload.name}: {workload.description}", title_justify="left")
    for heading in (
        "",
        "/torch",
        "/transport",
        "req/s",
        "p50 µs",
        "p99 µs",
        "server µs",
        "client µs",
    ):
        result.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    medians = {name: {f: statistics.median(v) for f, v in values.items()} for name, values in found.items()}
    for name, values in medians.items():
        rate = values["requests_per_second"]
        transport = "transport, unary" if name.endswith("unary") else "transport, stream"
        rates = found[name]["requests_per_second"]
        noisy = (max(rates) - min(rates)) / 2 / rate > NOISY
        result.add_row(
            name,
            f"{rate / medians['torch in process']['requests_per_second']:.2f}",
            f"{rate / medians[transport]['requests_per_second']:.2f}" if name != "torch in process" else "",
            f"{rate:,.0f}" + (" ~" if noisy else ""),
            *(f"{values[f]:,.0f}" if values[f] else "" for f in ("p50_us", "p99_us", "server_cpu_us", "client_cpu_us")),
        )
    return result


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--workloads", default=",".join(w.name for w in WORKLOADS), help="which, by name")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement, after its warm-up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("bench-results/bench.json"), help="where all figures go")
    parser.add_argument("server_flags", nargs="*", help="flags of the server, after --")
    options = parser.parse_args()
    names = options.workloads.split(",")
    torch.set_num_threads(1)
    console = Console(width=max(100, Console().width))
    everything = {}
    with running(*attnserve(*options.server_flags)) as service, asyncio.Runner() as loop:
        for workload in WORKLOADS:
            if workload.name in names:
                with console.status(f"{workload.name}: {workload.description}"):
                    found = run(loop, workload, service, options.seconds, options.rounds)
                everything[workload.name] = found
                console.print(table(workload, found))
    console.print(
        f"Medians of {options.rounds} rounds of {options.seconds:g} s. A rate with ~ varied by more than {NOISY:.0%}."
    )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
