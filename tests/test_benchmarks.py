"""The benchmark runs from end to end, refuses wrong answers, and its figures become tables that can be read.

One run of all workloads, so short that its figures mean nothing: no time is asserted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.cpus import usable_cpus
from benchmarks import table
from benchmarks.measure import IN_PROCESS, TRANSPORT, RoundFigures, baseline, quietest
from benchmarks.messages import call, replies
from benchmarks.meters import Check, Clock, WrongAnswerError
from benchmarks.report import BEGIN, END, report, with_report
from benchmarks.results import FIGURES, Figure, Result, WorkloadResult
from benchmarks.workload import Workload
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).parents[1]
WAYS = [
    IN_PROCESS,
    *(f"transport, {name}" for name in TRANSPORT),
    *(f"attnserve, {name}" for name in ("stream", "unary", "async SDK", "sync SDK")),
]
GROWTH = ["append, in process", "fork, in process", "append, over the wire", "fork, over the wire"]

pytestmark = pytest.mark.timeout(600)


class Run(NamedTuple):
    """What a run of the benchmark wrote to the terminal and to its file."""

    terminal: str
    file: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run of everything, in a terminal of 100 columns."""
    file = tmp_path_factory.mktemp("benchmarks") / "deep" / "bench.json"
    brief = ["--seconds", "0.05", "--rounds", "1", "--growth", "400"]
    command = [sys.executable, "-m", "benchmarks", *brief, "--json", str(file)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "COLUMNS": "100"}, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return Run(done.stdout, file)


def test_all_workloads_are_measured_and_their_file_has_all_fields(run: Run) -> None:
    content: dict[str, Any] = json.loads(run.file.read_text())
    assert set(content) == {*Result.__annotations__}
    assert {"cpu", "cores", "memory_bytes", "platform", "python", "torch", "grpcio"} <= set(content["machine"])
    assert [workload["name"] for workload in content["workloads"]] == [*WORKLOADS]
    assert [growth["name"] for growth in content["growth"]] == GROWTH
    assert all(growth["little_us"] > 0 and growth["much_us"] > 0 for growth in content["growth"])
    for workload in content["workloads"]:
        assert set(workload) == {*WorkloadResult.__annotations__}
        assert workload["peak_resident_bytes"] is None or (
            workload["peak_resident_bytes"] >= workload["idle_resident_bytes"] > 0
        )
        assert list(workload["ways"]) == WAYS
        for way, figures in workload["ways"].items():
            assert list(figures) == list(FIGURES)
            missing = {name for name, figure in figures.items() if figure is None}
            if way == IN_PROCESS:
                assert missing == {"server_cpu_us"}
            elif way.startswith("transport"):
                assert missing == {"batch_requests"}
            else:
                assert not missing
                assert 1 <= figures["batch_requests"]["median"] <= workload["in_flight"]
            assert all(len(figure["rounds"]) == 1 for figure in figures.values() if figure is not None)
            assert figures["requests_per_second"]["median"] > 0


def test_terminal_shows_every_workload_without_cutting_anything(run: Run) -> None:
    assert max(map(len, run.terminal.splitlines())) <= table.WIDTH
    assert "…" not in run.terminal
    for workload in WORKLOADS.values():
        assert f"{workload.name}: {workload.description}" in run.terminal
    for word in (*" ".join(table.HEADINGS).split(), *GROWTH):
        assert word in run.terminal


