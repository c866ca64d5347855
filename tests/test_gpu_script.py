"""The command for the day when there is a GPU: it forgets nothing, and what it has done stays when the time is up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_what_was_said_before_the_time_was_up_is_in_the_log(tmp_path: Path) -> None:
    """The processes that a step has started end with it."""
    endless = "import signal; print('begun', flush=True); signal.pause()"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {endless!r}])"
    log = tmp_path / "gpu.log"
    ending = gpu.run(gpu.Step("endless", (sys.executable, "-c", starts), 600), log, 10)
    assert ending.how == "stopped"
    assert log.read_text().splitlines() == ["=== endless", "begun"]


def test_the_tests_of_the_service_are_right_themselves() -> None:
    """Some of them, on a CPU: those that only a GPU ever ran would be wrong by the day when there is one."""
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
    environment = {**os.environ, "GPU_TESTS_ON": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_looks_well(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/gpu.py", "--results", str(tmp_path), "--steps", "look,kernels"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert [each["how"] for each in json.loads((tmp_path / "steps.json").read_text())] == ["badly"]
    assert "not begun" in done.stdout


@pytest.mark.timeout(600)
def test_on_a_cpu_the_same_steps_run(tmp_path: Path) -> None:
    """Those that ended well are not repeated, and figures of several runs of the benchmark become one file."""

    def command(*names: str) -> list[str]:
        chosen = ["--device", "cpu", "--results", str(tmp_path), "--steps", ",".join(names)]
        return [sys.executable, "scripts/gpu.py", *chosen, "--", "--seconds", "0.05", "--rounds", "1"]

    for names in (["look", "S1"], ["look", "S1", "D"]):
        done = subprocess.run(command(*names), capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "gpu.log").read_text().count("=== look") == 1
    assert [each["how"] for each in json.loads((tmp_path / "steps.json").read_text())] == ["well"] * 3
    assert [each.name for each in Result.read(tmp_path / "bench.json").workloads] == ["S1", "D"]
    assert {path.name for path in tmp_path.iterdir()} == {"gpu.log", "steps.json", "bench.json"}
