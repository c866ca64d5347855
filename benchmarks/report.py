"""`python -m benchmarks.report`: what a benchmark found, from its JSON file into docs/performance.md and the README,
and as a plot; or, of another machine, into docs/performance-elsewhere.md.
"""

from __future__ import annotations

import argparse
import io
import os
import textwrap
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks import speeds, table
from benchmarks.__main__ import DEFAULT_JSON
from benchmarks.document import with_text
from benchmarks.goals import goals
from benchmarks.measure import IN_PROCESS, NO_COMPUTE, SERVICE
from benchmarks.plot import plot
from benchmarks.results import NOISY, Result, WorkloadResult, by_concurrency

DOCUMENT: Final = Path("docs/performance.md")
ELSEWHERE: Final = Path("docs/performance-elsewhere.md")
PLOT: Final = Path("docs/performance.png")
README: Final = Path("README.md")
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
BEGIN_PLOT, END_PLOT = "<!-- plot -->", "<!-- /plot -->"
BEGIN_ELSEWHERE, END_ELSEWHERE = "<!-- elsewhere: {} -->", "<!-- /elsewhere: {} -->"
"""For a machine by the name that the document gives it."""

SUMMARY: Final = (
    "",
    "in process",
    "no compute",
    "best peer",
    "service",
    "of peer",
    "of torch",
    "server CPU",
    "batch",
    "memory",
)


def report(result: Result) -> str:
    """Everything that is generated, in markdown."""
    tables = []
    for each in result.workloads:
        tables.append(table.rendered(each, result.cores))
        if each.open:
            tables.append(table.opened(each, result.cores))
    tables += map(table.curve, result.curves)
    if concurrency := by_concurrency(result.curves):
        tables.append(table.token_costs(concurrency))
    if result.waiting:
        tables.append(table.waiting(result.waiting))
    if result.growth:
        tables.append(table.growth(result.growth))
    return "\n\n".join((brief(result), *map(_plain, tables)))


def brief(result: Result) -> str:
    """The part that is shown for other machines: how it was made, one line per workload, and the goals."""
    found = goals(result.workloads, result.waiting, result.curves, result.growth)
    reached = [table.reached(found)] if result.peers else []
    return "\n\n".join((_made(result), _summary(result), *_steps(result), *map(_plain, reached)))


def image(document: Path, picture: Path) -> str:
    """A picture in a document, in markdown."""
    path = Path(os.path.relpath(picture, document.parent)).as_posix()
    return f"![Throughput of attnserve and others by workload, and how it grows]({path})"


def _made(result: Result) -> str:
    """How, where and when the result was made."""
    machine = dict(result.machine)
    cpu, cores, memory = machine.pop("cpu"), machine.pop("cores"), int(machine.pop("memory_bytes"))
    system = machine.pop("platform")
    versions = ", ".join(f"{name} {version}" for name, version in machine.items())
    points = [
        f"Made by `{result.command}` at {result.begun}, in {result.took_seconds / 60:.1f} minutes.",
        f"{cpu}, {cores} cores, {memory / 2**30:.0f} GiB; {system}; {versions}.",
        f"The service was started with `{' '.join(result.server_flags)}`, afresh for each workload.",
        *(
            f"{peer['what']}; {peer['versions']}. Its settings, the fastest of those tried ({peer['tuned']}): "
            f"{peer['settings']}."
            for peer in result.peers.values()
        ),
        f"Medians of {result.rounds} rounds of {result.seconds:g} s; spread is half the range of the rounds' rates "
        "over their median.",
        f"Load average {_loads(result.load_before)} before and {_loads(result.load_after)} after.",
    ]
    if result.workloads:
        (marked, rows), (mean, worst) = result.marked(), result.others()
        points[-1] += f" Other processes took {mean:.1%} of the machine on average, {worst:.0%} in the worst round."
        points.append(
            f"`{table.MARK}` marks {marked} of {rows} rows: a spread above {NOISY:.0%} (in an open loop of the p99), "
            f"or others that took more than {NOISY:.0%} of the machine."
        )
    if result.workloads and result.too_noisy:
        points.insert(0, "**The machine was too noisy for these figures to be relied on.**")
    return "\n".join(textwrap.fill(f"- {point}", table.WIDTH, subsequent_indent="  ") for point in points)


