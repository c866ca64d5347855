"""Servers to be measured, as processes of their own, and what can be seen of them from outside."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]

SHUTDOWN_S: Final = 30.0
"""How long a server may take to end when it is told to."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready; `http_address` is where it has metrics, if it has."""

    address: str
    http_address: str | None
    process: psutil.Process

    def cpu(self) -> float:
        """The CPU time that it has used, in seconds."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        """Its resident memory now."""
        return int(self.process.memory_info().rss)

    def peak_resident_bytes(self) -> int | None:
        """The most resident memory that it ever had; None where the system does not say (it does on Linux)."""
        status = Path(f"/proc/{self.process.pid}/status")
        if not status.exists():
            return None
        kibibytes = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(kibibytes) * 1024

    def batches(self) -> tuple[float, float]:
        """How many batches it has computed, and the requests in them, by its metrics; zeros if it has none."""
        if self.http_address is None:
            return 0.0, 0.0
        with urllib.request.urlopen(f"http://{self.http_address}/metrics") as reply:
            lines = reply.read().decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("attnserve_batch_requests_"))
        return float(values["attnserve_batch_requests_count"]), float(values["attnserve_batch_requests_sum"])


@contextmanager
def running(module: str, *arguments: str) -> Iterator[Running]:
    """A module that serves and says `ready: grpc=ADDRESS`, until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert process.stdout is not None
    with process.stdout:
        try:
            for line in process.stdout:
                name, _, value = line.partition(": ")
                if name == "ready":
                    addresses = dict(word.split("=", 1) for word in value.split())
                    yield Running(addresses["grpc"], addresses.get("http"), psutil.Process(process.pid))
                    break
            else:
                raise RuntimeError(f"{module} did not start")
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(SHUTDOWN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


def attnserve(*flags: str) -> list[str]:
    """The arguments of `running` for this service, on free ports and quiet; nobody waits for it when it ends."""
    addresses = ("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
    return ["attnserve_server", *addresses, "--log-level", "error", "--drain-grace", "1s", *flags]
