"""The command for when there is a GPU: it omits no step, and finished work is kept when the time is up."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.results import Result
from benchmarks.suites import SUITES
from scripts import gpu


def test_every_test_and_every_figure_is_a_step(tmp_path: Path) -> None:
    steps = list(gpu.steps("cuda", tmp_path, ["--rounds", "2"]))
    arguments = {argument for step in steps for argument in step.command}
    assert {str(path) for path in Path("tests/gpu").glob("test_*.py")} <= arguments
    assert set(SUITES["cuda"].workloads) < {step.name for step in steps}
    assert len({step.name for step in steps}) == len(steps)
    assert all(step.limit < 600 for step in steps), "a command may be over after ten minutes"
    assert all(step.command[-2:] == ("--rounds", "2") for step in steps if step.figures is not None)


ENDLESS = """
import signal, subprocess, sys
if len(sys.argv) < 3:
    subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[1], "itself"])
print("begun", flush=True)
open({told!r}, "w").close()
signal.pause()
"""


@pytest.fixture
def endless(tmp_path: Path) -> tuple[gpu.Step, Path]:
    """A step that starts a process that never ends, and a FIFO that opens once that process has begun."""
    told = tmp_path / "told"
    os.mkfifo(told)
    program = ENDLESS.format(told=str(told))
    return gpu.Step("endless", (sys.executable, "-c", program, program), 600, 0), told


def test_what_was_said_before_the_time_was_up_is_in_the_log(
    tmp_path: Path, endless: tuple[gpu.Step, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the processes that a step has started end with it."""
    step, told = endless
    limits: list[float] = []

    class Timer(threading.Thread):
        """A timer that fires once the step has begun."""

        def __init__(self, seconds: float, stop: Callable[[], None]) -> None:
            super().__init__()
            self.stop = stop
            limits.append(seconds)

        def run(self) -> None:
            told.read_bytes()
            self.stop()

        def cancel(self) -> None:
            self.join()

    monkeypatch.setattr(threading, "Timer", Timer)
    log = tmp_path / "gpu.log"
    ending = gpu.run(step, log, 7)
    assert limits == [7]
    assert (ending.how, ending.device) == ("stopped", "cuda")
    assert log.read_text().splitlines() == ["=== endless", "begun"]


def test_an_interrupt_leaves_nothing_running(
    tmp_path: Path, endless: tuple[gpu.Step, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, _ = endless

    class Interrupted(io.StringIO):
        """A terminal whose user interrupts everything on seeing that the step has begun."""

        def write(self, line: str) -> int:
            if line == "begun\n":
                raise KeyboardInterrupt
            return len(line)

    begun: list[subprocess.Popen[str]] = []

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        begun.append(subprocess.Popen(*arguments, **options))
        return begun[-1]

    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            gpu.run(step, tmp_path / "gpu.log", 600)
    assert begun[0].returncode == -signal.SIGKILL


def test_the_tests_of_the_service_are_right_themselves() -> None:
    """Some of them, on a CPU: tests that only ever run on a GPU would be broken by the time there is one."""
    some = "hundreds and float32 or measured and causal-float16 or long and float32 or alone and causal and float32"
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/gpu/test_cuda_service.py",
        "-k",
        some,
    )
    environment = {**os.environ, "GPU_TESTS_ON": "cpu", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_looks_well(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/gpu.py", "--results", str(tmp_path), "--steps", "kernels"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert [each["how"] for each in json.loads((tmp_path / "steps.json").read_text())] == ["badly"]
    assert "not begun" in done.stdout


@pytest.mark.timeout(600)
def test_on_a_cpu_the_same_steps_run(tmp_path: Path) -> None:
    """Steps that succeeded are not repeated, and the figures of several benchmark runs are merged into one file."""

    def command(*names: str) -> list[str]:
        chosen = ["--device", "cpu", "--results", str(tmp_path), "--steps", ",".join(names)]
        return [sys.executable, "scripts/gpu.py", *chosen, "--", "--seconds", "0.05", "--rounds", "1"]

    for names in (["look", "S1"], ["look", "S1", "S"]):
        done = subprocess.run(command(*names), capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "gpu.log").read_text().count("=== look") == 1
    assert [each["how"] for each in json.loads((tmp_path / "steps.json").read_text())] == ["well"] * 3
    assert [each.name for each in Result.read(tmp_path / "bench.json").workloads] == ["S1", "S"]
    assert {path.name for path in tmp_path.iterdir()} == {"gpu.log", "steps.json", "bench.json"}
