"""The benchmark runs end to end, rejects wrong answers, and turns its figures into readable tables.

One run of some workloads, so short that its figures mean nothing: no time is asserted.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import pytest
from rich.console import Console
from rich.text import Text

from benchmarks import __main__ as benchmark
from benchmarks import speeds, table
from benchmarks.__main__ import options
from benchmarks.document import with_text
from benchmarks.measure import (
    IN_PROCESS,
    SERVICE,
    SHARES,
    TRANSPORT_LOADS,
)
from benchmarks.report import (
    BEGIN,
    BEGIN_ELSEWHERE,
    BEGIN_PLOT,
    END,
    END_ELSEWHERE,
    END_PLOT,
    brief,
    image,
    report,
)
from benchmarks.results import FIGURES, OPEN_FIGURES, Curve, Point, Result, WorkloadResult
from benchmarks.servers import Running
from benchmarks.suites import SUITES
from benchmarks.waiting import Waiting
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).parents[2]
WAYS = [
    IN_PROCESS,
    *(f"transport, {name}" for name in TRANSPORT_LOADS),
    *(f"attnserve, {name}" for name in ("stream", "unary", "async SDK", "sync SDK")),
]
MEASURED = ["S1", "D", "X"]
GROWTH = [
    "append, in process",
    "fork, in process",
    "step of 64, in process",
    "append, over the wire",
    "fork, over the wire",
]

pytestmark = pytest.mark.timeout(600)


class Run(NamedTuple):
    """What a run of the benchmark wrote to the terminal and to its file."""

    terminal: str
    file: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run of everything, in a terminal of 100 columns."""
    file = tmp_path_factory.mktemp("benchmarks") / "deep" / "bench.json"
    brief = ["--workloads", ",".join(MEASURED), "--open", "S1", "--no-curves", "--no-memory", "--peers", "none"]
    brief += ["--seconds", "0.05", "--rounds", "1", "--growth", "400"]
    command = [sys.executable, "-m", "benchmarks", *brief, "--json", str(file)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "COLUMNS": "100"}, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return Run(done.stdout, file)


def percentiles_of_too_few(figures: dict[str, Any]) -> set[str]:
    """The percentiles that would only be the longest latency of a round; they must be missing."""
    requests = figures["requests"]["median"]
    names = {name for name, least in (("p99_us", 100), ("p999_us", 1000)) if requests < least}
    assert all(figures[name] is None for name in names)
    return names


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
            figures = {name: figure["median"] for name, figure in each["figures"].items() if figure is not None}
            assert set(OPEN_FIGURES) - set(figures) == percentiles_of_too_few(each["figures"])
            # On a busy machine, possibly no answer is in time.
            assert 0 <= figures["goodput_per_second"] <= figures["offered_per_second"] > 0
            percentiles = [figures[name] for name in ("p50_us", "p99_us", "p999_us") if name in figures]
            assert percentiles == sorted(percentiles)
        assert list(workload["ways"]) == WAYS
        for way, figures in workload["ways"].items():
            assert list(figures) == list(FIGURES)
            missing = {name for name, figure in figures.items() if figure is None} - percentiles_of_too_few(figures)
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


