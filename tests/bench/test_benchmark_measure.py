"""What the benchmark makes of the replies of a round, and at which rates its open loops run."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from benchmarks import measure
from benchmarks.arrivals import Arrivals, OpenLoop
from benchmarks.loads import LOADS
from benchmarks.measure import NO_COMPUTE, SERVICE, SHARES, Timing, Way
from benchmarks.meters import Meter
from benchmarks.results import FIGURES, Figure, Figures
from benchmarks.servers import Running
from benchmarks.workload import Workload
from benchmarks.workloads import WORKLOADS


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time by which meters count."""
    now = [100.0]
    monkeypatch.setattr("benchmarks.meters.perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize("count", [1, 99, 100, 999, 1000])
def test_percentiles_are_told_of_enough_replies_alone(now: list[float], count: int) -> None:
    """The 99th of fewer than 100 is only the longest."""

    def load(address: str, workload: Workload, arrivals: Arrivals, meter: Meter) -> None:
        assert meter.replied(0, now[0], b"")  # begins the warm-up
        now[0] = 110.0
        assert meter.replied(0, now[0], b"")  # ends it
        for number in range(count):
            now[0] = 120.0 if number == count - 1 else 111.0
            going = meter.replied(0, now[0] - 0.25, b"")
        assert not going

    with asyncio.Runner() as loop:
        found = measure.closed(loop, Way(None, load), WORKLOADS["S"], 10.0)
    assert (found["requests"], found["requests_per_second"]) == (count, count / 10)
    assert found["tokens_per_second"] == 16 * count / 10
    assert found["p50_us"] == 250_000
    assert (found["p99_us"] is None) == (count < 100)
    assert (found["p999_us"] is None) == (count < 1000)
    assert found["server_cpu_us"] is None
    assert found["batch_requests"] == WORKLOADS["S"].in_flight


@pytest.mark.parametrize("stalled_s", [0.0, 16.0])
def test_goodput_is_what_came_in_time_however_long_the_last_took(now: list[float], stalled_s: float) -> None:
    """Every other reply takes 60 ms, and the last may take much longer than the loop."""
    due: list[float] = []

    def load(address: str, workload: Workload, arrivals: Arrivals, meter: Meter) -> None:
        assert isinstance(arrivals, OpenLoop)
        arrivals.begun, arrivals.late[:] = 100.0, [0.002]
        due.extend(time for time in arrivals.times if time >= 0.8)
        for place, time in enumerate(arrivals.times):
            sent_at = 100.0 + time
            now[0] = sent_at + (0.04 if place % 2 else 0.06)
            if place == len(arrivals.times) - 1:
                now[0] += stalled_s
            going = meter.replied(0, sent_at, b"")
        assert not going

    with asyncio.Runner() as loop:
        found = measure.opened_loop(loop, Way(None, load), WORKLOADS["S"], 4.0, 100.0, seed=1)
    assert 300 < len(due) < 500
    assert found["offered_per_second"] == len(due) / 4
    assert found["late_us"] == pytest.approx(2000)
    in_time, goodput = len(due) / 2, found["goodput_per_second"]
    assert goodput is not None
    assert goodput * max(4.0, now[0] - 100.8) == pytest.approx(in_time, abs=2)


def test_open_loops_run_at_shares_of_each_servers_own_capacity_and_the_service_at_those_of_the_best_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the ways of calling a peer the fastest counts; of those of the service, the one that goals compare."""
    capacity = {
        "attnserve, stream": 1000.0,
        "attnserve, sync SDK": 2000.0,
        NO_COMPUTE: 9000.0,
        "Triton, unary": 300.0,
        "Triton, stream": 400.0,
        "Mosec, http": 350.0,
        "Slow, http": 0.0,
    }
    server = Running("127.0.0.1:9", ())
    ways = {name: Way(server, LOADS["stream"], values=name != NO_COMPUTE) for name in capacity}
    names = {id(way): name for name, way in ways.items()}
    asked: Counter[tuple[str, float, float, int]] = Counter()

    def opened_loop(loop: Any, way: Way, workload: Any, seconds: float, rate: float, seed: int) -> dict[str, float]:
        asked[names[id(way)], seconds, rate, seed] += 1
        return {"other_cores": 0.0}

    def figures(rate: float) -> Figures:
        return {**dict.fromkeys(FIGURES), "requests_per_second": Figure.of([rate])}

    monkeypatch.setattr(measure, "opened_loop", opened_loop)
    measured = {name: figures(rate) for name, rate in capacity.items()}
    ignored: Any = None
    found = measure._open_loops(ignored, WORKLOADS["S"], ways, measured, Timing(0.5, 2), lambda _: None)
    best = "Triton, stream"
    expected = [(SERVICE, SERVICE, 1000.0), (best, best, 400.0), ("Mosec, http", "Mosec, http", 350.0)]
    expected.append((SERVICE, best, 400.0))
    assert [(each.way, each.of, each.share) for each in found] == [
        (way, of, share) for way, of, _ in expected for share in SHARES
    ]
    assert asked == Counter(
        (way, 2.0, share * rate, seed) for way, _, rate in expected for share in SHARES for seed in range(2)
    )
