"""A description of the machine that a benchmark ran on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]
import torch

from attnserve import __version__
from attnserve_server.host.cpus import usable_cpus
from attnserve_server.native.library import available

DISTRIBUTIONS: Final = ("torch", "grpcio", "protobuf", "numpy")


def describe(device: str = "cpu") -> dict[str, str | int]:
    """The machine, the device that computes if it is not the CPU, and the versions of what matters for speed.

    This project's own version is not that of an installed package: it may run from its sources.
    """
    return {
        "cpu": f"{cpu_model()} with {next(iter(available()), 'no native kernel')}",
        "cores": usable_cpus(),
        "memory_bytes": psutil.virtual_memory().total,
        "platform": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])} {platform.machine()}",
        **({} if device == "cpu" else {"GPU": torch.cuda.get_device_name()}),
        "python": platform.python_version(),
        "attnserve": __version__,
        **{name: metadata.version(name) for name in DISTRIBUTIONS},
    }


def load_average() -> list[float]:
    """The load averages over 1, 5 and 15 minutes."""
    return [round(load, 2) for load in os.getloadavg()]


def cpu_model() -> str:
    """The processor's model name, and its numbers, since virtual machines often cut the name short."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    first, _, _ = cpuinfo.read_text().partition("\n\n")
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    name = said.get("model name", platform.machine())
    if "cpu family" not in said:
        return name
    return f"{name} (family {said['cpu family']}, model {said.get('model', '?')})"
