"""`make bench`: every way of calling the service, side by side with torch in process and with transport alone.

All are measured in turn, round after round, in one run; figures are medians over the rounds. The tables go to the
terminal, all figures to a JSON file, from which `python -m benchmarks.report` writes docs/performance.md.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch
from rich.console import Console

from benchmarks import machine, table
from benchmarks.growth import growth
from benchmarks.measure import measure
from benchmarks.results import NOISY, Result
from benchmarks.servers import attnserve, running
from benchmarks.workloads import WORKLOADS

DEFAULT_JSON: Final = Path("bench-results/bench.json")


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="which, by name")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement, after its warm-up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--growth", type=int, default=100_000, help="tokens to append one by one; 0 leaves that out")
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, help="where all figures go")
    parser.add_argument("server_flags", nargs="*", help="flags of the service, after --")
    found = parser.parse_args(arguments)
    found.workloads = found.workloads.split(",")
    if unknown := [name for name in found.workloads if name not in WORKLOADS]:
        parser.error(f"no such workloads: {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    if found.seconds <= 0 or found.rounds < 1:
        parser.error("--seconds must be above 0, --rounds at least 1")
    if 0 < found.growth < 100:
        parser.error("--growth must be at least 100, or 0")
    return found


def main() -> None:
    """Runs what the command line asks for."""
    chosen = options(sys.argv[1:])
    # Between the turns of torch in process, its threads must not take the cores from the service.
    torch.set_num_threads(1)
    console = Console(width=max(table.WIDTH, Console().width), highlight=False)
    begun, load_before, described = datetime.now(UTC), machine.load_average(), machine.describe()
    flags = ["--device", "cpu", *chosen.server_flags]
    results = []
    with running("benchmarks.echo") as echo, asyncio.Runner() as loop, console.status("") as status:
        for name in chosen.workloads:
            result = measure(
                loop,
                WORKLOADS[name],
                echo,
                seconds=chosen.seconds,
                rounds=chosen.rounds,
                server_flags=flags,
                progress=lambda doing, name=name: status.update(f"{name}: {doing}"),  # type: ignore[misc]
            )
            results.append(result)
            console.print(table.rendered(result, int(described["cores"])), "")
        grown = []
        if chosen.growth:
            with running(*attnserve(*flags)) as service:
                grown = growth(service.address, chosen.growth, status.update)
            console.print(table.growth(grown), "")
    found = Result(
        command=shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        begun=begun.isoformat(timespec="seconds"),
        seconds=chosen.seconds,
        rounds=chosen.rounds,
        server_flags=flags,
        machine=described,
        load_before=load_before,
        load_after=machine.load_average(),
        workloads=results,
        growth=grown,
    )
    found.write(chosen.json)
    console.print(
        f"Medians of {chosen.rounds} rounds of {chosen.seconds:g} s; spread is half the range of the rate over its "
        f"median.\n{table.MARK} marks a spread above {NOISY:.0%}, or a machine of which others took more than "
        f"{NOISY:.0%}.\nAll figures: {chosen.json}"
    )


if __name__ == "__main__":
    main()
