"""Results as tables of plain text, for the terminal and for the document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich import box
from rich.table import Table

from benchmarks.goals import Goal
from benchmarks.growth import Growth
from benchmarks.measure import IN_PROCESS, baseline
from benchmarks.results import GOAL_S, IN_FLIGHT, Curve, Figures, Memory, OpenResult, Result, WorkloadResult
from benchmarks.waiting import Waiting

WIDTH: Final = 112
"""The maximum width of a table, in columns of a terminal."""
MANY: Final = 6
"""Of a curve with more points than this, every other one is shown."""

HEADINGS: Final = (
    "",
    "of\ntorch",
    "of no\ncompute",
    "of\npeer",
    "req/s\n",
    "tokens/s\n",
    "spread\n",
    "p50\nµs",
    "p99\nµs",
    "server\nCPU µs",
    "client\nCPU µs",
    "batch\n",
)
"""Ratios first; that to peers is relative to the better one. CPU times are per request."""

MARK: Final = "~"


def rendered(result: WorkloadResult, cores: int) -> Table:
    """The figures of one workload, on a machine with `cores` cores."""
    caption = f"resident memory: {'; '.join(f'{name} {memory(each)}' for name, each in result.memory.items())}"
    caption += "".join(f"\n{line}" for line in refusals(result.refused))
    return _table(f"{result.name}: {result.description}", HEADINGS, rows(result, cores), caption)


def opened(result: WorkloadResult, cores: int) -> Table:
    """The open loops of one workload, on a machine with `cores` cores."""
    title = f"{result.name}, open loop: latency from when a request was due; in time is within {GOAL_S * 1e3:.0f} ms"
    return _table(title, OPEN_HEADINGS, [open_row(each, cores) for each in result.open])


def refusals(refused: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The servers' refusals, by the way of calling, in words."""
    return [
        f"{way} was refused: {', '.join(f'{count:,} times {how!r}' for how, count in said.items())}"
        for way, said in refused.items()
    ]


def curve(found: Curve) -> Table:
    """Requests per second and median latency in µs, by the variable; every other value if there are many."""
    step = 1 + (len(next(iter(found.ways.values()))) > MANY)
    shown = {way: points[::step] for way, points in found.ways.items()}
    headings = ("", *(f"{point.value:,}\nreq/s, µs" for point in next(iter(shown.values()))))
    lines = [
        [
            way,
            *(
                f"{_short(point.requests_per_second)}, {'–' if point.p50_us is None else _short(point.p50_us)}"
                for point in points
            ),
        ]
        for way, points in shown.items()
    ]
    title = f"By {found.name} ({found.unit}): {found.description}"
    return _table(title, headings, lines, "\n".join(refusals(found.refused)))


def token_costs(found: Sequence[Curve]) -> Table:
    """The server's CPU time per token, by the number of requests in flight; and how even it is."""
    counts = [point.value for point in next(iter(found[0].ways.values()))]
    headings = ("", *(f"{count:,}\n" for count in counts), "worst\nof best", f"{counts[-1]:,}\nof best")
    lines = [
        [
            f"{each.name.split()[-1]}: {way}",
            *("–" if point.token_cpu_us is None else f"{point.token_cpu_us:.3g}" for point in points),
            f"{each.unevenness(way):.2f}",
            f"{each.steepness(way):.2f}",
        ]
        for each in found
        for way, points in each.ways.items()
    ]
    return _table(f"Server CPU for each token, by {IN_FLIGHT}: µs", headings, lines)


def waiting(found: Sequence[Waiting]) -> Table:
    """The memory of waiting requests, relative to their size."""
    sizes = list(dict.fromkeys(each.payload for each in found))
    headings = ("", *(f"{size / 1024:,.0f} KiB\nratio, KiB more" for size in sizes))
    lines = []
    for way in dict.fromkeys(each.way for each in found):
        by_size = {each.payload: each for each in found if each.way == way}
        more = {size: (each.memory - each.payload) / 1024 for size, each in by_size.items()}
        lines.append([way, *(f"{by_size[size].ratio:.2f}, {more[size]:,.0f}" for size in sizes)])
    return _table("Requests that wait: the memory that each takes, over its size", headings, lines)


def reached(found: Sequence[Goal]) -> Table:
    """The goals, and what was measured."""
    headings = ("", "what", "goal", "found", "")
    lines = []
    for goal in found:
        bound = f"{'≥' if goal.at_least else '≤'} {goal.bound:g}"
        value = "not measured" if goal.found is None else f"{goal.found:.2f}"
        lines.append(
            [goal.workload, goal.what, bound, value, {True: "reached", False: "missed", None: ""}[goal.reached]]
        )
    return _table("Goals, for encoded messages on one stream", headings, lines, words=2)


