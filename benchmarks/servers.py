"""Servers to be measured, as processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready."""

    address: str
    process: psutil.Process

    def cpu(self) -> float:
        """The CPU time that it has used, in seconds."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def running(module: str, *arguments: str) -> Iterator[Running]:
    """A module that serves and says `ready: grpc=ADDRESS`, until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready:"):
                address = next(word.partition("=")[2] for word in line.split() if word.startswith("grpc="))
                yield Running(address, psutil.Process(process.pid))
                break
        else:
            raise RuntimeError(f"{module} did not start")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(15)


def attnserve(*flags: str) -> list[str]:
    """The arguments of `running` for this service on free ports."""
    return ["attnserve_server", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", *flags]
