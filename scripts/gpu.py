"""All that needs a GPU, in one command for the day when there is one: what is there, the tests, the figures.

Each step is a process with a time limit of its own. What it says goes to DIR/gpu.log line by line, how it ended to
DIR/steps.json, and the figures to DIR/bench.json, each as it comes: when the time is up, what has been done is there.
The steps are in the order of what their answers are worth, and before all others it is looked what is there; those that
ended well are not repeated by the next command with the same DIR and device. From the sources, with any Python that has
what is needed: nothing is installed.

    python scripts/gpu.py --results DIR --time 570          # twice, if commands may take ten minutes
    python scripts/gpu.py --results DIR --steps kernels,overlap
    python scripts/gpu.py --results DIR --device cpu        # without a GPU: the same steps, to see that they run
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PATHS: Final = ("client", "server", ".")
NEEDED: Final = {
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "hypothesis": "hypothesis",
    "matplotlib": "matplotlib",
    "ml_dtypes": "ml_dtypes",
    "numpy": "numpy",
    "prometheus_client": "prometheus-client",
    "psutil": "psutil",
    "pytest": "pytest",
    "pytest_asyncio": "pytest-asyncio",
    "pytest_timeout": "pytest-timeout",
    "rich": "rich",
    "safetensors": "safetensors",
    "torch": "torch",
    "transformers": "transformers",
}
"""The modules that the steps import, and their distributions."""
LOOK: Final = """\
import platform, sys, torch
print(platform.platform(), "python", platform.python_version(), "torch", torch.__version__, "CUDA", torch.version.cuda)
for n in range(torch.cuda.device_count()):
    found = torch.cuda.get_device_properties(n)
    print(n, found.name, f"{found.major}.{found.minor}", found.total_memory >> 20, "MiB")
from attnserve_server.devices import open_device
device = open_device(sys.argv[1], 1, 0, "auto")
device.warm_up()
print("warm:", device.description, device.memory(), [name for name, _ in device.kernels()])
device.close()
"""


@dataclass(frozen=True)
class Step:
    """A command on a device, its limit in seconds, how many it should take (with less left, it does not begin), and the
    file to which it writes figures, if it does.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    least: float
    figures: Path | None = None
    device: str = "cuda"


@dataclass(frozen=True)
class Ending:
    """How a step on a device ended: `well`, `badly` or `stopped` at its limit."""

    name: str
    device: str
    how: str
    seconds: float
    command: str


