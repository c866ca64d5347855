"""What a server's own metrics say: at one moment, or of what happened between two.

In: a server's endpoint. Out: its samples, counts, and quantiles estimated from histograms as Prometheus
estimates them. Needs prometheus-client, which the extra `top` brings.
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
    """When it was read, in seconds of a clock of its own; of a difference, how much later than the other."""

    @classmethod
    def of(cls, endpoint: Endpoint | str) -> Self:
        """Reads what is at an endpoint, or at a `host:port` without more ado. OSError if there are no metrics."""
        endpoint = Endpoint(endpoint) if isinstance(endpoint, str) else endpoint
        page = endpoint.fetch()
        try:
            return cls.parse(page)
        except ValueError as error:
            raise OSError(f"no metrics at {endpoint.url}: {error}") from None

    @classmethod
    def parse(cls, page: str) -> Self:
        """What a page says, as if it had been read now. ValueError if it is none of metrics."""
        return cls(
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(page)
                for sample in family.samples
            },
            monotonic(),
        )

    def since(self, earlier: Self) -> Self:
        """What was added between an earlier reading and this one."""
        return type(self)(
            {key: value - earlier.samples.get(key, 0.0) for key, value in self.samples.items()}, self.at - earlier.at
        )

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name that have those labels, whatever their others."""
        return sum(
            value
            for (sample, its), value in self.samples.items()
            if sample == name and labels.items() <= dict(its).items()
        )

    def labels(self, name: str) -> dict[str, str]:
        """The labels of the one sample of that name; empty if there is none."""
        return next((dict(its) for sample, its in self.samples if sample == name), {})

    def by(self, name: str, label: str) -> dict[str, float]:
        """The samples of that name that are not 0, by one of their labels, the largest first."""
        sums: dict[str, float] = {}
        for (sample, its), value in self.samples.items():
            if sample == name and value:
                key = dict(its)[label]
                sums[key] = sums.get(key, 0.0) + value
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def mean(self, name: str, **labels: str) -> float:
        """The mean of all that a histogram observed; NaN of nothing."""
        count = self.total(f"{name}_count", **labels)
        return self.total(f"{name}_sum", **labels) / count if count else math.nan

    def quantile(self, q: float, name: str, **labels: str) -> float:
        """A quantile of a histogram, linear within its bucket, as Prometheus has it; NaN of nothing."""
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