def test_servers_end_with_a_run_that_is_told_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--workloads", "S1", "--peers", "none", "--seconds", "60"]
    with subprocess.Popen(
        [*command, "--json", str(tmp_path / "bench.json")],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        parent = psutil.Process(process.pid)
        while len(started := parent.children()) < 2:  # the service, and one that computes nothing
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        process.wait(60)
    gone, left = psutil.wait_procs(started, timeout=1)
    for each in left:
        each.kill()
    assert (len(gone), left) == (2, [])


def test_progress_takes_one_line_of_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    shown = io.StringIO()
    console = Console(file=shown, width=table.WIDTH, force_terminal=True)
    with console.status("") as status:
        benchmark._progress(status, "X (14 of 14)", "open loop, round 1 of 3: attnserve, stream, 50% of its own")
        console.print(status.renderable)
    lines = Text.from_ansi(shown.getvalue()).plain.replace("\r", "\n").splitlines()
    assert any("X (14 of 14): open loop" in line for line in lines)
    assert max(map(len, lines)) < 40


def test_file_is_read_as_it_was_written(run: Run, tmp_path: Path) -> None:
    Result.read(run.file).write(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(run.file.read_text())


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark starts no servers, and leaves this process, which goes on, as it is."""
    monkeypatch.setattr(benchmark, "running", lambda *arguments: nullcontext(Running("", ())))
    for name in ("torch.set_num_threads", "benchmarks.__main__.keep_memory"):
        monkeypatch.setattr(name, lambda number: None)


@pytest.mark.usefixtures("nothing_runs")
def test_what_was_measured_before_the_run_was_cut_off_is_in_the_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter(Result.read(run.file).workloads[:2])

    def measure(*arguments: Any, **options: Any) -> WorkloadResult:
        try:
            return next(measured)
        except StopIteration:
            raise KeyboardInterrupt from None

    file = tmp_path / "cut.json"
    monkeypatch.setattr(benchmark, "measure", measure)
    arguments = ["--workloads", ",".join(MEASURED), "--open", "none", "--no-curves", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(KeyboardInterrupt):
        benchmark.main()
    assert Result.read(file).workloads == Result.read(run.file).workloads[:2]
    assert {path.name for path in tmp_path.iterdir()} == {"cut.json"}


@pytest.mark.usefixtures("nothing_runs")
def test_curves_and_memory_are_in_the_file_before_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve = Curve("length", "attention", "tokens", {SERVICE: [Point(1, 100.0, 10.0, 1.0)]}, {})
    waited = Waiting("attnserve, stream", 1024, 8, [1100.0])
    file = tmp_path / "cut.json"

    def memory(*arguments: Any) -> list[Waiting]:
        assert Result.read(file).curves == [curve]
        return [waited]

    def cut_off(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "measure_curves", lambda *arguments, **options: [curve])
    monkeypatch.setattr(benchmark, "waiting", memory)
    monkeypatch.setattr(benchmark, "growth", cut_off)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--workloads", "none", "--peers", "none", "--json", str(file)])
    with pytest.raises(KeyboardInterrupt):
        benchmark.main()
    assert (Result.read(file).curves, Result.read(file).waiting) == ([curve], [waited])


def test_report_goes_between_the_markers_of_the_document(run: Run, tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    picture, readme = tmp_path / "docs" / "performance.png", tmp_path / "README.md"
    picture.parent.mkdir()
    readme.write_text(f"{speeds.BEGIN}{speeds.END}\n{BEGIN_PLOT}{END_PLOT}\n")
    command = [sys.executable, "-m", "benchmarks.report", "--json", str(run.file)]
    command += ["--document", str(document), "--readme", str(readme), "--plot", str(picture)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=110)
    written = document.read_text()
    text = f"{image(document, picture)}\n\n{report(Result.read(run.file))}"
    assert "(docs/performance.png)" in text
    found = speeds.speeds(Result.read(run.file))
    assert f"| {speeds.ROWS['S1']} |" in found
    shown = f"{BEGIN_PLOT}\n{image(readme, picture)}\n{END_PLOT}"
    assert readme.read_text() == f"{speeds.BEGIN}\n{found}\n{speeds.END}\n{shown}\n"
    assert written == f"before\n{BEGIN}\n{text}\n{END}\nafter\n"
    assert with_text(written, text, BEGIN, END) == written
    assert max(map(len, written.splitlines())) <= table.WIDTH
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="followed by"):
        with_text(f"{END} {BEGIN}", "text", BEGIN, END)


def test_report_of_another_machine_goes_to_its_own_place_in_brief(run: Run, tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    before, after = f"{BEGIN}\nfigures\n{END}", "after\n"
    begin, end = BEGIN_ELSEWHERE.format("old"), END_ELSEWHERE.format("old")
    document.write_text(f"{before}\n{begin}\nold\n{end}\n{after}")
    command = [sys.executable, "-m", "benchmarks.report", "--elsewhere", "old", "--json", str(run.file)]
    subprocess.run([*command, "--document", str(document)], cwd=ROOT, check=True, timeout=110)
    text = brief(Result.read(run.file))
    assert document.read_text() == f"{before}\n{begin}\n{text}\n{end}\n{after}"
    assert text in report(Result.read(run.file))


def test_a_report_without_workloads_has_what_was_measured(run: Run) -> None:
    """As of `--workloads none`, for the memory of what waits."""
    waited = [Waiting("attnserve, stream", 1024, 8, [1100.0])]
    text = report(replace(Result.read(run.file), workloads=[], waiting=waited))
    assert "Load average" in text
    assert "Other processes" not in text
    assert "Requests that wait" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workloads", "S,Q"],
        ["--open", "Q"],
        ["--peers", "Q"],
        ["--rounds", "0"],
        ["--seconds", "0"],
        ["--seconds", "nan"],
        ["--seconds", "inf"],
        ["--growth", "5"],
        ["--growth", "-5"],
        ["--device", "cuda", "--memory"],
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        options(arguments)
    assert capsys.readouterr().err.startswith("usage: python -m benchmarks")


def test_what_cannot_be_measured_or_written_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--json", str(tmp_path / "file" / "bench.json")])
    with pytest.raises(SystemExit, match=r"^--json: .*file"):
        benchmark.main()
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--device", "cuda", "--json", str(tmp_path / "bench.json")])
    monkeypatch.setattr(benchmark.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees no CUDA device"):
        benchmark.main()


@pytest.mark.parametrize("device", SUITES)
def test_by_default_requests_are_made_to_wait_on_a_cpu_only(device: str) -> None:
    """On CUDA they would not: a batch begins once it has as many bytes as are copied while another computes."""
    assert options(["--device", device]).memory == (device == "cpu")
