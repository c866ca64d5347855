"""What the service's own metrics say happened between two moments.

In: two readings of `/metrics`. Out: counts, and quantiles estimated from histograms as Prometheus estimates them.
"""

from __future__ import annotations

import math
import urllib.error
import urllib.request
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

_Labels = frozenset[tuple[str, str]]


class Reading(NamedTuple):
    """The samples of one scrape, or the difference of two: by name and labels."""

    samples: dict[tuple[str, _Labels], float]

    @classmethod
    def of(cls, http_address: str) -> Reading:
        """Scrapes `http://ADDRESS/metrics`. OSError if nothing answers there."""
        url = f"http://{http_address}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                families = text_string_to_metric_families(response.read().decode())
        except urllib.error.URLError as error:
            raise OSError(f"no metrics at {url}: {error.reason}") from error
        return cls(
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in families
                for sample in family.samples
            }
        )

    def since(self, earlier: Reading) -> Reading:
        """What was added between an earlier reading and this one."""
        return Reading({key: value - earlier.samples.get(key, 0.0) for key, value in self.samples.items()})

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name that have those labels, whatever their others."""
        return sum(
            value
            for (sample, its), value in self.samples.items()
            if sample == name and labels.items() <= dict(its).items()
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """The samples of that name that are not 0, by one of their labels, the largest first."""
        sums: dict[str, float] = {}
        for (sample, its), value in self.samples.items():
            if sample == name and value:
                key = dict(its)[label]
                sums[key] = sums.get(key, 0.0) + value
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def mean(self, name: str) -> float:
        """The mean of all that a histogram observed."""
        return self.total(f"{name}_sum") / (self.total(f"{name}_count") or 1.0)

    def quantile(self, q: float, name: str, **labels: str) -> float:
        """A quantile of a histogram, linear within its bucket, as Prometheus' `histogram_quantile` is."""
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
