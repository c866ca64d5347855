"""The plot of a run: throughputs side by side, and how they grow.

In: the results. Out: a PNG, on white, legible at the width of a README.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import matplotlib as mpl

from benchmarks.measure import IN_PROCESS, NO_COMPUTE, SERVICE
from benchmarks.results import Curve, Result, WorkloadResult, by_concurrency

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Final = {"attnserve": "#0b6e4f", "Triton": "#d1812b", "Mosec": "#7a5195", "transport": "#9aa5b1"}
NAMES: Final = {"transport": "no compute"}
SHOWN: Final = ("S", "M", "L", "A", "B", "R", "X", "DS", "D")


def plot(result: Result, file: Path) -> None:
    """Draws the plot: throughput relative to torch in process, and a graph for each curve."""
    mpl.use("agg")
    from matplotlib import pyplot

    curves = [each for each in result.curves if each not in by_concurrency(result.curves)[1:]]
    rows = 1 + (len(curves) + 1) // 2
    with pyplot.style.context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = pyplot.figure(figsize=(10, 2.9 * rows), layout="constrained")
        grid = figure.add_gridspec(rows, 2)
        _bars(figure.add_subplot(grid[0, :]), [each for each in result.workloads if each.name in SHOWN])
        for place, curve in enumerate(curves):
            _curve(figure.add_subplot(grid[1 + place // 2, place % 2]), curve)
        figure.savefig(file, dpi=110, metadata={"Software": None})
        pyplot.close(figure)


def server(way: str) -> str:
    """The name of the server that a way calls."""
    return way.partition(",")[0]


def _bars(axes: Axes, results: Sequence[WorkloadResult]) -> None:
    """For each workload, the service and the best way of calling each peer, relative to torch in process."""
    names = ["attnserve", *dict.fromkeys(server(way) for each in results for way in each.peer_ways())]
    width, lowest = 0.8 / len(names), 1.0
    for place, name in enumerate(names):
        positions, heights = [], []
        for index, result in enumerate(results):
            ways = [SERVICE] if name == "attnserve" else [way for way in result.peer_ways() if server(way) == name]
            if ways:
                positions.append(index + (place - (len(names) - 1) / 2) * width)
                heights.append(max(result.ratio(way, IN_PROCESS) for way in ways))
        lowest = min([lowest, *heights])
        bars = axes.bar(positions, heights, width * 0.92, color=COLOURS.get(name), label=NAMES.get(name, name))
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    axes.set_xticks(range(len(results)), [each.name for each in results])
    # A step over a cache and one that is sent with its history are two orders of magnitude apart.
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_ylim(bottom=lowest / 2)
    axes.set_xlim(-0.6, len(results) - 0.4)
    axes.set_ylabel("throughput, torch in process = 1")
    axes.set_title(
        "By workload (D: peers are sent the keys and values that the service holds)", fontsize=10, loc="left"
    )
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.7, 1.0), ncols=len(names))


def _curve(axes: Axes, curve: Curve) -> None:
    for way in sorted(curve.ways, key=(NO_COMPUTE, SERVICE).__contains__):
        points, name = curve.ways[way], server(way)
        axes.plot(
            [point.value for point in points],
            [point.requests_per_second for point in points],
            marker="o",
            markersize=3.5,
            linestyle="--" if name == "transport" else "-",
            color=COLOURS.get(name),
            label=NAMES.get(name, name),
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    values = [point.value for point in next(iter(curve.ways.values()))]
    axes.set_xticks(values, [_short(value) for value in values])
    axes.set_xlabel(curve.unit)
    axes.set_ylabel("requests/s")
    axes.set_title(curve.description, fontsize=9, loc="left")
    axes.legend(frameon=False, fontsize=8)


def _short(value: int) -> str:
    for power, letter in ((20, "Mi"), (10, "Ki")):
        if value >= 1 << power and value % (1 << power) == 0:
            return f"{value >> power} {letter}"
    return str(value)