def steps(device: str, results: Path, measured: Sequence[str]) -> Iterator[Step]:
    """All steps on a device. `measured` are further arguments for the benchmark."""
    python, tests = sys.executable, "tests/gpu"
    # Not by plugins that happen to be there: this one warns, which fails.
    pytest = (python, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:benchmark", "-v", "--durations=5")

    def suite(name: str, *files: str, limit: float = 240, least: float = 60) -> Step:
        return Step(name, (*pytest, *files), limit, least, device=device)

    yield Step("look", (python, "-c", LOOK, device), 120, 20, device=device)
    yield suite("kernels", f"{tests}/test_cuda_device.py")
    yield suite("overlap", f"{tests}/test_cuda_overlap.py", f"{tests}/test_cuda_faults.py", least=20)
    yield suite("service", f"{tests}/test_cuda_service.py", limit=480)
    yield suite("caches", f"{tests}/test_cuda_caches.py")
    yield suite("layers", f"{tests}/test_cuda_layers.py")

    def bench(name: str, *arguments: str, limit: float = 150) -> Step:
        figures = results / f"{name}.json"
        common = (python, "-m", "benchmarks", "--device", device, "--peers", "none", "--growth", "0")
        command = (*common, *arguments, "--json", str(figures), *measured)
        return Step(name, command, limit, 20, figures, device)

    for name in _workloads(device):
        yield bench(name, "--workloads", name, "--no-curves", "--no-memory")
    yield bench("curves", "--workloads", "none", "--open", "none", limit=300)
    yield suite("fake", "tests/devices/test_cuda_fake.py")  # which needs torch's CUDA build, and hardly a GPU


def _workloads(device: str) -> list[str]:
    """The workloads of a device, the most informative first."""
    from benchmarks.suites import SUITES

    first = ("G128", "C1", "C64")
    return sorted(SUITES[device].workloads, key=lambda name: first.index(name) if name in first else len(first))


def run(step: Step, log: Path, seconds: float) -> Ending:
    """Runs a step for at most `seconds`, and copies its output to the log and the terminal as it comes. No process of
    it is left afterwards, even after an interrupt.
    """
    paths = [*(str(ROOT / path) for path in PATHS), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    environment["GPU_TESTS_ON"] = step.device
    begun, stopped = monotonic(), threading.Event()
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def stop() -> None:
        stopped.set()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # including the servers that it has started

    timer = threading.Timer(seconds, stop)
    timer.start()
    assert process.stdout is not None
    try:
        with log.open("a", encoding="utf-8") as file, process.stdout as said:
            for line in chain([f"=== {step.name}\n"], said):
                sys.stdout.write(line)
                sys.stdout.flush()
                file.write(line)
                file.flush()
        failed = process.wait() != 0
    except BaseException:
        stop()
        process.wait()
        raise
    finally:
        timer.cancel()
    how = "stopped" if stopped.is_set() else "badly" if failed else "well"
    return Ending(step.name, step.device, how, round(monotonic() - begun, 1), shlex.join(step.command))


def gather(figures: Path, into: Path) -> None:
    """Adds the figures of one run of the benchmark to those of earlier runs."""
    from benchmarks.results import Result

    found = Result.read(figures)
    if into.exists():
        others = Result.read(into)
        found = replace(
            others,
            took_seconds=others.took_seconds + found.took_seconds,
            load_after=found.load_after,
            workloads=[*others.workloads, *found.workloads],
            curves=[*others.curves, *found.curves],
            waiting=[*others.waiting, *found.waiting],
        )
    found.write(into)
    figures.unlink()


def main() -> int:
    """Runs what the command line asks for; returns 1 if any step failed, was stopped, or is left to do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "bench-results" / "gpu", metavar="DIR")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=lambda text: text.split(","), help="which, by name; default: all")
    parser.add_argument("--time", type=float, default=3600.0, help="seconds for all of them")
    parser.add_argument("measured", nargs="*", help="arguments of the benchmark, after --")
    chosen = parser.parse_args()
    end = monotonic() + chosen.time
    sys.path[:0] = [str(ROOT / path) for path in PATHS]
    if missing := [distribution for module, distribution in NEEDED.items() if not _there(module)]:
        print(f"missing: {' '.join(missing)}", file=sys.stderr)
        print("Without a network, bring their wheels:", file=sys.stderr)
        print("  python -m pip install --no-index --no-deps --target FOLDER *.whl", file=sys.stderr)
        print("  PYTHONPATH=FOLDER python scripts/gpu.py", file=sys.stderr)
        return 2
    results: Path = chosen.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    every = list(steps(chosen.device, results, chosen.measured))
    if unknown := set(chosen.steps or ()) - {step.name for step in every}:
        parser.error(f"no such steps: {', '.join(sorted(unknown))}; there are {', '.join(step.name for step in every)}")
    ended = results / "steps.json"
    before = [Ending(**each) for each in json.loads(ended.read_text())] if ended.exists() else []
    endings = {each.name: each for each in before if each.device == chosen.device}
    # Without a device, tests would be skipped, which would look like success: so `look` checks for one first.
    wanted = [step for step in every if chosen.steps is None or step.name in ("look", *chosen.steps)]
    for step in wanted:
        left = end - monotonic()
        if (step.name in endings and endings[step.name].how == "well") or left < step.least:
            continue
        endings[step.name] = run(step, results / "gpu.log", min(step.limit, left))
        if step.figures is not None and step.figures.exists():
            gather(step.figures, results / "bench.json")
        ended.write_text(json.dumps([asdict(each) for each in endings.values()], indent=1) + "\n")
        if step.name == "look" and endings[step.name].how != "well":
            break
    for step in wanted:
        ending = endings.get(step.name)
        print(f"{step.name:<10} not begun" if ending is None else f"{step.name:<10} {ending.how}, {ending.seconds} s")
    return 0 if all(step.name in endings and endings[step.name].how == "well" for step in wanted) else 1


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main())
