"""Servers to be measured, as processes of their own, and what can be seen of them from outside."""

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
"""How long a server of others may take until it is ready."""
POLL_S: Final = 0.05
"""How often such a one is asked whether it is."""
SHUTDOWN_S: Final = 30.0
"""How long this service may take to end when it is told to."""
PATIENCE_S: Final = 1.0
"""How long a server of others may take to end before it is killed."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready, and its processes."""

    address: str
    processes: tuple[psutil.Process, ...]
    metrics: str | None = None
    """Where its metrics are, if it has any."""
    batch_metrics: tuple[str, str] = ("", "")
    """The names of those that count batches, and the requests in them."""

    def cpu(self) -> float:
        """The CPU time that it has used, in seconds."""
        return sum(map(_cpu, self.processes))

    def resident_bytes(self) -> int:
        """Its resident memory now."""
        return sum(int(each.memory_info().rss) for each in self.processes)

    def peak_resident_bytes(self) -> int | None:
        """The most resident memory that it ever had; None where the system does not say (it does on Linux).

        Of several processes, the sum of what each had at its own time.
        """
        found = [_status(each, "VmHWM") for each in self.processes]
        return None if None in found else sum(filter(None, found))

    def own_bytes(self) -> int | None:
        """The memory that nobody shares with it, nor can be read again from a file; None where the system does not say
        (it does on Linux).
        """
        found = [_status(each, "RssAnon") for each in self.processes]
        return None if None in found else sum(filter(None, found))

    def batches(self) -> tuple[float, float]:
        """How many batches it has computed, and the requests in them, by its metrics; zeros if it has none."""
        count, requests = map(self.metric, self.batch_metrics)
        return count, requests

    def metric(self, name: str) -> float:
        """What a metric has come to, over all its labels; 0 if it has no metrics."""
        if self.metrics is None:
            return 0.0
        with urllib.request.urlopen(self.metrics) as reply:
            lines = [line.rpartition(" ") for line in reply.read().decode().splitlines() if not line.startswith("#")]
        return sum(float(value) for sample, _, value in lines if sample.partition("{")[0] == name)


def _cpu(process: psutil.Process) -> float:
    """The CPU time that a process has used, in seconds."""
    if sys.platform == "linux":
        # Its clock, which counts nanoseconds where other sources tick in hundredths: see clock_getcpuclockid(3).
        return time.clock_gettime(~process.pid << 3 | 2)
    times = process.cpu_times()
    return float(times.user + times.system)


def _status(process: psutil.Process, name: str) -> int | None:
    """A size in bytes that Linux tells of a process; None if there is no such thing."""
    file = Path(f"/proc/{process.pid}/status")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


@contextmanager
def running(module: str, *arguments: str) -> Iterator[Running]:
    """A module that serves and says `ready: grpc=ADDRESS`, until the block ends."""
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
    """The arguments of `running` for this service, on free ports and quiet; nobody waits for it when it ends."""
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
    """A server of others, from when it answers at the URL `ready` until the block ends; what it writes goes to `log`.

    Raises RuntimeError, with what it wrote, if it ends before that or takes too long.
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
    """Ends this service when the block does. Raises TimeoutExpired if it does not end in time."""
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
    """Ends a server of others, and all that it has started, when the block does: those that wait for what was
    cancelled, as Triton does for streams, are not waited for.
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
