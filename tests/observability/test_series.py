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
from attnserve_server.observability.histogram import Histogram, Rows


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


@pytest.mark.parametrize("times", [1, 2, 3, 511, 512, 2000])
def test_a_value_that_comes_several_times_counts_as_often(times: int) -> None:
    """By itself, or in a row with those of other series; and values do not pile up until they are read."""
    registry = CollectorRegistry()
    histogram = Histogram("h", "H.", (1.0, 10.0), registry, "kind", ("a", "b", "c"))
    a, b, c = map(histogram.series, "abc")
    rows = Rows((b, c))
    for _ in range(3):
        a.observe(0.5, times)
        a.observe(20.0)
        rows.observe((5.0, 0.25), times)
        rows.observe((20.0, 20.0))
        assert max(len(a._pending), len(rows._pending)) < 512
    (family,) = parse_text(generate_latest(registry).decode())
    read = {(s.name, s.labels["kind"], s.labels.get("le")): s.value for s in family.samples}
    for kind, value, counts in (("a", 0.5, (1, 1)), ("b", 5.0, (0, 1)), ("c", 0.25, (1, 1))):
        expected = [3 * times * count for count in counts] + [3 * times + 3]
        assert [read["h_bucket", kind, le] for le in ("1.0", "10.0", "+Inf")] == expected
        assert read["h_sum", kind, None] == 3 * (times * value + 20.0)


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
