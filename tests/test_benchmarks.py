"""The benchmark runs from end to end, refuses wrong answers, and its figures become tables that can be read.

One run of some workloads, so short that its figures mean nothing: no time is asserted.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from conftest import Server

from attnserve import _wire
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.config import Config
from attnserve_server.cpus import usable_cpus
from benchmarks import products, raw, table
from benchmarks.__main__ import PEERS, options
from benchmarks.arrivals import ClosedLoop, OpenLoop
from benchmarks.attention import Attention
from benchmarks.decode import Decode
from benchmarks.goals import goals
from benchmarks.loads import LOADS, in_process
from benchmarks.measure import (
    IN_PROCESS,
    SERVICE,
    SHARES,
    TRANSPORT,
    RoundFigures,
    Way,
    baseline,
    check,
    quietest,
    serving,
)
from benchmarks.messages import call, replies
from benchmarks.meters import Check, Clock, OpenClock, WrongAnswerError
from benchmarks.peers import compute, mosec, triton
from benchmarks.peers.peer import Peer
from benchmarks.plain import PlainAttention
from benchmarks.report import BEGIN, BEGIN_PLOT, END, END_PLOT, image, report, with_report
from benchmarks.results import FIGURES, OPEN_FIGURES, Figure, Memory, Result, WorkloadResult
from benchmarks.servers import Running
from benchmarks.workload import Shape, Workload
from benchmarks.workloads import CUDA_WORKLOADS, MILLION, WORKLOADS

ROOT = Path(__file__).parents[1]
WAYS = [
    IN_PROCESS,
    *(f"transport, {name}" for name in TRANSPORT),
    *(f"attnserve, {name}" for name in ("stream", "unary", "async SDK", "sync SDK")),
]
MEASURED = ["S1", "D", "X"]
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
    brief = ["--workloads", ",".join(MEASURED), "--open", "S1", "--no-curves", "--peers", "none"]
    brief += ["--seconds", "0.05", "--rounds", "1", "--growth", "400"]
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
    assert [workload["name"] for workload in content["workloads"]] == MEASURED
    assert [growth["name"] for growth in content["growth"]] == GROWTH
    assert all(growth["little_us"] > 0 and growth["much_us"] > 0 for growth in content["growth"])
    for workload in content["workloads"]:
        assert set(workload) == {*WorkloadResult.__annotations__}
        memory = workload["memory"]["attnserve"]
        assert memory["peak"] is None or memory["peak"] >= memory["idle"] > 0
        loops = [(each["way"], each["of"], each["share"]) for each in workload["open"]]
        assert loops == ([(SERVICE, SERVICE, share) for share in SHARES] if workload["name"] == "S1" else [])
        for each in workload["open"]:
            assert list(each["figures"]) == list(OPEN_FIGURES)
            figures = {name: figure["median"] for name, figure in each["figures"].items()}
            # A machine that is busy enough answers none in time.
            assert 0 <= figures["goodput_per_second"] <= figures["offered_per_second"] > 0
            assert figures["p50_us"] <= figures["p99_us"] <= figures["p999_us"]
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
    for name in MEASURED:
        assert f"{name}: {WORKLOADS[name].description}" in run.terminal
    for word in (*" ".join(table.HEADINGS).split(), *GROWTH):
        assert word in run.terminal


def test_file_is_read_as_it_was_written(run: Run, tmp_path: Path) -> None:
    Result.read(run.file).write(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(run.file.read_text())


def test_report_goes_between_the_markers_of_the_document(run: Run, tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    picture, readme = tmp_path / "docs" / "performance.png", tmp_path / "README.md"
    picture.parent.mkdir()
    readme.write_text(f"{BEGIN_PLOT}{END_PLOT}\n")
    command = [sys.executable, "-m", "benchmarks.report", "--json", str(run.file)]
    command += ["--document", str(document), "--readme", str(readme), "--plot", str(picture)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=110)
    written = document.read_text()
    text = f"{image(document, picture)}\n\n{report(Result.read(run.file))}"
    assert "(docs/performance.png)" in text
    assert readme.read_text() == f"{BEGIN_PLOT}\n{image(readme, picture)}\n{END_PLOT}\n"
    assert written == f"before\n{BEGIN}\n{text}\n{END}\nafter\n"
    assert with_report(written, text) == written
    assert max(map(len, written.splitlines())) <= table.WIDTH
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="followed by"):
        with_report(f"{END} {BEGIN}", "text")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workloads", "S,Q"],
        ["--open", "Q"],
        ["--peers", "Q"],
        ["--rounds", "0"],
        ["--seconds", "0"],
        ["--growth", "5"],
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        options(arguments)
    assert capsys.readouterr().err.startswith("usage: python -m benchmarks")


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


def test_requests_of_one_kind_have_messages_of_one_length() -> None:
    for workload in WORKLOADS.values():
        by_length = {(len(workload.request(number)), len(workload.reply(number))) for number in workload.numbers}
        assert len(by_length) <= len(set(map(workload.kind, workload.numbers)))


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
    slower = {**quiet, "tokens_per_second": Figure.of([75.0])}
    faster = {**quiet, "tokens_per_second": Figure.of([150.0])}
    ways = {IN_PROCESS: quiet, "transport, stream": quiet, "transport, unary": busy, "attnserve, unary": unsteady}
    ways = {**ways, "attnserve, stream": faster, "Triton, unary": quiet, "Mosec, http": slower}
    result = WorkloadResult("S", "16 tokens", 16, 16.0, {"attnserve": Memory(1, 2)}, ways, [])

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
    (compared, _) = goals([replace(result, ways={way: result.ways[way] for way in (*WAYS[:3], "attnserve, stream")})])
    assert (compared.found, compared.reached) == (None, None)


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
        now[0] = 200.0 + number  # a server that stalls for as long as all are due
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

    closed, first = ClosedLoop([1, 2, 3], 2), []
    closed.begin(lambda number, _: first.append(number))
    assert [*first, closed.answered()[0], closed.answered()[0]] == [1, 2, 3, 1]


MODEL = Shape(heads=8, kv_heads=2, head_dim=32, dtype="bfloat16")
MODELS = [
    Attention("prefill", 2, (24, 24), shape=MODEL),
    Attention("prefill, half", 2, (24, 24), shape=replace(MODEL, dtype="float16")),
    Decode("steps", 2, (3, 3), tokens=40, shape=MODEL, distinct=2, pool_bytes=1 << 22),
    Decode("steps that append", 1, (3,), manner="append", tokens=40, shape=MODEL, distinct=2, pool_bytes=1 << 22),
]


@pytest.mark.parametrize("workload", MODELS, ids=[each.name for each in MODELS])
def test_workloads_of_models_are_served_and_computed_as_defined(workload: Workload, server: Server) -> None:
    """What runs on CUDA, small and on a CPU: the benchmark's own check of the service and of torch in process."""
    service = Running(server.address, ())
    with asyncio.Runner() as loop:
        for way in (Way(None, in_process), *(Way(service, load, prepared=True) for load in LOADS.values())):
            check(loop, workload, "way", way)
    assert {len(workload.request(number)) for number in workload.numbers} == {len(workload.request(0))}
    assert workload.output(workload.reply(0)).shape == workload.output_shape(0)
    assert workload.output(workload.reply(0)).dtype == workload.output_dtype


