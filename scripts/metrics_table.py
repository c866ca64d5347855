"""The tables of all metrics of the server, in the documents.

In: the metrics as the server declares them, those that only some servers have included. Out: docs/metrics.md, with a
section for each group of metrics between its markers.

    python -m scripts.metrics_table    writes it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnserve_server.caches.store import CacheStore
from attnserve_server.observability import scraped
from attnserve_server.observability.health import Health
from attnserve_server.observability.metrics import Metrics
from benchmarks.document import with_text

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

DOCUMENT: Final = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "Requests": ("requests", "request", "rejected", "cancelled", "received", "sent", "streams"),
    "The queue, and what is admitted": ("queue", "in"),
    "Batches": ("batch", "query", "flops", "kernel"),
    "Callers": ("caller",),
    "Layers": ("layer",),
    "Caches": ("caches", "cache"),
    "The device and the event loop": ("device", "event"),
    "The server and its process": ("state", "build", "reload", "tls", "log", "process"),
}
"""The sections, each with the first words of the names of its metrics, without the service's own."""
UNITS: Final[Mapping[str, str]] = {
    "seconds": "seconds",
    "requests": "requests",
    "flops": "floating-point operations",
    "ratio": "parts of 1",
}
"""The units of histograms, by the last words of their names."""
_MARKERS: Final = ("<!-- metrics -->", "<!-- /metrics -->")
_SUFFIXES: Final[Mapping[str, str]] = {"counter": "_total", "info": "_info"}
"""What Prometheus shows after the names of metrics of a type."""
_ANY: Final = "any"
"""The value of labels whose values are known only to a running server."""


def registry() -> CollectorRegistry:
    """All metrics, each with every label that it can have."""
    metrics = Metrics(_ANY, _ANY, _ANY, _ANY)
    load = scraped.load(
        queue_requests=_zero,
        queue_bytes=_zero,
        in_flight_requests=_zero,
        in_flight_bytes=_zero,
        in_flight_flops=_zero,
        in_flight_seconds=_zero,
        limits={_ANY: _zero},
    )
    metrics.watch(
        *load,
        scraped.Device(_zero, _zero, lambda: {_ANY: 0}),
        scraped.loop(_zero),
        scraped.state(Health()),
        scraped.reloads({_ANY: bool}),
        scraped.certificate(_zero),
        scraped.log(_zero),
    )
    metrics.watch_caches(CacheStore(0, 4096, 1, 1), lambda: None)
    metrics.usage.of(_ANY)
    metrics.kernels({_ANY: 0})
    metrics.layers({_ANY: 0})
    metrics.layer_batch(_ANY, 0, 0, 0)
    return metrics.registry


def _zero() -> float:
    return 0.0


def markdown() -> str:
    """A section for each group, in markdown. ValueError if a metric is of no group, or a histogram of no known unit."""
    groups: dict[str, list[Metric]] = {group: [] for group in GROUPS}
    for family in registry().collect():
        groups[_group(family.name)].append(family)
    return "\n\n".join(f"## {group}\n\n{_section(families)}" for group, families in groups.items())


def _group(name: str) -> str:
    first = name.removeprefix("attnserve_").partition("_")[0]
    for group, words in GROUPS.items():
        if first in words:
            return group
    raise ValueError(f"{name} is in no group")


def _section(families: list[Metric]) -> str:
    heads = ["metric", "type", "labels", "what it says"]
    rows = [heads, ["---"] * len(heads)]
    for family in families:
        labels = ", ".join(f"`{label}`" for label in _labels(family))
        rows.append([f"`{_shown(family)}`", family.type, labels, family.documentation])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    notes = "\n".join(f"- {note}" for note in (*_buckets(families), *_values(families)))
    return f"{table}\n\n{notes}" if notes else table


def _shown(family: Metric) -> str:
    return family.name + _SUFFIXES.get(family.type, "")


def _labels(family: Metric) -> dict[str, tuple[str, ...]]:
    """The labels of a metric, each with its values, in their order; the bounds of buckets are no label."""
    values: dict[str, list[str]] = {}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if label != "le":
                values.setdefault(label, []).append(value)
    return {label: tuple(dict.fromkeys(found)) for label, found in values.items()}


def _buckets(families: Iterable[Metric]) -> Iterator[str]:
    for family in families:
        if family.type == "histogram":
            unit = UNITS.get(family.name.rpartition("_")[2])
            if unit is None:
                raise ValueError(f"the unit of {family.name} is not known")
            bounds = dict.fromkeys(sample.labels["le"] for sample in family.samples if "le" in sample.labels)
            yield f"Buckets of `{family.name}`, in {unit}: {', '.join(f'`{bound}`' for bound in bounds)}"


def _values(families: Iterable[Metric]) -> Iterator[str]:
    """The values of labels, where they are known; once for all metrics of which they are the same."""
    metrics: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for family in families:
        for label, values in _labels(family).items():
            if _ANY not in values:
                metrics.setdefault((label, values), []).append(f"`{_shown(family)}`")
    for (label, values), names in metrics.items():
        yield f"`{label}` of {' and '.join(names)}: {', '.join(f'`{value}`' for value in values)}"


def with_tables(document: str) -> str:
    """A document with all sections between its markers. ValueError if it lacks the markers."""
    return with_text(document, markdown(), *_MARKERS)


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text("utf-8")), "utf-8")
