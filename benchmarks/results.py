"""The results of a benchmark, as they are written to and read from a JSON file."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.growth import Growth
from benchmarks.waiting import Waiting

NOISY: Final = 0.15
"""Above this spread of the rounds, or this share of the machine taken by others, a figure is marked."""

TOO_MANY: Final = 0.25
"""Above this share of marked rows, the whole run is called noisy."""

OURS: Final = ("attnserve", "torch", "transport")
"""The first words of ways that need no peer."""

FIGURES: Final = (
    "requests_per_second",
    "tokens_per_second",
    "p50_us",
    "p99_us",
    "p999_us",
    "server_cpu_us",
    "client_cpu_us",
    "batch_requests",
    "other_cores",
    "requests",
)
"""What is measured for each way of calling: rates, percentiles of latency, CPU time of the server and of the load
generator per request, the mean number of requests in the server's batches, the cores busy with something else, and how
many requests were answered. A percentile that is only the longest of too few latencies is left out."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure's values in the rounds, their median, and their spread: half of their range over the median."""

    rounds: list[float]
    median: float
    spread: float

    @staticmethod
    def of(rounds: Sequence[float]) -> Figure:
        """The figure with these values."""
        median = statistics.median(rounds)
        return Figure(list(rounds), median, (max(rounds) - min(rounds)) / 2 / median if median else 0.0)


Figures = dict[str, Figure | None]
"""`FIGURES` by name; None for those that do not exist."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A server's resident memory before a workload and at its peak, in bytes; None if the system does not say."""

    idle: int
    peak: int | None


def _noisy(figures: Figures, name: str, cores: int) -> bool:
    """Whether one of the figures varies, or others took so much of the machine, that it is to be marked."""
    figure, others = figures[name], figures["other_cores"]
    assert others is not None
    return (figure is not None and figure.spread > NOISY) or others.median > NOISY * cores


GOAL_S: Final = 0.05
"""Goodput counts the replies that arrive within this time after their requests were due."""

OPEN_FIGURES: Final = (*FIGURES, "offered_per_second", "goodput_per_second", "late_us")
"""What is measured for an open loop: the same, with latency from when requests were due; the rate at which they were
due; the rate of replies in time; and how late the load generator itself was (the 99th percentile)."""


@dataclass(frozen=True, slots=True)
class OpenResult:
    """An open loop: the way of calling, what its rate was a share of, that share, and its figures."""

    way: str
    of: str
    share: float
    figures: Figures

    def noisy(self, cores: int) -> bool:
        """Whether its 99th percentile is to be marked as noisy, on a machine with this many cores."""
        return _noisy(self.figures, "p99_us", cores)


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    """One workload: the memory of each server, by name; the figures of each way in a closed loop; open loops; and the
    servers' refusals, with how often each was given, by the way of calling.
    """

    name: str
    description: str
    in_flight: int
    mean_tokens: float
    memory: dict[str, Memory]
    ways: dict[str, Figures]
    open: list[OpenResult]
    refused: dict[str, dict[str, int]]

    def median(self, way: str, figure: str) -> float | None:
        """The median of one figure."""
        found = self.ways[way][figure]
        return None if found is None else found.median

    def ratio(self, way: str, to: str) -> float:
        """The throughput of one way over that of another; NaN if the other's is 0. In tokens, since different requests
        may have been counted.
        """
        mine, other = self.ways[way]["tokens_per_second"], self.ways[to]["tokens_per_second"]
        assert mine is not None
        assert other is not None
        return mine.median / other.median if other.median else math.nan

    def noisy(self, way: str, cores: int) -> bool:
        """Whether the figures of a way are to be marked as noisy, on a machine with this many cores."""
        return _noisy(self.ways[way], "requests_per_second", cores)

    def peer_ways(self) -> list[str]:
        """The ways of calling peers."""
        return [way for way in self.ways if not way.startswith(OURS)]

    def best_peer(self) -> str | None:
        """The way of calling a peer with the highest throughput; None if there is none."""
        return max(self.peer_ways(), key=lambda way: self.median(way, "tokens_per_second") or 0.0, default=None)


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a curve, at one value of the variable: requests per second, the median latency, and the server's CPU
    time per token; both of these are None if nothing was answered.
    """

    value: int
    requests_per_second: float
    p50_us: float | None
    token_cpu_us: float | None


IN_FLIGHT: Final = "requests in flight"
"""The unit of the variable if that is concurrency."""


@dataclass(frozen=True, slots=True)
class Curve:
    """How figures grow with one variable, given by description and unit, for each way of calling; and refusals."""

    name: str
    description: str
    unit: str
    ways: dict[str, list[Point]]
    refused: dict[str, dict[str, int]]

    def unevenness(self, way: str) -> float:
        """The server's CPU time per token where it is highest, over that where it is lowest; NaN if unknown."""
        costs = self._costs(way)
        return max(costs) / min(costs) if costs else math.nan

    def steepness(self, way: str) -> float:
        """The cost at the last point, that of the largest value, over the lowest cost; NaN if unknown."""
        costs = self._costs(way)
        return costs[-1] / min(costs) if costs else math.nan

    def _costs(self, way: str) -> list[float]:
        return [point.token_cpu_us for point in self.ways[way] if point.token_cpu_us]