def test_workloads_for_cuda_fit_what_a_server_takes() -> None:
    limits = Config()
    for workload in CUDA_WORKLOADS.values():
        shape = workload.shape  # type: ignore[attr-defined]
        rows = [shape.heads + 2 * shape.kv_heads, shape.head_dim, shape.numpy.itemsize]
        tokens = max(workload.lengths)
        assert tokens * int(np.prod(rows)) < limits.max_message_bytes
        if isinstance(workload, Decode):
            per_token = 2 * shape.kv_heads * shape.head_dim * shape.numpy.itemsize
            assert workload.tokens * tokens * per_token < workload.cache_bytes
            assert workload.tokens * tokens <= MILLION


def test_what_peers_are_sent_is_what_the_service_gets() -> None:
    for workload in WORKLOADS.values():
        if workload.peers:
            problem = workload.plain(0)
            arrays = [each for each in problem if isinstance(each, np.ndarray)]
            bodies = sum(array.nbytes for array in arrays)
            assert bodies < len(triton.request(problem)) < bodies + 300
            assert bodies < len(mosec.request(problem)) < bodies + 150


def test_messages_of_the_peers_hold_what_was_put_in() -> None:
    problem = WORKLOADS["X"].plain(1)
    assert isinstance(problem, PlainAttention)
    assert problem.mask is not None
    message = triton.MESSAGES["ModelInferRequest"].FromString(b"".join(triton.call(77, triton.request(problem))))
    assert [each.name for each in message.inputs] == ["QUERY", "KEY", "VALUE", "OPTIONS", "MASK"]
    assert [tuple(each.shape)[1:] for each in message.inputs[:3]] == [each.shape for each in problem[:3]]
    for array, content in zip(
        (*problem[:3], problem.mask), [*message.raw_input_contents[:3], message.raw_input_contents[4]], strict=True
    ):
        assert array.tobytes() == content

    reply = (
        triton.MESSAGES["ModelInferResponse"](
            outputs=[{"name": "OUTPUT", "datatype": "FP32", "shape": [1, 2, 3]}],
            raw_output_contents=[np.arange(6, dtype=np.float32).tobytes()],
        ).SerializeToString()
        + b"\x1a\x0277"
    )
    streamed = _wire.field_prefix(triton.RESPONSE_FIELD, len(reply)) + reply
    ((call_id, content),) = triton.replies(streamed)
    assert call_id == 77
    output = triton.Triton().output((2, 3), bytes(content))
    assert output.tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(RuntimeError, match="no such model"):
        list(triton.replies(_wire.field_prefix(triton.ERROR_FIELD, 13) + b"no such model"))
    assert mosec.Mosec().output((2, 3), output.tobytes()).tolist() == output.tolist()


