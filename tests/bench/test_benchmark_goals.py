"""The goals that compare latency and CPU time, and when a figure or a whole run is called noisy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.goals import Goal, goals
from benchmarks.measure import IN_PROCESS, NO_COMPUTE, SERVICE
from benchmarks.results import FIGURES, OPEN_FIGURES, Figure, Figures, OpenResult, Result, WorkloadResult

TRITON, MOSEC = "Triton, unary", "Mosec, http"


def figures(**medians: float | None) -> Figures:
    """Figures of 100 each, but for these."""
    values = {**dict.fromkeys(FIGURES, 100.0), "other_cores": 0.0, **medians}
    return {name: None if value is None else Figure.of([value]) for name, value in values.items()}


def workload(name: str, ways: dict[str, Figures], loops: list[OpenResult] | None = None) -> WorkloadResult:
    return WorkloadResult(name, "as in the tests", 1, 16.0, {}, ways, loops or [], {})


WAYS = {
    IN_PROCESS: figures(client_cpu_us=30.0, server_cpu_us=None),
    NO_COMPUTE: figures(p50_us=10.0, server_cpu_us=20.0),
    SERVICE: figures(p50_us=15.0, p99_us=999.0, server_cpu_us=60.0, tokens_per_second=140.0),
    MOSEC: figures(p50_us=60.0, tokens_per_second=70.0),
    TRITON: figures(p50_us=80.0),
}


def test_latency_is_compared_with_the_quickest_peer_and_with_no_compute() -> None:
    assert [goal.found for goal in goals([workload("S1", WAYS)])] == [0.25, 1.5]
    alone = {way: each for way, each in WAYS.items() if way not in (MOSEC, TRITON)}
    assert [goal.found for goal in goals([workload("S1", alone)])] == [None, 1.5]


def test_cpu_time_is_compared_with_that_of_torch_and_no_compute_together() -> None:
    assert [goal.found for goal in goals([workload("L", WAYS)])] == [1.4, 1.2]
    for way, figure in ((IN_PROCESS, "client_cpu_us"), (NO_COMPUTE, "server_cpu_us"), (SERVICE, "server_cpu_us")):
        unknown = {**WAYS, way: {**WAYS[way], figure: None}}
        assert [goal.found for goal in goals([workload("L", unknown)])] == [1.4, None]
    nothing = {**WAYS, IN_PROCESS: figures(client_cpu_us=0.0), NO_COMPUTE: figures(server_cpu_us=0.0)}
    assert goals([workload("L", nothing)])[1].reached is None


@pytest.mark.parametrize(("found", "at_least", "at_most"), [(0.9, False, True), (1.0, True, True), (1.1, True, False)])
def test_a_goal_includes_its_bound(found: float, at_least: bool, at_most: bool) -> None:
    assert Goal("S", "what", 1.0, True, found).reached == at_least
    assert Goal("S", "what", 1.0, False, found).reached == at_most


def test_the_better_peer_is_the_one_with_more_tokens_however_many_requests() -> None:
    ways = {**WAYS, MOSEC: figures(requests_per_second=900.0, tokens_per_second=70.0)}
    assert workload("S", ways).best_peer() == TRITON


def noisy(spread: float, others: float) -> Figures:
    """Figures whose rounds differ, while others took so many cores."""
    rounds = [100 * (1 - spread), 100 * (1 + spread)]
    both = {"requests_per_second": Figure.of(rounds), "p99_us": Figure.of(rounds), "other_cores": Figure.of([others])}
    return {**dict.fromkeys(OPEN_FIGURES), **both}


@pytest.mark.parametrize(
    ("spread", "others", "marked"), [(0.125, 0.0, 0), (0.1875, 0.0, 1), (0.0, 0.59, 0), (0.0, 0.61, 1)]
)
def test_a_row_is_marked_for_its_spread_or_for_what_others_took_of_all_cores(
    spread: float, others: float, marked: int
) -> None:
    quiet, varying = noisy(0.0, 0.0), noisy(spread, others)
    loops = [OpenResult(SERVICE, SERVICE, 0.9, each) for each in (quiet, varying, varying)]
    ran = run([workload("S", {SERVICE: varying, IN_PROCESS: quiet}, loops)])
    assert ran.marked() == (3 * marked, 5)
    assert ran.others() == (pytest.approx(3 * others / 4 / 5), others / 4)
    assert ran.too_noisy == bool(marked)


def test_a_run_is_too_noisy_if_others_took_too_much_in_all() -> None:
    """Or for too many marked rows; one in four is not yet too many."""
    quiet, varying = noisy(0.0, 0.0), noisy(0.5, 0.0)
    ran = run([workload("S", {SERVICE: varying, IN_PROCESS: quiet, NO_COMPUTE: quiet, TRITON: quiet})])
    assert (ran.marked(), ran.too_noisy) == ((1, 4), False)
    taken = {**quiet, "other_cores": Figure.of([0.0, 0.0, 2.4])}  # most of it in one round
    assert not run([workload("S", {SERVICE: taken, IN_PROCESS: quiet})]).too_noisy
    assert run([workload("S", {SERVICE: {**quiet, "other_cores": Figure.of([0.5, 0.5, 2.4])}})]).too_noisy


def run(workloads: list[WorkloadResult]) -> Result:
    """A run on 4 cores."""
    return Result("", "", 1.0, 1.0, 1, [], {"cores": 4}, {}, [], [], workloads, [], [], [])


def test_tails_are_those_of_the_highest_share_in_whatever_order_they_were_measured() -> None:
    loops = [
        OpenResult(way, of, share, {**dict.fromkeys(OPEN_FIGURES), "p99_us": Figure.of([p99])})
        for way, of, share, p99 in (
            *((SERVICE, SERVICE, 0.9, 60.0), (TRITON, TRITON, 0.9, 80.0), (SERVICE, TRITON, 0.9, 20.0)),
            *((SERVICE, SERVICE, 0.5, 1.0), (TRITON, TRITON, 0.5, 1.0), (SERVICE, TRITON, 0.5, 1.0)),
        )
    ]
    measured = workload("X", {}, loops)
    for each in (measured, replace(measured, open=loops[::-1])):
        assert [goal.found for goal in goals([each])] == [0.75, 0.25]
