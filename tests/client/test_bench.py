"""`attnserve bench` against the real server: it measures, checks the answers, and reports errors in one line."""

from __future__ import annotations

import json
import math
import socket
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import Server

from attnserve import AttentionResult, Client, PermissionDeniedError, Timings, UnavailableError
from attnserve._commands import bench, cli
from attnserve._commands.bench import WrongAnswerError

FIELDS = {*bench.Measured.__annotations__}


def test_every_load_is_measured_in_closed_and_open_loops(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", server.address, "--seconds", "0.2", "--loads", "S,S1,D", "--json"]
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert not err
    found = json.loads(out)
    assert [(each["load"], each["share"]) for each in found] == [
        (load, share) for load in ("S", "S1", "D") for share in (None, 0.5, 0.9)
    ]
    for each in found:
        assert set(each) == FIELDS
        assert each["requests"] > 0
        assert each["p99_s"] >= each["p50_s"] > each["compute_s"] > 0
        assert each["spread"] >= 0
        assert each["batch_size"] >= 1
        if each["share"] is None:
            rate = each["requests_per_second"]
        else:
            due = np.cumsum(np.random.default_rng(1).exponential(1 / (each["share"] * rate), 10_000))
            counted = ((due >= 0.04) & (due < 0.24)).sum()  # after the warm-up
            assert each["requests"] == pytest.approx(counted, abs=1)
        tokens = bench.LOADS[each["load"]].queries
        assert each["tokens_per_second"] == pytest.approx(tokens * each["requests_per_second"])


def test_a_table_says_what_the_loads_are(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", server.address, "--seconds", "0.1", "--loads", "M", "--no-open"]) == 0
    titles, row, empty, load, note, *_ = capsys.readouterr().out.splitlines()
    assert titles.split()[:3] == ["load", "loop", "req/s"]
    assert row.split()[:2] == ["M", "closed"]
    assert not empty
    assert load == f"M: {bench.LOADS['M'].description}"
    assert "µs" in note


def test_an_interrupt_ends_it_quietly(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_closed", interrupted)
    assert cli.main(["bench", server.address, "--loads", "S1"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("ending", [WrongAnswerError("wrong"), UnavailableError("gone"), KeyboardInterrupt()])
def test_what_ends_it_has_a_line_to_itself_on_a_terminal(
    ending: BaseException, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(*arguments: Any) -> None:
        raise ending

    monkeypatch.setattr(bench, "_closed", ended)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert cli.main(["bench", server.address, "--loads", "S1"]) > 0
    _, progress, complaint = capsys.readouterr().err.split("\r\x1b[K")
    assert progress == "S1: closed loop, round 1 of 3"
    assert complaint == "" or complaint.startswith("attnserve: ")


@pytest.mark.parametrize("error", [WrongAnswerError("nothing was due"), UnavailableError("gone")])
def test_what_was_measured_before_an_error_is_printed(
    error: Exception, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(bench, "_open", failed)
    assert cli.main(["bench", server.address, "--seconds", "0.05", "--loads", "S1", "--json"]) == 1
    out, err = capsys.readouterr()
    assert [(each["load"], each["share"]) for each in json.loads(out)] == [("S1", None)]
    assert err.startswith(f"attnserve: {server.address}: load S1: {error}")


def test_a_load_that_fails_is_named_and_the_others_are_measured(
    start_server: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    """Here one whose messages are longer than the server takes; so is that which fills D's cache."""
    server = start_server("--device", "cpu", "--max-message-bytes", "100KiB")
    flags = ("--seconds", "0.05", "--rounds", "1", "--no-open", "--json")
    assert cli.main(["bench", server.address, *flags, "--loads", "M,S1,D,S"]) == 1
    out, err = capsys.readouterr()
    assert [each["load"] for each in json.loads(out)] == ["S1", "S"]
    begin = f"attnserve: {server.address}: load "
    assert [line.removeprefix(begin)[:3] for line in err.splitlines()] == ["M: ", "D: "]
    assert cli.main(["bench", server.address, *flags, "--loads", "M,L"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 2)


@pytest.mark.parametrize("error", [UnavailableError("gone"), PermissionDeniedError("who are you?")])
def test_what_would_end_every_load_is_told_once(
    error: Exception, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(bench, "_closed", failed)
    assert cli.main(["bench", server.address, "--loads", "S1,S"]) == 1
    assert [line.partition(": load ")[2][:2] for line in capsys.readouterr().err.splitlines()] == ["S1"]


def test_caches_are_not_left_behind(server: Server, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process is killed, they expire before long."""
    before = {cache.name for cache in client.caches.list()}
    leases = set()
    closed = bench._closed

    def looked_at(*arguments: Any) -> bench.Measured:
        leases.update(cache.ttl for cache in client.caches.list() if cache.name not in before)
        return closed(*arguments)

    monkeypatch.setattr(bench, "_closed", looked_at)
    assert cli.main(["bench", server.address, "--seconds", "0.05", "--loads", "D", "--no-open"]) == 0
    assert leases == {bench.LEASE_S}
    assert {cache.name for cache in client.caches.list()} == before


@pytest.mark.parametrize("off", [1e-3, math.nan])
@pytest.mark.parametrize("load", ["S", "D"])
def test_a_wrong_answer_is_not_timed(
    load: str, off: float, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Client.submit

    def wrong(*arguments: Any, **options: Any) -> Future[AttentionResult[np.ndarray[Any, Any]]]:
        future = right(*arguments, **options)
        future.result().output[0, -1, 0] += off
        return future

    monkeypatch.setattr(Client, "submit", wrong)
    assert cli.main(["bench", server.address, "--seconds", "0.05", "--loads", load]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert f"load {load}: the answer is off by {off:.1e}" in err


def test_a_service_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "unix:/nowhere/at/all", "--timeout", "2"]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("attnserve: unix:/nowhere/at/all: ")
    assert err.count("\n") == 1, "the other loads are not tried"


def test_a_service_that_does_not_answer_is_not_waited_for_longer_than_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert cli.main(["bench", address, "--timeout", "0.2", "--loads", "S,D"]) == 1
    told = [f"attnserve: load {name}: no reply from {address} within 0.2 s\n" for name in "SD"]
    assert capsys.readouterr() == ("", "".join(told))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--loads", "S,Q"],
        ["--seconds", "0"],
        ["--rounds", "0"],
        ["--rounds", "1001"],
        ["--rounds", "x"],
        ["--rounds", "+3"],
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", *arguments])
    assert "usage: attnserve bench" in capsys.readouterr().err


def test_a_request_that_is_late_is_late_from_when_it_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stalls: replies come when the last request is sent, so the first is late by that long."""
    timings = type("Timings", (), {"queue": 0.0, "compute": 0.0})()
    result = type("Result", (), {"timings": timings, "batch_size": 1})()
    waiting: list[Future[Any]] = []
    sent = 0

    def submit() -> Future[Any]:
        nonlocal sent
        sent += 1
        asked: Future[Any] = Future()
        waiting.append(asked)
        if sent == due:
            for future in waiting:
                future.set_result(result)
        return asked

    gaps = np.random.default_rng(1).exponential(1 / 200, 1000)
    times = np.cumsum(gaps)
    due = int((times < 0.6).sum())
    used = iter([1.0, 2.2])  # of which 0.2 for the warm-up
    monkeypatch.setattr("attnserve._commands.bench.time.process_time", lambda: next(used))
    found = bench._open("S", submit, 0.9, 200.0, 0.5, 60.0)
    assert found.client_cpu_s * found.requests == pytest.approx(1.0)
    assert found.requests == int(((times >= 0.1) & (times < 0.6)).sum())
    assert found.p99_s > 0.4
    assert found.in_time == 1.0, "there is a minute left"


def test_a_load_that_was_not_kept_up_with_is_marked() -> None:
    """Its latencies say for how long it was, not how fast the service is."""
    closed = bench.Measured("S", None, None, 100, 1000.0, 1e4, 1e-3, 2e-3, 3e-3, 1e-4, 1e-4, 2.0, 1e-4)
    kept = replace(closed, share=0.5, in_time=0.99)
    behind = replace(closed, share=0.9, in_time=0.62)
    text = bench._text([closed, kept, behind])
    assert "open, 50%  " in text
    assert "1,000 2,000 3,000 100 100 100 2.0" in " ".join(text.split()), "microseconds"
    assert not replace(closed, share=0.5, in_time=bench.KEPT_UP).falls_behind
    assert "open, 90% *" in text
    assert "* More were due than were answered (in time S 90%: 62%)" in text
    assert "* More" not in bench._text([closed, kept])


def test_the_median_of_the_rounds_is_told_and_rounds_that_differ_are_marked() -> None:
    closed = bench.Measured("S", None, None, 100, 1000.0, 1e4, 1e-3, 2e-3, 3e-3, 1e-4, 1e-4, 2.0, 1e-4)
    rates = iter([900.0, 1200.0, 1000.0])
    found = bench._median(3, "S", lambda: replace(closed, requests_per_second=next(rates)))
    assert (found.requests_per_second, found.spread) == (1000.0, 0.15)
    opened, tails = replace(closed, share=0.9, in_time=1.0), iter([0.1, 0.4, 0.2])
    unsteady = bench._median(3, "S", lambda: replace(opened, p99_s=next(tails)))
    assert (unsteady.p99_s, unsteady.spread) == (0.2, pytest.approx(0.75))
    assert "~75%" in bench._text([found, unsteady])
    assert "differ by more than 15%" in bench._text([found, unsteady])
    assert "~" not in bench._text([found])


def test_arrays_of_answers_are_let_go() -> None:
    """However long it measures, all that is kept of a reply is its latency."""
    timings = Timings(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    kept: weakref.WeakSet[AttentionResult[Any]] = weakref.WeakSet()
    most = asked = 0

    class Result(AttentionResult[Any]):
        """One that can be weakly referenced: results themselves have slots."""

    def submit() -> Future[Any]:
        nonlocal most, asked
        asked += 1
        answered: Future[Any] = Future()
        result = Result(np.empty(8), None, None, timings, 1)
        kept.add(result)
        answered.set_result(result)
        most = max(most, len(kept))
        return answered

    while asked < 20:
        bench._closed("S", submit, 0.1)
    found = bench._open("S", submit, 0.9, 2000.0, 0.1, -1.0)
    assert found.requests > 100
    assert found.in_time == 0.0, "it was over a second before"
    assert most <= 2


def test_a_closed_loop_counts_what_comes_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the answer with which its time is over."""
    now = [100.0]
    monkeypatch.setattr("attnserve._commands.bench.time.perf_counter", lambda: now[0])
    timings = Timings(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def submit() -> Future[Any]:
        now[0] += 0.7
        asked: Future[Any] = Future()
        asked.set_result(AttentionResult(np.empty(8), None, None, timings, 1))
        return asked

    found = bench._closed("S1", submit, 10.0)
    # The first answer begins the warm-up of 2 s; those counted come 2.1, 2.8 ... 12.6 s later.
    assert found.requests == 16
    assert found.requests_per_second == pytest.approx(16 / 10.6)
    assert (found.p50_s, found.p999_s) == pytest.approx((0.7, 0.7))


def test_a_server_that_is_too_slow_is_measured_until_it_has_answered_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers 20 requests a second, and 40 are due: for twice as long."""
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def submit() -> Future[Any]:
        now[0] += 0.05
        asked: Future[Any] = Future()
        asked.set_result(AttentionResult(np.empty(8), None, None, Timings(0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 1))
        return asked

    monkeypatch.setattr("attnserve._commands.bench.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("attnserve._commands.bench.time.sleep", sleep)
    found = bench._open("S1", submit, 0.9, 40.0, 10.0, 0.0)
    assert 300 < found.requests < 500
    assert found.requests_per_second == pytest.approx(found.requests / (now[0] - 102.0))
    assert found.requests_per_second < 20
    assert 0.3 < found.in_time < 0.5  # type: ignore[operator]
    assert found.falls_behind
    later = bench._open("S1", submit, 0.9, 40.0, 10.0, 60.0)
    assert later.in_time == 1.0


def test_an_open_loop_in_which_nothing_was_due_is_no_measurement() -> None:
    with pytest.raises(WrongAnswerError, match=r"nothing was due within 0\.01 s at 0\.1 a second"):
        bench._open("S1", Future, 0.9, 0.1, 0.01, 1.0)


def test_what_is_measured_of_answers() -> None:
    answers = [
        bench._Answer(1.0, 1.0 + number / 1000, Timings(0.0, 2.0, 0.0, 3.0, 0.0, 0.0), number % 2)
        for number in range(1001)
    ]
    found = bench._measured("M", 0.5, 1.0, answers, 2.0, 10.01)
    assert (found.p50_s, found.p99_s, found.p999_s) == pytest.approx((0.5, 0.99, 0.999))
    assert (found.queue_s, found.compute_s) == (2.0, 3.0)
    assert (found.requests, found.requests_per_second, found.tokens_per_second) == (1001, 500.5, 128 * 500.5)
    assert (found.batch_size, found.client_cpu_s) == pytest.approx((500 / 1001, 0.01))