def test_peers_compute_what_is_asked_of_them() -> None:
    problems = [WORKLOADS["X"].plain(number) for number in range(8)] * 2
    requests = []
    for problem in problems:
        assert isinstance(problem, PlainAttention)
        query, key, value = map(torch.from_numpy, problem[:3])
        mask = None if problem.mask is None else torch.from_numpy(problem.mask)
        requests.append(compute.Attention(query, key, value, mask, problem.causal, problem.scale))
    for number, output in enumerate(compute.attend(requests)):
        assert np.abs(output.numpy() - WORKLOADS["X"].expected(number % 8)).max() < 2e-6


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
@pytest.mark.parametrize("name", ["X", "A", "S1"])
def test_peers_that_are_installed_answer_right(peer: Peer, name: str, tmp_path: Path) -> None:
    if not peer.installed:
        pytest.skip("make bench-peers installs it")
    workload = WORKLOADS[name]
    with asyncio.Runner() as loop, serving(peer, workload, peer.settings_for(name), tmp_path) as server:
        for way, load in peer.loads.items():
            check(loop, workload, f"{peer.name}, {way}", Way(server, load, peer))
        batches, requests = server.batches()
        assert requests >= batches >= 0
        assert server.resident_bytes() > 0
        assert server.cpu() > 0


async def test_http_connections_read_replies_however_they_come_and_are_kept() -> None:
    bodies = [b"", b"short", bytes(range(256)) * 1000]
    connections: list[asyncio.Task[Any] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                number = (await reader.readexactly(1))[0]
                if number == len(bodies):
                    writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy")
                    continue
                head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(bodies[number])}\r\n\r\n".encode()
                reply = head + bodies[number]
                for cut in (10, len(head) + 1, len(reply)):
                    writer.write(reply[:cut])
                    reply = reply[cut:]
                    await writer.drain()
                    await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    found: list[tuple[int, bytes]] = []

    class Collected:
        def replied(self, number: int, sent_at: float, reply: Any) -> bool:
            found.append((number, bytes(reply)))
            return len(found) < 12

    requests = [bytes([number]) for number in range(len(bodies))]
    await raw.http(f"{host}:{port}", requests, ClosedLoop(range(len(bodies)), 2), Collected())
    assert all(body == bodies[number] for number, body in found)
    assert {number for number, _ in found} == {0, 1, 2}
    assert len(connections) == 2
    with pytest.raises(RuntimeError, match="503"):
        await raw.http(f"{host}:{port}", [bytes([len(bodies)])], ClosedLoop([0], 1), Collected())
    await asyncio.gather(*filter(None, connections))
    server.close()
    await server.wait_closed()


def test_products_are_measured_in_every_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(products, "ROUNDS", 1)
    monkeypatch.setattr(products, "WIDTHS", ((32, 48), (48, 32)))
    threads = torch.get_num_threads()
    products.main()
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert [printed.count(widths) for widths in ("32 → 48", "48 → 32", "float32", "bfloat16")] == [2, 2, 1, 1]
