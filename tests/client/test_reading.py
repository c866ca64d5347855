"""Readings of a server's metrics: totals, quantiles, differences."""

from __future__ import annotations

import pytest

from attnserve._commands.reading import Reading


@pytest.fixture
def latency() -> Reading:
    """A reading of one histogram, in two series: 8 observations up to 1, 1 up to 2, 1 beyond."""
    buckets = {("a", "1.0"): 8.0, ("a", "2.0"): 8.0, ("a", "+Inf"): 8.0}
    buckets |= {("b", "1.0"): 0.0, ("b", "2.0"): 1.0, ("b", "+Inf"): 2.0}
    samples = {
        ("t_bucket", frozenset({("operation", operation), ("le", bound)})): count
        for (operation, bound), count in buckets.items()
    }
    samples |= {("t_count", frozenset()): 10.0, ("t_sum", frozenset()): 25.0}
    return Reading(samples, 12.0)


def test_quantiles(latency: Reading) -> None:
    assert latency.quantile(0.4, "t") == pytest.approx(0.5)
    assert latency.quantile(0.85, "t") == pytest.approx(1.5)
    assert latency.quantile(0.99, "t") == 2.0  # beyond the last bound: the last bound
    assert latency.quantile(0.5, "t", operation="b") == pytest.approx(2.0)
    assert latency.mean("t") == 2.5


def test_readings_subtract(latency: Reading) -> None:
    nothing = latency.since(latency)
    assert nothing.at == 0
    assert nothing.by("t_bucket", "operation") == {}
    assert nothing.quantile(0.5, "t") != nothing.quantile(0.5, "t")  # NaN: no observations, no quantile
    assert latency.since(nothing) == latency
    assert latency.total("t_bucket", le="+Inf") == 10.0


def test_what_is_no_page_of_metrics() -> None:
    with pytest.raises(ValueError, match=r"invalid metric name|could not convert string to float"):
        Reading.parse("<html>not metrics</html> at all")
