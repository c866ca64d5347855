"""A counter cheap enough for many values per request: Prometheus' own format, an addition without a lock.

In: amounts, from one thread. Out: a metric family whenever the registry is scraped from that thread. The lock that
`prometheus_client.Counter` takes, for other threads, costs several times as much as the addition.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily


class Total:
    """The count of one counter, or of one combination of its labels."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1) -> None:
        """Counts an amount that is not negative."""
        self.value += amount


class Counter:
    """A counter with some labels. Without any there is one total, from the start."""

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry, *labels: str) -> None:
        self._name, self._documentation, self._labels = name, documentation, labels
        self._totals: dict[tuple[str, ...], Total] = {}
        if not labels:
            self.total()
        registry.register(self)

    def total(self, *label_values: str) -> Total:
        """The total of a combination of labels, which is exported from now on. To be looked up once and kept."""
        return self._totals.setdefault(label_values, Total())

    def describe(self) -> Iterable[CounterMetricFamily]:
        """The family without values, from which the registry learns the names."""
        return [CounterMetricFamily(self._name, self._documentation, labels=self._labels)]

    def collect(self) -> Iterable[CounterMetricFamily]:
        """The family with all that has been counted so far."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for label_values, total in self._totals.items():
            family.add_metric(label_values, total.value)
        return [family]