def test_file_is_read_as_it_was_written(run: Run, tmp_path: Path) -> None:
    Result.read(run.file).write(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(run.file.read_text())


def test_report_goes_between_the_markers_of_the_document(run: Run, tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    command = [sys.executable, "-m", "benchmarks.report", "--json", str(run.file), "--document", str(document)]
    for _ in range(2):
        subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    written = document.read_text()
    assert written == f"before\n{BEGIN}\n{report(Result.read(run.file))}\n{END}\nafter\n"
    assert max(map(len, written.splitlines())) <= table.WIDTH
    with pytest.raises(ValueError, match="followed by"):
        with_report(f"{END} {BEGIN}", "text")


@pytest.mark.parametrize(
    "arguments", [["--workloads", "S,Q"], ["--rounds", "0"], ["--seconds", "0"], ["--growth", "5"]]
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m benchmarks")


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_torch_in_process_computes_every_request(workload: Workload) -> None:
    check = Check(workload, IN_PROCESS)
    missing = set(workload.numbers)
    for batch in workload.batches():
        assert len(batch.requests) == workload.in_flight
        for number, output in zip(batch.requests, batch.compute(), strict=True):
            missing.discard(number)
            assert check.replied(number, 0.0, output) == bool(missing)
    assert not missing


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


def test_replies_without_computation_are_as_long_as_computed_ones() -> None:
    for workload in WORKLOADS.values():
        payload = 4 * int(np.prod(workload.output_shape(0)))
        # Beside the payload, a reply has a header and what it says of each of up to 64 caches.
        assert payload < len(workload.reply(0)) < payload + (300 if workload.name == "D64" else 100)


def test_requests_of_one_length_have_replies_of_one_length() -> None:
    for workload in WORKLOADS.values():
        by_length = {(len(workload.request(number)), len(workload.reply(number))) for number in workload.numbers}
        assert len(by_length) == len(set(workload.lengths))


def test_streams_messages_hold_what_was_put_in() -> None:
    workload = WORKLOADS["A"]
    operation, request = workload.operation, workload.request(0)
    message = pb.AttendStreamRequest.FromString(
        b"".join([*call(operation, 7, request), *call(operation, 300, request)])
    )
    assert [each.id for each in message.calls] == [7, 300]
    assert all(each.apply == pb.ApplyRequest.FromString(request) for each in message.calls)

    reply = pb.ApplyResponse.FromString(workload.reply(3))
    response = pb.AttendStreamResponse(
        replies=[pb.AttendStreamReply(id=300, apply=reply), pb.AttendStreamReply(apply=reply)]
    )
    found = list(replies(operation, response.SerializeToString()))
    assert [(call_id, pb.ApplyResponse.FromString(bytes(data))) for call_id, data in found] == [
        (300, reply),
        (0, reply),
    ]

    failed = pb.AttendStreamResponse(replies=[{"id": 1, "error": {"code": 5, "message": "no such layer"}}])
    with pytest.raises(RuntimeError, match="no such layer"):
        list(replies(operation, failed.SerializeToString()))
    other = pb.AttendStreamResponse(replies=[pb.AttendStreamReply(id=1, attend=pb.AttendResponse())])
    with pytest.raises(RuntimeError, match="without a result"):
        list(replies(operation, other.SerializeToString()))


def test_clock_counts_what_comes_between_warm_up_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("benchmarks.meters.perf_counter", lambda: now[0])
    workload = WORKLOADS["R"]
    server_cpu = iter([2.0, 5.0])
    clock = Clock(workload, 10.0, lambda: next(server_cpu))

    def reply_at(time: float, number: int) -> bool:
        now[0] = time
        return clock.replied(number, time - 0.5, b"")

    assert reply_at(101.0, 0)  # within the warm-up
    assert reply_at(102.5, 1)  # ends it, and the counting begins
    assert reply_at(104.0, 2)
    assert reply_at(112.0, 3)
    assert not reply_at(112.5, 4)
    assert not reply_at(113.0, 5)  # too late
    found = clock.measurement
    assert found.latencies == [0.5] * 3
    assert found.tokens == sum(workload.lengths[2:5])
    assert found.seconds == 10.0
    assert found.server_cpu == 3.0


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
    faster = {**quiet, "tokens_per_second": Figure.of([150.0])}
    ways = {IN_PROCESS: quiet, "transport, stream": quiet, "transport, unary": busy, "attnserve, unary": unsteady}
    result = WorkloadResult("S", "16 tokens", 16, 16.0, 1, 2, {**ways, "attnserve, stream": faster})

    assert [way for way in result.ways if result.noisy(way, 2)] == ["transport, unary", "attnserve, unary"]
    assert result.ratio("attnserve, stream", baseline("attnserve, stream")) == 1.5
    assert baseline("attnserve, unary") == "transport, unary"
    cells = {row[0]: row for row in table.rows(result, 2)}
    assert cells["attnserve, unary"][3].endswith(table.MARK)
    assert cells["attnserve, stream"][1:5] == ["1.50", "1.50", "100", "0%"]
    assert "under load" in table.memory(result)
    assert "under load" not in table.memory(replace(result, peak_resident_bytes=None))
