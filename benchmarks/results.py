"""What a benchmark found, as it is written to a JSON file and read again."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.growth import Growth

NOISY: Final = 0.15
"""Above this spread of the rounds, or this share of the machine taken by others, a figure is marked."""

FIGURES: Final = (
    "requests_per_second",
    "tokens_per_second",
    "p50_us",
    "p99_us",
    "server_cpu_us",
    "client_cpu_us",
    "batch_requests",
    "other_cores",
)
"""What is measured of each way of calling: rates, percentiles of latency, CPU time of the server and of the load
generator per request, the mean number of requests in the server's batches, and the cores busy with something else."""


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
"""`FIGURES` by name; None where there is no such thing."""


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    """One workload: the service's resident memory before it and at its peak, in bytes, and the figures of each way."""

    name: str
    description: str
    in_flight: int
    mean_tokens: float
    idle_resident_bytes: int
    peak_resident_bytes: int | None
    ways: dict[str, Figures]

    def median(self, way: str, figure: str) -> float | None:
        """The median of one figure."""
        found = self.ways[way][figure]
        return None if found is None else found.median

    def ratio(self, way: str, to: str) -> float:
        """What a way does in a second over what another does. Of tokens, for which requests come to count differs."""
        mine, other = self.ways[way]["tokens_per_second"], self.ways[to]["tokens_per_second"]
        assert mine is not None
        assert other is not None
        return mine.median / other.median

    def noisy(self, way: str, cores: int) -> bool:
        """Whether the figures of a way deserve a mark, on a machine of so many cores."""
        rate, others = self.ways[way]["requests_per_second"], self.ways[way]["other_cores"]
        assert rate is not None
        assert others is not None
        return rate.spread > NOISY or others.median > NOISY * cores


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run: how it was made, where and when, and what it found. Load averages are of 1, 5 and 15 minutes."""

    command: str
    begun: str
    seconds: float
    rounds: int
    server_flags: list[str]
    machine: dict[str, str | int]
    load_before: list[float]
    load_after: list[float]
    workloads: list[WorkloadResult]
    growth: list[Growth]

    @property
    def cores(self) -> int:
        """The cores that could be used."""
        return int(self.machine["cores"])

    def write(self, path: Path) -> None:
        """Writes the JSON file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")

    @staticmethod
    def read(path: Path) -> Result:
        """Reads the JSON file."""
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
        workloads = [
            WorkloadResult(
                **{
                    **workload,
                    "ways": {
                        way: {name: figure and Figure(**figure) for name, figure in figures.items()}
                        for way, figures in workload["ways"].items()
                    },
                }
            )
            for workload in content.pop("workloads")
        ]
        growth = [Growth(**each) for each in content.pop("growth")]
        return Result(**content, workloads=workloads, growth=growth)
