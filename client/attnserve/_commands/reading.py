"""What a server's own metrics say: at one moment, or about the time between two.

In: a server's endpoint. Out: its samples, counts, and quantiles estimated from histograms as Prometheus
estimates them. Needs prometheus-client, which the extra `top` installs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import monotonic
from typing import Self, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from attnserve._commands.endpoint import Endpoint

_Labels: TypeAlias = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Reading:
    """The samples of one scrape, or the difference of two: by name and labels."""

    samples: dict[tuple[str, _Labels], float]
    at: float
    """When it was read, in seconds of a monotonic clock; for a difference, the seconds between the two."""

    @classmethod
    def of(cls, endpoint: Endpoint | str) -> Self:
        """Reads the metrics at an endpoint, or at a plain `host:port`. OSError if there are none."""
        endpoint = Endpoint(endpoint) if isinstance(endpoint, str) else endpoint
        page = endpoint.fetch()
        try:
            return cls.parse(page)
        except ValueError as error:
            raise OSError(f"no metrics at {endpoint.url}: {error}") from None

    @classmethod
    def parse(cls, page: str) -> Self:
        """The samples on a page, as if read now. ValueError if it is not a page of metrics."""
        return cls(
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(page)
                for sample in family.samples
            },
            monotonic(),
        )

    def since(self, earlier: Self) -> Self:
        """The difference between an earlier reading and this one."""
        return type(self)(
            {key: value - earlier.samples.get(key, 0.0) for key, value in self.samples.items()}, self.at - earlier.at
        )

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples that have that name and those labels, and perhaps other labels, too."""
        return sum(
            value
            for (sample, its), value in self.samples.items()
            if sample == name and labels.items() <= dict(its).items()
        )

    def labels(self, name: str) -> dict[str, str]:
        """The labels of the only sample of that name; empty if there is none."""
        return next((dict(its) for sample, its in self.samples if sample == name), {})

    def by(self, name: str, label: str) -> dict[str, float]:
        """The non-zero samples of that name, summed by one of their labels, the largest first."""
        sums: dict[str, float] = {}
        for (sample, its), value in self.samples.items():
            if sample == name and value:
                key = dict(its)[label]
                sums[key] = sums.get(key, 0.0) + value
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def mean(self, name: str, **labels: str) -> float:
        """The mean of a histogram's observations; NaN if there are none."""
        count = self.total(f"{name}_count", **labels)
        return self.total(f"{name}_sum", **labels) / count if count else math.nan

    def quantile(self, q: float, name: str, **labels: str) -> float:
        """A quantile of a histogram, interpolated within its bucket as Prometheus does; NaN if it is empty."""
        buckets: dict[float, float] = {}
        for (sample, its), value in self.samples.items():
            if sample == f"{name}_bucket" and labels.items() <= dict(its).items():
                bound = float(dict(its)["le"])
                buckets[bound] = buckets.get(bound, 0.0) + value
        rank = q * buckets.get(math.inf, 0.0)
        low, below = 0.0, 0.0
        for bound, count in sorted(buckets.items()):
            if count >= rank and count > below:
                return low if bound == math.inf else low + (bound - low) * (rank - below) / (count - below)
            low, below = bound, count
        return math.nan
