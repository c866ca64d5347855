"""How the benchmark evaluates replies: counts, checks, medians, marks and goals; and when it sends requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from attnserve_server.host.cpus import usable_cpus
from benchmarks import table
from benchmarks.arrivals import ClosedLoop, OpenLoop
from benchmarks.goals import goals
from benchmarks.growth import Growth
from benchmarks.measure import (
    IN_PROCESS,
    NO_COMPUTE,
    SERVICE,
    RoundFigures,
    baseline,
    quietest,
)
from benchmarks.meters import MOST_REFUSED, Check, Clock, OpenClock, Refused, WrongAnswerError
from benchmarks.results import (
    FIGURES,
    IN_FLIGHT,
    OPEN_FIGURES,
    Curve,
    Figure,
    Figures,
    Memory,
    OpenResult,
    Point,
    WorkloadResult,
    by_concurrency,
)
from benchmarks.waiting import Waiting
from benchmarks.workloads import WORKLOADS


@pytest.mark.parametrize("name", ["S", "R"])
def test_answers_that_are_wrong_stop_the_benchmark(name: str) -> None:
    workload = WORKLOADS[name]
    right = workload.expected(0).astype(np.float32)
    assert Check(workload, "way").replied(0, 0.0, right)
    off = right.copy()
    off.flat[-1] += 3e-5
    not_a_number = right.copy()
    not_a_number.flat[0] = np.nan
    for wrong in (off, not_a_number, right[:-1], workload.expected(1).astype(np.float32), torch.from_numpy(off)):
        with pytest.raises(WrongAnswerError, match=f"workload {name}, way: the answer to request 0"):
            Check(workload, "way").replied(0, 0.0, wrong)


def test_a_server_without_computation_is_held_to_the_shape() -> None:
    workload = WORKLOADS["R"]
    assert Check(workload, "echo", values=False).replied(0, 0.0, workload.reply(0))
    with pytest.raises(WrongAnswerError, match="shape"):
        Check(workload, "echo", values=False).replied(0, 0.0, workload.reply(1))


def test_clock_counts_what_comes_between_warm_up_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("benchmarks.meters.perf_counter", lambda: now[0])
    workload = WORKLOADS["R"]
    server_cpu = iter([2.0, 5.0])
    clock = Clock(workload, 10.0, lambda: next(server_cpu))

    def reply_at(time: float, number: int) -> bool:
        now[0] = time
        return clock.replied(number, time - 0.5, b"")

    assert reply_at(100.0, 0)  # begins the warm-up, however long after the clock was made
    assert reply_at(101.0, 0)  # within the warm-up
    assert reply_at(102.5, 1)  # ends the warm-up, and counting starts
    assert reply_at(104.0, 2)
    assert reply_at(112.0, 3)
    assert not reply_at(112.5, 4)
    assert not reply_at(113.0, 5)  # too late
    found = clock.measurement
    assert found.latencies == [0.5] * 3
    assert found.tokens == sum(workload.lengths[2:5])
    assert found.seconds == 10.0
    assert found.server_cpu == 3.0


def test_what_is_refused_is_counted_apart_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("benchmarks.meters.perf_counter", lambda: now[0])
    workload, refused = WORKLOADS["S"], Refused("HTTP 408")
    closed, arrivals = Clock(workload, 10.0, lambda: 0.0), OpenLoop([0], 2.0, 12.0, seed=0)
    arrivals.begun = 100.0
    opened = OpenClock(workload, arrivals, 0.0, lambda: 0.0)
    now[0] = 102.0
    assert closed.replied(0, 101.0, refused)
    for number, due in enumerate(arrivals.times):
        now[0] = max(now[0], 100.0 + due)
        reply = refused if number % 2 else b""
        closed.replied(0, now[0] - 0.5, reply)
        going = opened.replied(0, 100.0 + due, reply)
    assert not going
    count = len(arrivals.times)
    assert opened.measurement.refused == {"HTTP 408": count // 2}
    assert len(opened.measurement.latencies) == count - count // 2
    assert 0 < closed.measurement.refused["HTTP 408"] <= count // 2
    assert set(closed.measurement.latencies) == {0.5}
    assert closed.measurement.tokens == 16 * len(closed.measurement.latencies)

    check = Check(workload, "way")
    assert all(check.replied(0, 0.0, refused) for _ in range(MOST_REFUSED))
    with pytest.raises(WrongAnswerError, match="does not come: HTTP 408"):
        check.replied(0, 0.0, refused)


def test_costs_by_concurrency_are_of_tokens_and_say_how_even_they_are() -> None:
    points = [Point(1 << power, 100.0, 10.0, cost) for power, cost in enumerate((8.0, 4.0, 2.0, None, 2.5, 3.0, 2.2))]
    points[3] = Point(8, 0.0, None, None)
    curve = Curve("concurrency of S", "attention", IN_FLIGHT, {SERVICE: points}, {SERVICE: {"HTTP 408": 3}})
    assert by_concurrency([curve, replace(curve, unit="tokens")]) == [curve]
    assert curve.unevenness(SERVICE) == 4.0
    assert curve.steepness(SERVICE) == 1.1
    (goal,) = goals([], (), [curve, replace(curve, unit="tokens")])
    assert (goal.workload, goal.found, goal.reached) == ("S", 4.0, False)
    costs = [next(iter(column.cells)) for column in table.token_costs([curve]).columns]
    assert costs == [f"S: {SERVICE}", "8", "4", "2", "–", "2.5", "3", "2.2", "4.00", "1.10"]
    shown = table.curve(curve)
    assert [next(iter(column.cells)) for column in shown.columns] == [SERVICE, *["100, 10"] * 4]
    assert "3 times" in str(shown.caption)


def test_memory_of_what_waits_is_over_its_size() -> None:
    found = [
        Waiting("attnserve, stream", 2048, 10, [3072.0]),
        Waiting("attnserve, unary", 2048, 10, [9.0, 2048.0, 9999.0]),
    ]
    assert [list(column.cells) for column in table.waiting(found).columns] == [
        ["attnserve, stream", "attnserve, unary"],
        ["1.50, 1", "1.00, 0"],
    ]
    (goal,) = goals([], found)
    assert (goal.found, goal.reached) == (1.5, False)
    assert "2 KiB, of its size (stream)" in goal.what


def test_what_others_disturb_is_measured_again() -> None:
    def timed_with(*other_cores: float) -> Callable[[], RoundFigures]:
        figures = iter(other_cores)
        return lambda: {"other_cores": next(figures)}

    limit = 0.15 * usable_cpus()
    for made, kept in (
        ([limit], limit),
        ([2 * limit, limit], limit),
        ([2 * limit, 4 * limit, 3 * limit], 2 * limit),
        ([4 * limit, 3 * limit, 0.0], 0.0),
    ):
        assert quietest(timed_with(*made)) == {"other_cores": kept}


def test_medians_and_spread() -> None:
    assert Figure.of([1.0, 2.0, 4.0]) == Figure([1.0, 2.0, 4.0], 2.0, 0.75)
    assert Figure.of([0.0]) == Figure([0.0], 0.0, 0.0)


def test_noise_is_marked_and_ratios_are_of_tokens() -> None:
    quiet: dict[str, Figure | None] = {name: Figure.of([100.0, 100.0]) for name in FIGURES}
    quiet["other_cores"] = Figure.of([0.1])
    busy = {**quiet, "other_cores": Figure.of([0.4])}
    unsteady = {**quiet, "requests_per_second": Figure.of([100.0, 140.0])}
    slower = {**quiet, "tokens_per_second": Figure.of([75.0])}
    faster = {**quiet, "tokens_per_second": Figure.of([150.0])}
    ways = {IN_PROCESS: quiet, "transport, stream": quiet, "transport, unary": busy, "attnserve, unary": unsteady}
    ways = {**ways, "attnserve, stream": faster, "Triton, unary": quiet, "Mosec, http": slower}
    result = WorkloadResult("S", "16 tokens", 16, 16.0, {"attnserve": Memory(1, 2)}, ways, [], {})

    assert [way for way in result.ways if result.noisy(way, 2)] == ["transport, unary", "attnserve, unary"]
    assert result.ratio("attnserve, stream", baseline("attnserve, stream")) == 1.5
    assert baseline("attnserve, unary") == "transport, unary"
    cells = {row[0]: row for row in table.rows(result, 2)}
    assert cells["attnserve, unary"][4].endswith(table.MARK)
    assert cells["attnserve, stream"][1:7] == ["1.50", "1.50", "1.50", "100", "150", "0%"]
    assert cells["Mosec, http"][3] == "0.75"
    assert result.best_peer() == "Triton, unary"
    assert "at most" in table.memory(Memory(1, 2))
    assert "at most" not in table.memory(Memory(1, None))
    (compared, limit) = goals([result])
    assert (compared.found, compared.reached) == (1.5, True)
    assert (limit.found, limit.reached) == (1.5, True)
    alone = {way: figures for way, figures in ways.items() if not way.startswith(("Triton", "Mosec"))}
    (compared, _) = goals([replace(result, ways=alone)])
    assert (compared.found, compared.reached) == (None, None)

    nothing = dict.fromkeys(FIGURES)
    none_answered = {**nothing, **dict.fromkeys(("requests_per_second", "tokens_per_second"), Figure.of([0.0]))}
    none_answered["other_cores"] = quiet["other_cores"]
    refusing = {"Mosec, http": {"HTTP 408": 7}}
    result = replace(result, ways={**ways, "Mosec, http": none_answered}, refused=refusing)
    assert table.rows(result, 2)[-1][4:10] == ["0", "0", "0%", "", "", ""]
    assert table.refusals(refusing) == ["Mosec, http was refused: 7 times 'HTTP 408'"]
    assert "7 times 'HTTP 408'" in str(table.rendered(result, 2).caption)
    (compared, _) = goals([replace(result, ways={**alone, "Mosec, http": none_answered})])
    assert compared.found is not None
    assert math.isnan(compared.found)
    assert not compared.reached


STEPPED = (IN_PROCESS, NO_COMPUTE, SERVICE)


UNKNOWN = (None, None, None)


def steps(
    name: str, rates: tuple[float, float], latencies: tuple[float | None, float | None, float | None]
) -> WorkloadResult:
    """A workload with the rates of torch in process and the service, and the latencies of all of `STEPPED`."""
    ways: dict[str, Figures] = {
        way: {**dict.fromkeys(FIGURES), "p50_us": None if latency is None else Figure.of([latency])}
        for way, latency in zip(STEPPED, latencies, strict=True)
    }
    for way, rate in zip((IN_PROCESS, SERVICE), rates, strict=True):
        ways[way]["tokens_per_second"] = Figure.of([rate])
    return WorkloadResult(name, "a decoder's step", 1, 1.0, {}, ways, [], {})


@pytest.mark.parametrize("name", ["D", "DA"])
def test_steps_are_within_torch_and_a_round_trip(name: str) -> None:
    for service, found, reached in ((450.0, 1.5, True), (600.0, 2.0, False)):
        *_, goal = goals([steps(name, (1.0, 1.0), (100.0, 200.0, service))])
        assert (goal.workload, goal.found, goal.reached) == (name, found, reached)
    *_, goal = goals([steps(name, (1.0, 1.0), UNKNOWN)])
    assert (goal.found, goal.reached) == (None, None)


def test_steps_of_many_caches_are_nearly_as_many_as_in_process() -> None:
    for rate, found, reached in ((80.0, 0.8, True), (75.0, 0.75, False)):
        (goal,) = goals([steps("D64", (100.0, rate), UNKNOWN)])
        assert (goal.workload, goal.found, goal.reached) == ("D64", found, reached)


def test_appends_and_forks_do_not_depend_on_the_length() -> None:
    grown = [
        Growth("append, over the wire", "the first 1,000 tokens", "the last of 10,000", 100.0, 120.0),
        Growth("step of 64, in process", "forks of one", "8,192 each", 1.0, 9.0),
        Growth("fork, in process", "an empty cache", "100,000 tokens", 4.0, 8.0),
    ]
    append, fork = goals([], growth=grown)
    assert (append.found, append.reached) == (1.2, True)
    assert (fork.found, fork.reached) == (2.0, False)
    assert append.what == "p50 of append, over the wire: the last of 10,000, of the first 1,000 tokens"
    shown = table.reached([append, fork])
    assert list(shown.columns[4].cells) == ["reached", "missed"]
    assert Console(width=2 * table.WIDTH).measure(shown).maximum <= table.WIDTH


def test_open_loops_say_how_busy_the_machine_was() -> None:
    """At equal shares of their own capacities, servers keep different shares of cores busy, which affects tails."""
    figures = {name: Figure.of([100.0]) for name in OPEN_FIGURES}
    figures |= {"server_cpu_us": Figure.of([9_000.0]), "client_cpu_us": Figure.of([6_000.0])}
    figures["other_cores"] = Figure.of([0.1])
    cells = table.open_row(OpenResult("Mosec, http", "Mosec, http", 0.9, figures), 2)
    assert dict(zip(table.OPEN_HEADINGS, cells, strict=True))["busy\n"] == "75%"
    nothing = {**dict.fromkeys(OPEN_FIGURES), "requests_per_second": Figure.of([0.0])}
    nothing["other_cores"] = figures["other_cores"]
    cells = table.open_row(OpenResult("Mosec, http", "Mosec, http", 0.9, nothing), 2)
    assert dict(zip(table.OPEN_HEADINGS, cells, strict=True))["busy\n"] == ""


def test_tails_are_compared_at_equal_shares_of_capacity_and_at_equal_load() -> None:
    def at(way: str, of: str, share: float, p99: float) -> OpenResult:
        figures = {**dict.fromkeys(OPEN_FIGURES), "p99_us": Figure.of([p99])}
        return OpenResult(way, of, share, figures)

    mosec, triton = "Mosec, http", "Triton, unary"
    loops = [
        *(at(SERVICE, SERVICE, 0.5, 1.0), at(mosec, mosec, 0.5, 1.0), at(SERVICE, mosec, 0.5, 1.0)),
        *(at(SERVICE, SERVICE, 0.9, 60.0), at(mosec, mosec, 0.9, 100.0), at(triton, triton, 0.9, 80.0)),
        at(SERVICE, mosec, 0.9, 30.0),
    ]
    result = WorkloadResult("X", "mixed", 16, 128.0, {}, {}, loops, {})
    assert [goal.found for goal in goals([result])] == [0.75, 0.3]
    assert [goal.found for goal in goals([replace(result, open=loops[3:4])])] == [None, None]
    assert [goal.found for goal in goals([replace(result, open=[])])] == [None, None]


def test_open_loops_of_a_slow_machine_fit_their_table() -> None:
    figures = {name: Figure.of([1_225.0]) for name in OPEN_FIGURES} | {"batch_requests": Figure.of([128.0])}
    figures |= {"p50_us": Figure.of([99_999.0]), "p99_us": Figure.of([99_999.9]), "p999_us": Figure.of([206_764.0])}
    figures["other_cores"] = Figure.of([0.1])
    loop = OpenResult(SERVICE, SERVICE, 0.9, figures)
    (_, _, _, _, *latencies, _, _, _, _, _) = table.open_row(loop, 2)
    assert latencies == ["99,999", "100 k", "207 k"]
    for noise in ({"p99_us": Figure.of([60.0, 100.0])}, {"other_cores": Figure.of([0.4])}):
        noisy = replace(loop, figures={**figures, **noise})
        assert (loop.noisy(2), noisy.noisy(2)) == (False, True)
        assert table.open_row(noisy, 2)[7].endswith(table.MARK)
        shown = table.opened(WorkloadResult("S1", "16 tokens", 1, 16.0, {}, {}, [noisy], {}), 2)
        assert Console(width=2 * table.WIDTH).measure(shown).maximum <= table.WIDTH
    shown = table.opened(WorkloadResult("S1", "16 tokens", 1, 16.0, {}, {}, [loop], {}), 2)
    assert Console(width=2 * table.WIDTH).measure(shown).maximum <= table.WIDTH


def test_an_open_loop_leaves_out_none_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("benchmarks.meters.perf_counter", lambda: now[0])
    arrivals = OpenLoop([0, 1], 2.0, 12.0, seed=0)
    arrivals.begun = 100.0
    clock = OpenClock(WORKLOADS["S"], arrivals, 2.0, lambda: 0.0)
    counted = [time for time in arrivals.times if time >= 2.0]
    assert 0 < len(counted) < len(arrivals.times)
    going = []
    for number, time in enumerate(arrivals.times):
        now[0] = 200.0 + number  # a server that stalls until all requests are due
        going.append(clock.replied(0, 100.0 + time, b""))
    assert going == [True] * (len(arrivals.times) - 1) + [False]
    assert len(clock.measurement.latencies) == len(counted)
    assert max(clock.measurement.latencies) > 95


async def test_open_loops_send_when_it_is_due_and_closed_ones_when_a_reply_came() -> None:
    arrivals = OpenLoop([7, 8], 1000.0, 0.05, seed=3)
    sent: asyncio.Queue[tuple[int, float]] = asyncio.Queue()
    arrivals.begin(lambda number, due: sent.put_nowait((number, due)))
    found = [await sent.get() for _ in arrivals.times]
    arrivals.end()
    assert [number for number, _ in found] == [(7, 8)[place % 2] for place in range(len(found))]
    assert [due - arrivals.begun for _, due in found] == pytest.approx(arrivals.times)
    assert arrivals.answered() is None
    assert all(late >= 0 for late in arrivals.late)
    assert all(time < 0.05 for time in arrivals.times)
    assert OpenLoop([7], 1000.0, 0.05, seed=3).times == arrivals.times != OpenLoop([7], 1000.0, 0.05, seed=4).times

    closed, first = ClosedLoop([1, 2, 3], 2), []
    closed.begin(lambda number, _: first.append(number))
    assert [*first, closed.answered()[0], closed.answered()[0]] == [1, 2, 3, 1]


async def test_an_open_loop_that_has_ended_sends_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timers = asyncio.get_running_loop(), []
    call_at = loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda *arguments: timers.append(call_at(*arguments)) or timers[-1])
    arrivals = OpenLoop([7], 0.01, 1000.0, seed=3)
    arrivals.begin(lambda number, due: pytest.fail("it is not due"))
    assert [timer.cancelled() for timer in timers] == [False]
    arrivals.end()
    assert [timer.cancelled() for timer in timers] == [True]
