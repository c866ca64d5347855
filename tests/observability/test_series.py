"""Our own histograms and counters show what those of Prometheus' client would."""

from __future__ import annotations

import bisect

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from attnserve_server.observability.counter import Counter
from attnserve_server.observability.histogram import Histogram


# 512 values are sorted into buckets at once: these are fewer, or several times as many.
@given(st.lists(st.floats(0, 20), max_size=40), st.integers(1, 60), st.booleans())
def test_histogram_counts_as_one_value_at_a_time_would(values: list[float], times: int, scraped_between: bool) -> None:
    bounds = (0.0, 1e-5, 0.5, 1.0, 10.0)
    registry = CollectorRegistry()
    histogram = Histogram("h", "H.", bounds, registry, "kind", ("a", "b"))
    counts = [0] * (len(bounds) + 1)
    for _ in range(times):
        for number in (*values, *bounds):
            histogram.series("a").observe(number)
            counts[bisect.bisect_left(bounds, number)] += 1
        if scraped_between:
            generate_latest(registry)
    (family,) = parse_text(generate_latest(registry).decode())
    read = {(s.name, s.labels["kind"], s.labels.get("le")): s.value for s in family.samples}
    for rank, bound in enumerate([*map(str, bounds), "+Inf"]):
        assert read["h_bucket", "a", bound] == sum(counts[: rank + 1])
        assert read["h_bucket", "b", bound] == 0
    assert read["h_count", "a", None] == sum(counts)
    assert read["h_sum", "a", None] == pytest.approx(times * (sum(values) + sum(bounds)))


def test_counters_show_what_those_of_prometheus_would() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain = Counter("plain_total", "Without labels.", ours)
    several = Counter("several_total", "With two.", ours, "one", "other")
    assert "plain_total 0.0" in generate_latest(ours).decode()
    its = prometheus_client.Counter("plain_total", "Without labels.", registry=theirs)
    its_several = prometheus_client.Counter("several_total", "With two.", ("one", "other"), registry=theirs)
    for amount in (1, 0, 2.5):
        plain.total().add(amount)
        its.inc(amount)
    for values in (("a", "b"), ("a", 'quoted "c"'), ("a", "b")):
        several.total(*values).add()
        its_several.labels(*values).inc()
    expected = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == expected
    with pytest.raises(ValueError, match="plain_total"):
        Counter("plain_total", "Twice.", ours)
