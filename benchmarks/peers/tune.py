"""`make bench-tune`: the settings with which each peer is the fastest, workload by workload, on this machine.

In: the settings to try. Out: a line for each; and settings.json beside this file, from which the benchmark takes the
fastest, so that a peer is measured at its best. Run it on a quiet machine; it takes half an hour.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.console import Console

from attnserve_server.host.cpus import usable_cpus
from benchmarks import machine
from benchmarks.curves import ALONE
from benchmarks.measure import Way, check, closed, quietest, serving
from benchmarks.peers.mosec import Mosec
from benchmarks.peers.peer import SETTINGS, TUNED, Peer
from benchmarks.peers.triton import Triton
from benchmarks.workload import Workload
from benchmarks.workloads import WORKLOADS

TO_TUNE: Final = {**{name: each for name, each in WORKLOADS.items() if each.peers}, ALONE.name: ALONE}
"""The workloads that peers are measured with."""


def variants(peer: Peer, workload: Workload) -> list[dict[str, int]]:
    """The settings to try: splits of the cores into processes and threads, and the maximum batch size."""
    cores = usable_cpus()
    processes = "instances" if isinstance(peer, Triton) else "workers"
    # Mosec waits until a batch is full, or its time is over. If batches may have more requests than are in flight, it
    # always waits for the time.
    parts = (workload.in_flight, workload.in_flight // 2, workload.in_flight // 4)
    batches = sorted({64, 1, *(part for part in parts if part and isinstance(peer, Mosec))}, reverse=True)
    shared = {(1, 1), (1, cores), (cores, 1)} if workload.in_flight > 1 else {(1, 1), (1, cores)}
    return [
        {**peer.settings, processes: count, "threads": threads, "batch": batch}
        for count, threads in sorted(shared)
        for batch in batches
    ]


def rate(loop: asyncio.Runner, peer: Peer, workload: Workload, settings: Mapping[str, int], seconds: float) -> float:
    """Requests per second of the fastest way of calling a peer with these settings. Raises WrongAnswerError."""
    rates = []
    with (
        tempfile.TemporaryDirectory(prefix="attnserve-bench-") as directory,
        serving(peer, workload, settings, Path(directory)) as server,
    ):
        for name, load in peer.loads.items():
            way = Way(server, load, peer)
            check(loop, workload, f"{peer.name}, {name}", way)
            for _ in range(2):
                figures = quietest(lambda way=way: closed(loop, way, workload, seconds))  # type: ignore[misc]
                rates.append(figures["requests_per_second"] or 0.0)
    return max(rates)


def main() -> None:
    """Tries all settings and writes the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.tune", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--peers", default="Triton,Mosec")
    parser.add_argument("--workloads", default=",".join(TO_TUNE))
    chosen = parser.parse_args()
    if unknown := set(chosen.workloads.split(",")) - TO_TUNE.keys():
        parser.error(f"--workloads: expected some of {', '.join(TO_TUNE)}, found {', '.join(sorted(unknown))}")
    if unknown := set(chosen.peers.split(",")) - {Triton.name, Mosec.name}:
        parser.error(f"--peers: expected some of {Triton.name}, {Mosec.name}, found {', '.join(sorted(unknown))}")
    console = Console(highlight=False)
    found = json.loads(SETTINGS.read_text("utf-8"))
    described = machine.describe("cpu")
    where = f"{described['cpu']}, {described['cores']} cores, {datetime.now(UTC):%Y-%m-%d}"
    with asyncio.Runner() as loop:
        for peer in (each for each in (Triton(), Mosec()) if each.name in chosen.peers.split(",")):
            for name in chosen.workloads.split(","):
                rates = []
                for settings in variants(peer, TO_TUNE[name]):
                    rates.append((rate(loop, peer, TO_TUNE[name], settings, chosen.seconds), settings))
                    console.print(f"{peer.name}, {name}: {rates[-1][0]:,.1f} requests/s with {settings}")
                _, found.setdefault(peer.name, {})[name] = max(rates, key=lambda each: each[0])
                found.setdefault(TUNED, {})[peer.name] = where
                SETTINGS.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    console.print(f"written to {SETTINGS}")


if __name__ == "__main__":
    main()