def growth(results: Sequence[Growth]) -> Table:
    """The costs that must not depend on a cache's length."""
    headings = ("", "with little", "µs", "with much", "µs", "ratio")
    lines = [
        [
            each.name,
            each.little,
            f"{each.little_us:,.1f}",
            each.much,
            f"{each.much_us:,.1f}",
            f"{each.much_us / each.little_us:.2f}",
        ]
        for each in results
    ]
    return _table("Caches that are short and long: medians", headings, lines)


def _table(
    title: str, headings: Sequence[str], lines: Sequence[Sequence[str]], caption: str = "", words: int = 1
) -> Table:
    """A table whose first `words` columns are aligned left, the others right."""
    shown = Table(
        title=title,
        caption=caption or None,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if column < words else "right", no_wrap=True)
    for line in lines:
        shown.add_row(*line)
    return shown


def _short(value: float) -> str:
    """A number in about five characters at most."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rows(result: WorkloadResult, cores: int) -> list[list[str]]:
    """The rows of all ways, with one cell per heading."""
    return [_row(result, way, cores) for way in result.ways]


def _row(result: WorkloadResult, way: str, cores: int) -> list[str]:
    figures, peer = result.ways[way], result.best_peer()

    def ratio(to: str | None) -> str:
        if to is None:
            return ""
        value = result.ratio(way, to)
        return f"{value:.2f}" if value < 100 else f"{value:.0f}"

    rate = figures["requests_per_second"]
    assert rate is not None
    return [
        way,
        ratio(IN_PROCESS),
        "" if way == IN_PROCESS else ratio(baseline(way)),
        "" if way == IN_PROCESS or way.startswith("transport") else ratio(peer),
        _shown(figures, "requests_per_second") + (f" {MARK}" if result.noisy(way, cores) else ""),
        _shown(figures, "tokens_per_second"),
        f"{rate.spread:.0%}",
        _shown(figures, "p50_us"),
        _shown(figures, "p99_us"),
        _shown(figures, "server_cpu_us"),
        _shown(figures, "client_cpu_us"),
        _shown(figures, "batch_requests", 1),
    ]


OPEN_HEADINGS: Final = (
    "",
    "at",
    "due/s\n",
    "in time\n/s",
    "p50\nµs",
    "p99\nµs",
    "p99.9\nµs",
    "spread\nof p99",
    "server\nCPU µs",
    "client\nCPU µs",
    "busy\n",
    "batch\n",
)
"""Different servers use different shares of a machine at capacity: *busy* is the share of all cores that server and
client used."""


def open_row(result: OpenResult, cores: int) -> list[str]:
    """The row of one open loop, with one cell per heading."""
    figures = result.figures
    tail = figures["p99_us"]
    return [
        result.way,
        f"{result.share:.0%} of {'its own' if result.of == result.way else result.of.partition(',')[0]}",
        _shown(figures, "offered_per_second"),
        _shown(figures, "goodput_per_second"),
        _latency(figures, "p50_us"),
        _latency(figures, "p99_us"),
        _latency(figures, "p999_us"),
        ("" if tail is None else f"{tail.spread:.0%}") + (f" {MARK}" if result.noisy(cores) else ""),
        _shown(figures, "server_cpu_us"),
        _shown(figures, "client_cpu_us"),
        _busy(figures, cores),
        _shown(figures, "batch_requests", 1),
    ]


def _busy(figures: Figures, cores: int) -> str:
    """The share of all cores that server and client kept busy; empty if nothing was answered."""
    rate, server, client = (figures[name] for name in ("requests_per_second", "server_cpu_us", "client_cpu_us"))
    if rate is None or server is None or client is None:
        return ""
    return f"{rate.median * (server.median + client.median) * 1e-6 / cores:.0%}"


def _latency(figures: Figures, name: str) -> str:
    """A latency in µs. From a tenth of a second on, as on a busy machine, it is shortened: three would be too wide."""
    figure = figures[name]
    return _shown(figures, name) if figure is None or figure.median < 99_999.5 else f"{figure.median / 1e3:,.0f} k"


def _shown(figures: Figures, name: str, digits: int = 0) -> str:
    figure = figures[name]
    if figure is None:
        return ""
    # Millions are rare, and would be too wide in full.
    return f"{figure.median:,.{digits}f}" if figure.median < 1e6 else f"{figure.median / 1e6:.3g} M"


def memory(found: Memory) -> str:
    """A server's resident memory, in words."""
    idle = f"{found.idle / 2**20:,.0f} MiB"
    return idle if found.peak is None else f"{idle}, at most {found.peak / 2**20:,.0f} MiB"


def noise(result: Result) -> str:
    """How quiet the machine was, in words."""
    (marked, rows), (mean, worst) = result.marked(), result.others()
    return (
        f"{marked} of {rows} rows are marked; others took {mean:.1%} of it on average, {worst:.0%} in the worst round"
    )
