"""`make demo`: it runs, agrees with itself, and reads the service's metrics rightly."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "embed_sentences.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_demo_with_a_service_of_its_own() -> None:
    demo = run()
    assert demo.returncode == 0, demo.stderr
    assert "ranking           the same" in demo.stdout
    difference = re.search(r"largest difference (\S+),", demo.stdout)
    assert difference is not None
    assert 0 < float(difference[1]) <= 1e-5  # exactly 0 would mean that the service was not asked
    assert "24 attention calls over the wire" in demo.stdout
    assert "requests          24 OK" in demo.stdout
    resident = re.search(r"the whole model there +4 .* KiB +.* KiB +.* ms +(\S+)\n", demo.stdout)
    assert resident is not None
    assert 0 < float(resident[1]) <= 1e-5
    assert "exit status 0" in demo.stdout
    assert max(map(len, demo.stdout.splitlines())) <= 100


def test_demo_with_a_running_service(server: Any) -> None:
    """Its counts are of its own run, however much the service has done before."""
    for _ in range(2):
        demo = run("--address", server.address, "--http-address", server.http_address)
        assert demo.returncode == 0, demo.stderr
        assert "requests          24 OK" in demo.stdout
        assert "that service holds no layer 'minilm'" in demo.stdout


def test_demo_without_a_service() -> None:
    demo = run("--address", "127.0.0.1:9", "--http-address", "127.0.0.1:9")
    assert demo.returncode == 1
    assert demo.stderr.startswith("embed_sentences: no metrics at http://127.0.0.1:9/metrics")
    assert "Traceback" not in demo.stderr


@pytest.fixture
def latency(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A reading of one histogram, in two series: 8 observations up to 1, 1 up to 2, 1 beyond."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from service_metrics import Reading

    buckets = {("a", "1.0"): 8.0, ("a", "2.0"): 8.0, ("a", "+Inf"): 8.0}
    buckets |= {("b", "1.0"): 0.0, ("b", "2.0"): 1.0, ("b", "+Inf"): 2.0}
    samples = {
        ("t_bucket", frozenset({("operation", operation), ("le", bound)})): count
        for (operation, bound), count in buckets.items()
    }
    samples |= {("t_count", frozenset()): 10.0, ("t_sum", frozenset()): 25.0}
    return Reading(samples)


def test_quantiles(latency: Any) -> None:
    assert latency.quantile(0.4, "t") == pytest.approx(0.5)
    assert latency.quantile(0.85, "t") == pytest.approx(1.5)
    assert latency.quantile(0.99, "t") == 2.0  # beyond the last bound: the last bound
    assert latency.quantile(0.5, "t", operation="b") == pytest.approx(2.0)
    assert latency.mean("t") == 2.5


def test_readings_subtract(latency: Any) -> None:
    nothing = latency.since(latency)
    assert nothing.by("t_bucket", "operation") == {}
    assert nothing.quantile(0.5, "t") != nothing.quantile(0.5, "t")  # NaN: of nothing there is no quantile
    assert latency.since(nothing) == latency
    assert latency.total("t_bucket", le="+Inf") == 10.0
