"""What was found of a workload, as a table of plain text: in the terminal, and in the document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.table import Table

from benchmarks.growth import Growth
from benchmarks.measure import IN_PROCESS, baseline
from benchmarks.results import WorkloadResult

WIDTH: Final = 100
"""No table is wider, in columns of a terminal."""

HEADINGS: Final = (
    "",
    "of\ntorch",
    "of no\ncompute",
    "req/s\n",
    "spread\n",
    "p50\nµs",
    "p99\nµs",
    "server\nCPU µs",
    "client\nCPU µs",
    "batch\n",
)
"""Ratios first. CPU times are per request."""

MARK: Final = "~"


def rendered(result: WorkloadResult, cores: int) -> Table:
    """The figures of one workload, on a machine of so many cores."""
    shown = Table(
        title=f"{result.name}: {result.description}",
        caption=f"service: resident {memory(result)}",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for heading in HEADINGS:
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in rows(result, cores):
        shown.add_row(*row)
    return shown


def growth(results: Sequence[Growth]) -> Table:
    """What must not depend on the length of a cache."""
    shown = Table(
        title="Caches that are short and long: medians",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for heading in ("", "with little", "µs", "with much", "µs", "ratio"):
        shown.add_column(heading, justify="right" if heading in ("µs", "ratio") else "left", no_wrap=True)
    for each in results:
        ratio = f"{each.much_us / each.little_us:.2f}"
        shown.add_row(each.name, each.little, f"{each.little_us:,.1f}", each.much, f"{each.much_us:,.1f}", ratio)
    return shown


def rows(result: WorkloadResult, cores: int) -> list[list[str]]:
    """The cells of each way, one a heading."""
    return [_row(result, way, cores) for way in result.ways]


def _row(result: WorkloadResult, way: str, cores: int) -> list[str]:
    def shown(name: str, digits: int = 0) -> str:
        value = result.median(way, name)
        # A second and more is rare, and would not fit.
        return "" if value is None else f"{value:,.{digits}f}" if value < 1e6 else f"{value:.2g}"

    def ratio(to: str) -> str:
        value = result.ratio(way, to)
        return f"{value:.2f}" if value < 100 else f"{value:.0f}"

    rate = result.ways[way]["requests_per_second"]
    assert rate is not None
    return [
        way,
        ratio(IN_PROCESS),
        "" if way == IN_PROCESS else ratio(baseline(way)),
        shown("requests_per_second") + (f" {MARK}" if result.noisy(way, cores) else ""),
        f"{rate.spread:.0%}",
        shown("p50_us"),
        shown("p99_us"),
        shown("server_cpu_us"),
        shown("client_cpu_us"),
        shown("batch_requests", 1),
    ]


def memory(result: WorkloadResult) -> str:
    """The service's resident memory, in words."""
    idle, peak = result.idle_resident_bytes, result.peak_resident_bytes
    return f"{idle / 2**20:,.0f} MiB" + ("" if peak is None else f", at most {peak / 2**20:,.0f} MiB under load")