def by_concurrency(curves: Sequence[Curve]) -> list[Curve]:
    """Those in which concurrency varies."""
    return [curve for curve in curves if curve.unit == IN_FLIGHT]


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run: how, where and when it was made, and its results. Load averages are over 1, 5 and 15 minutes.

    `peers` describes the peers, by name.
    """

    command: str
    begun: str
    took_seconds: float
    seconds: float
    rounds: int
    server_flags: list[str]
    machine: dict[str, str | int]
    peers: dict[str, dict[str, str]]
    load_before: list[float]
    load_after: list[float]
    workloads: list[WorkloadResult]
    curves: list[Curve]
    growth: list[Growth]
    waiting: list[Waiting]

    @property
    def cores(self) -> int:
        """The number of usable cores."""
        return int(self.machine["cores"])

    def marked(self) -> tuple[int, int]:
        """How many rows are marked as noisy, and how many rows there are."""
        noisy = [each.noisy(way, self.cores) for each in self.workloads for way in each.ways]
        noisy += [loop.noisy(self.cores) for each in self.workloads for loop in each.open]
        return sum(noisy), len(noisy)

    def others(self) -> tuple[float, float]:
        """The share of the machine that other processes took: on average, and in the worst round."""
        figures = [figures["other_cores"] for each in self.workloads for figures in each.ways.values()]
        figures += [loop.figures["other_cores"] for each in self.workloads for loop in each.open]
        shares = [value / self.cores for figure in figures if figure is not None for value in figure.rounds]
        return statistics.fmean(shares), max(shares)

    @property
    def too_noisy(self) -> bool:
        """Whether the machine was too noisy for reliable figures."""
        marked, rows = self.marked()
        return marked > TOO_MANY * rows or self.others()[0] > NOISY

    def write(self, path: Path) -> None:
        """Writes the JSON file, as a whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f"{path.name}.{os.getpid()}")
        written.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")
        written.replace(path)

    @staticmethod
    def read(path: Path) -> Result:
        """Reads the JSON file."""
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
        workloads = [
            WorkloadResult(
                **{
                    **workload,
                    "memory": {name: Memory(**memory) for name, memory in workload["memory"].items()},
                    "ways": {way: _figures(figures) for way, figures in workload["ways"].items()},
                    "open": [OpenResult(**{**each, "figures": _figures(each["figures"])}) for each in workload["open"]],
                }
            )
            for workload in content.pop("workloads")
        ]
        growth = [Growth(**each) for each in content.pop("growth")]
        curves = [
            Curve(
                **{**curve, "ways": {way: [Point(**each) for each in points] for way, points in curve["ways"].items()}}
            )
            for curve in content.pop("curves")
        ]
        waiting = [Waiting(**each) for each in content.pop("waiting")]
        return Result(**content, workloads=workloads, curves=curves, growth=growth, waiting=waiting)


def _figures(content: dict[str, Any]) -> Figures:
    return {name: figure and Figure(**figure) for name, figure in content.items()}
