"""What a benchmark ran on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]

from attnserve_server.cpus import usable_cpus

DISTRIBUTIONS: Final = ("attnserve", "torch", "grpcio", "protobuf", "numpy")


def describe() -> dict[str, str | int]:
    """The machine and the versions of what matters to speed."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cpus(),
        "memory_bytes": psutil.virtual_memory().total,
        "platform": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])} {platform.machine()}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in DISTRIBUTIONS},
    }


def load_average() -> list[float]:
    """Of 1, 5 and 15 minutes."""
    return [round(load, 2) for load in os.getloadavg()]


def cpu_model() -> str:
    """The processor in its maker's words, where the system says them."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
