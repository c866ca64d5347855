"""Servers to measure, as separate processes, and what can be observed of them from outside."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]

STARTUP_S: Final = 120.0
"""How long a peer may take until it is ready."""
POLL_S: Final = 0.05
"""The interval at which a peer is asked whether it is ready."""
SHUTDOWN_S: Final = 30.0
"""How long this service may take to shut down."""
PATIENCE_S: Final = 1.0
"""How long a peer may take to end before it is killed."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready, and its processes."""

    address: str
    processes: tuple[psutil.Process, ...]
    metrics: str | None = None
    """The URL of its metrics, if it has any."""
    batch_metrics: tuple[str, str] = ("", "")
    """The names of the metrics that count batches, and the requests in them."""

    def cpu(self) -> float:
        """The CPU time that the server has used, in seconds."""
        return sum(map(_cpu, self.processes))

    def resident_bytes(self) -> int:
        """Its current resident memory."""
        return sum(int(each.memory_info().rss) for each in self.processes)

    def peak_resident_bytes(self) -> int | None:
        """Its peak resident memory; None if the system does not say (Linux does).

        For several processes, the sum of their peaks, which may be at different times.
        """
        found = [_status(each, "VmHWM") for each in self.processes]
        return None if None in found else sum(filter(None, found))

    def own_bytes(self) -> int | None:
        """Its anonymous memory, neither shared nor backed by a file; None if the system does not say (Linux does)."""
        found = [_status(each, "RssAnon") for each in self.processes]
        return None if None in found else sum(filter(None, found))

    def batches(self) -> tuple[float, float]:
        """How many batches it has computed, and the requests in them, by its metrics; zeros without metrics."""
        count, requests = map(self.metric, self.batch_metrics)
        return count, requests

    def metric(self, name: str) -> float:
        """The current value of a metric, summed over all labels; 0 without metrics."""
        if self.metrics is None:
            return 0.0
        with urllib.request.urlopen(self.metrics) as reply:
            lines = [line.rpartition(" ") for line in reply.read().decode().splitlines() if not line.startswith("#")]
        return sum(float(value) for sample, _, value in lines if sample.partition("{")[0] == name)


def _cpu(process: psutil.Process) -> float:
    """The CPU time that a process has used, in seconds."""
    if sys.platform == "linux":
        # The process's CPU clock, in nanoseconds, where other sources tick in hundredths: see clock_getcpuclockid(3).
        return time.clock_gettime(~process.pid << 3 | 2)
    times = process.cpu_times()
    return float(times.user + times.system)


def _status(process: psutil.Process, name: str) -> int | None:
    """A size in bytes from a process's status on Linux; None if there is no such entry."""
    file = Path(f"/proc/{process.pid}/status")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


@contextmanager
def running(module: str, *arguments: str) -> Iterator[Running]:
    """Runs a module that serves and prints `ready: grpc=ADDRESS`, until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert process.stdout is not None
    with process.stdout, _ending(process):
        for line in process.stdout:
            name, _, value = line.partition(": ")
            if name == "ready":
                addresses = dict(word.split("=", 1) for word in value.split())
                metrics = f"http://{addresses['http']}/metrics" if "http" in addresses else None
                yield Running(addresses["grpc"], (psutil.Process(process.pid),), metrics, ATTNSERVE_BATCHES)
                break
        else:
            raise RuntimeError(f"{module} did not start")


ATTNSERVE_BATCHES: Final = ("attnserve_batch_requests_count", "attnserve_batch_requests_sum")


def attnserve(*flags: str) -> list[str]:
    """The arguments of `running` for this service, on free ports, with little logging and a short drain."""
    addresses = ("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
    return ["attnserve_server", *addresses, "--log-level", "error", "--drain-grace", "1s", *flags]


@contextmanager
def started(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    ready: str,
    *,
    address: str,
    metrics: str,
    batch_metrics: tuple[str, str],
) -> Iterator[Running]:
    """A peer, from when it answers at the URL `ready` until the block ends; its output goes to `log`.

    Raises RuntimeError, with that output, if it ends before it is ready or takes too long.
    """
    with log.open("w") as output:
        process = subprocess.Popen(command, env=dict(environment), stdout=output, stderr=subprocess.STDOUT)
    with _killing(process):
        deadline = time.monotonic() + STARTUP_S
        while not _answers(ready):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{Path(command[0]).name} did not start:\n{log.read_text(errors='replace')}")
            time.sleep(POLL_S)
        parent = psutil.Process(process.pid)
        processes = (parent, *parent.children(recursive=True))
        try:
            yield Running(address, processes, metrics, batch_metrics)
        except Exception as error:
            if process.poll() is not None:
                error.add_note(f"{Path(command[0]).name} ended; it wrote:\n{log.read_text(errors='replace')[-2000:]}")
            raise


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url) as reply:
            return bool(reply.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except (urllib.error.URLError, ConnectionError):
        return False


@contextmanager
def _ending(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Ends this service at the end of the block. Raises TimeoutExpired if it does not end in time."""
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


@contextmanager
def _killing(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Ends a peer, and all processes that it has started, at the end of the block. If they do not end in time, they are
    killed: Triton, for example, waits for streams that were cancelled.
    """
    try:
        yield
    finally:
        everything = [process]
        if process.poll() is None:
            everything += psutil.Process(process.pid).children(recursive=True)
        for each in everything:
            with suppress(psutil.NoSuchProcess):
                each.terminate()
        _, left = psutil.wait_procs(everything[1:], timeout=PATIENCE_S)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
        for each in [process, *left]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
