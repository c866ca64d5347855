"""`make bench`: every way of calling the service, side by side with torch in process and with transport alone.

All are measured in turn, round after round, in one run; figures are medians over the rounds. The tables go to the
terminal, all figures to a JSON file, from which `python -m benchmarks.report` writes docs/performance.md. If the run is
cut off, the JSON file has what was measured by then.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.status import Status
from rich.text import Text

from attnserve._memory import keep_memory
from benchmarks import machine, table
from benchmarks.arrivals import precise_loop
from benchmarks.curves import curves as measure_curves
from benchmarks.goals import goals as goals_of
from benchmarks.growth import Growth, growth
from benchmarks.measure import Timing, measure
from benchmarks.peers.mosec import Mosec
from benchmarks.peers.peer import Peer
from benchmarks.peers.triton import Triton
from benchmarks.results import NOISY, Curve, Result, WorkloadResult, by_concurrency
from benchmarks.servers import attnserve, running
from benchmarks.suites import SUITES
from benchmarks.waiting import Waiting, waiting

DEFAULT_JSON: Final = Path("bench-results/bench.json")
PARTIAL_JSON: Final = DEFAULT_JSON.with_name("partial.json")
"""The JSON file of a run that measures only a part: the one that documents are made from stays."""
LARGE_BYTES: Final = 4 << 20
"""The message size at which the C library is made to keep as much memory as it can."""
SPINNER: Final = 3
"""The columns of a terminal that a line of progress cannot use: the spinner, a space, and the last one."""
PEERS: Final[dict[str, Peer]] = {peer.name.lower(): peer for peer in (Triton(), Mosec())}


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", choices=[*SUITES], default="cpu", help="of the service, and of torch in process")
    parser.add_argument("--workloads", type=_names, help="which, by name; none for none; default: all of the device")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement, after its warm-up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=_names, help="which servers of others; default: those that are installed")
    parser.add_argument("--open", type=_names, help="the workloads to be measured by open loops too; default: X")
    parser.add_argument("--curves", action=argparse.BooleanOptionalAction, default=True, help="how cost grows")
    parser.add_argument("--growth", type=int, help="tokens to append one by one; 0 leaves that out")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, help="of requests that wait, on a CPU only")
    parser.add_argument(
        "--json", type=Path, help=f"where figures go; default: {DEFAULT_JSON}, or {PARTIAL_JSON} if not all is measured"
    )
    parser.add_argument("server_flags", nargs="*", help="flags of the service, after --")
    found = parser.parse_args(arguments)
    suite = SUITES[found.device]
    whole = found.workloads is None and found.curves and found.memory is not False
    whole = whole and found.growth != 0 and found.peers != []
    if found.json is None:
        found.json = DEFAULT_JSON if whole else PARTIAL_JSON
    if found.workloads is None:
        found.workloads = [*suite.workloads]
    if found.open is None:
        found.open = suite.opened
    if found.growth is None:
        found.growth = 100_000 if found.device == "cpu" else 0
    if found.memory is None:
        found.memory = found.device == "cpu"
    if found.peers is None:
        found.peers = [name for name, peer in PEERS.items() if peer.installed and found.device == "cpu"]
    if found.peers and found.device != "cpu":
        parser.error("peers compute on a CPU")
    if found.memory and found.device != "cpu":  # elsewhere, what comes begins to be copied before it is much
        parser.error("requests are made to wait on a CPU")
    for names, known in ((found.workloads, suite.workloads), (found.open, suite.workloads), (found.peers, PEERS)):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"no such {', '.join(unknown)}; there are {', '.join(known)}")
    if missing := [name for name in found.peers if not PEERS[name].installed]:
        parser.error(f"{', '.join(missing)} not installed: make bench-peers")
    if not 0 < found.seconds < math.inf or found.rounds < 1:  # written so that NaN fails, too
        parser.error("--seconds must be above 0 and finite, --rounds at least 1")
    if found.growth < 100 and found.growth != 0:
        parser.error("--growth must be at least 100, or 0")
    return found


def _names(text: str) -> list[str]:
    return [] if text == "none" else text.split(",")


def main() -> None:
    """Runs what the command line asks for."""
    chosen = options(sys.argv[1:])
    if chosen.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no CUDA device")
    try:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=chosen.json.parent):
            pass
    except OSError as error:  # rather than after minutes of measuring
        sys.exit(f"--json: {error}")
    # Between its turns, the threads of torch in process must not take cores from the service.
    torch.set_num_threads(1)
    # As the SDK has it, once it has sent messages; for all load generators, and from the start.
    keep_memory(LARGE_BYTES)
    console = Console(width=max(table.WIDTH, Console().width), highlight=False)
    begun, load_before, described = datetime.now(UTC), machine.load_average(), machine.describe(chosen.device)
    flags, peers = ["--device", chosen.device, *chosen.server_flags], [PEERS[name] for name in chosen.peers]
    suite = SUITES[chosen.device]
    results: list[WorkloadResult] = []
    curves: list[Curve] = []
    grown: list[Growth] = []
    waited: list[Waiting] = []

    def write() -> Result:
        tuned = [each.name for each in results if each.peer_ways()]
        tuned += [each.tuned for each in suite.curves if curves and each.tuned is not None]
        found = Result(
            command=shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
            begun=begun.isoformat(timespec="seconds"),
            took_seconds=round((datetime.now(UTC) - begun).total_seconds()),
            seconds=chosen.seconds,
            rounds=chosen.rounds,
            server_flags=flags,
            machine=described,
            peers={peer.name: peer.described(dict.fromkeys(tuned)) for peer in peers},
            load_before=load_before,
            load_after=machine.load_average(),
            workloads=results,
            curves=curves,
            growth=grown,
            waiting=waited,
        )
        found.write(chosen.json)
        return found

    with (
        running("benchmarks.echo", chosen.device, "workloads") as echo,
        asyncio.Runner(loop_factory=precise_loop) as loop,
        console.status("") as status,
    ):
        for place, name in enumerate(chosen.workloads, 1):
            result = measure(
                loop,
                suite.workloads[name],
                echo,
                Timing(chosen.seconds, chosen.rounds),
                peers=peers,
                opened=name in chosen.open,
                server_flags=flags,
                progress=partial(_progress, status, f"{name} ({place} of {len(chosen.workloads)})"),
            )
            results.append(result)
            write()
            console.print(table.rendered(result, int(described["cores"])), "")
            if result.open:
                console.print(table.opened(result, int(described["cores"])), "")
        if chosen.curves:
            progress = partial(_progress, status, "how cost grows")
            with running("benchmarks.echo", chosen.device, "curves") as large_echo:
                curves = measure_curves(
                    loop, suite.curves, large_echo, peers, chosen.seconds / 2, server_flags=flags, progress=progress
                )
            write()
            for each in curves:
                console.print(table.curve(each), "")
            if concurrency := by_concurrency(curves):
                console.print(table.token_costs(concurrency), "")
        if chosen.memory and (waited := waiting(loop, flags, status.update)):
            write()
            console.print(table.waiting(waited), "")
        if chosen.growth:
            with running(*attnserve(*flags)) as service:
                grown = growth(service.address, chosen.growth, status.update)
            console.print(table.growth(grown), "")
    found = write()
    if goals := goals_of(results, waited, curves, grown):
        console.print(table.reached(goals), "")
    console.print(
        f"Medians of {chosen.rounds} rounds of {chosen.seconds:g} s; spread is half the range of the rate over its "
        f"median.\n{table.MARK} marks a spread above {NOISY:.0%}, or a machine of which others took more than "
        f"{NOISY:.0%}."
    )
    if results and found.too_noisy:
        console.print(f"The machine was too noisy for these figures to be relied on: {table.noise(found)}")
    console.print(f"All figures: {chosen.json}; took {found.took_seconds:,.0f} s")


def progress_line(text: str) -> Text:
    """What is being done, cut to one line of the terminal, which may be narrower than the tables: the next text can
    overwrite a single line only.
    """
    line = Text(text)
    line.truncate(shutil.get_terminal_size().columns - SPINNER, overflow="ellipsis")
    return line


def _progress(status: Status, what: str, doing: str) -> None:
    status.update(progress_line(f"{what}: {doing}"))


if __name__ == "__main__":
    # As by ctrl-c: the servers that it has started end with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