def _loads(load: list[float]) -> str:
    return " / ".join(f"{each:.2f}" for each in load)


def _summary(result: Result) -> str:
    """One line per workload, for the service's stream."""
    rows: list[tuple[str, ...]] = [SUMMARY]
    for each in result.workloads:
        mark = f" {table.MARK}" if each.noisy(SERVICE, result.cores) else ""
        peak, peer = each.memory["attnserve"].peak, each.best_peer()
        rows.append(
            (
                each.name,
                f"{_median(each, IN_PROCESS, 'requests_per_second'):,.0f}/s",
                f"{_median(each, NO_COMPUTE, 'requests_per_second'):,.0f}/s",
                "" if peer is None else f"{_median(each, peer, 'requests_per_second'):,.0f}/s",
                f"{_median(each, SERVICE, 'requests_per_second'):,.0f}/s{mark}",
                "" if peer is None else f"{each.ratio(SERVICE, peer):.2f}",
                f"{each.ratio(SERVICE, IN_PROCESS):.2f}",
                f"{_median(each, SERVICE, 'server_cpu_us'):,.0f} µs",
                f"{_median(each, SERVICE, 'batch_requests'):.1f}",
                "" if peak is None else f"{peak / 2**20:,.0f} MiB",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def _median(result: WorkloadResult, way: str, figure: str) -> float:
    """A figure's median; NaN if there is no such figure."""
    value = result.median(way, figure)
    return float("nan") if value is None else value


def _steps(result: Result) -> list[str]:
    """The cost of a decoder's step, compared with torch in process plus a round trip without computation."""
    lines = []
    for each in result.workloads:
        if each.in_flight > 1 or not each.name.startswith(("D", "C", "G")):
            continue
        compute, transport, step = (_median(each, way, "p50_us") for way in (IN_PROCESS, NO_COMPUTE, SERVICE))
        lines.append(
            f"- {each.name}, p50: {compute:,.0f} µs torch in process + {transport:,.0f} µs no compute = "
            f"{compute + transport:,.0f} µs; the service {step:,.0f} µs, {step / (compute + transport):.2f} times that."
        )
    text = "\n".join(textwrap.fill(line, table.WIDTH, subsequent_indent="  ") for line in lines)
    return [text] if text else []


def _plain(shown: Table) -> str:
    """A table as text, as the terminal showed it."""
    text = io.StringIO()
    Console(file=text, width=table.WIDTH, color_system=None).print(shown)
    lines = "\n".join(line.rstrip() for line in text.getvalue().splitlines())
    return f"```text\n{lines}\n```"


def main() -> None:
    """Writes the document and the plot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, help="what the benchmark wrote")
    parser.add_argument("--document", type=Path, help=f"where it goes, between the markers ({DOCUMENT} or {ELSEWHERE})")
    parser.add_argument("--readme", type=Path, default=README, help="where speeds and the plot go, between markers too")
    parser.add_argument("--plot", type=Path, default=PLOT, help="where the plot goes")
    parser.add_argument(
        "--elsewhere", metavar="NAME", help="it was another machine, of this name in the document: in brief, no plot"
    )
    options = parser.parse_args()
    result = Result.read(options.json)
    document = options.document or (ELSEWHERE if options.elsewhere else DOCUMENT)
    if options.elsewhere:
        markers = (marker.format(options.elsewhere) for marker in (BEGIN_ELSEWHERE, END_ELSEWHERE))
        document.write_text(with_text(document.read_text("utf-8"), brief(result), *markers), "utf-8")
        return
    plot(result, options.plot)
    text = f"{image(document, options.plot)}\n\n{report(result)}"
    document.write_text(with_text(document.read_text("utf-8"), text, BEGIN, END), "utf-8")
    readme = with_text(options.readme.read_text("utf-8"), speeds.speeds(result), speeds.BEGIN, speeds.END)
    readme = with_text(readme, image(options.readme, options.plot), BEGIN_PLOT, END_PLOT)
    options.readme.write_text(readme, "utf-8")


if __name__ == "__main__":
    main()
