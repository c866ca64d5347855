"""The processors: how many this process may use, the default number of threads; their name and vendor, their cache
line, and whether they multiply matrices in hardware.

In: the scheduler's affinity, the quota of control groups, what the kernel says about processors. Out: a number, at
least 1; a name; a yes or no.
"""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Final

from attnserve_server.host import control_groups

CPUINFO: Final = Path("/proc/cpuinfo")
"""What the kernel says about each processor."""

CACHE_LINE: Final = 64
"""The bytes that a processor reads at a time, as many as its longest vector has. Tensors begin at multiples of it:
their bits must not depend on what lies before them."""


def usable_cpus() -> int:
    """The processors of the affinity, or the whole processors of the tightest quota where that is fewer.

    A quota of 2.5 processors counts as 2: with a third thread the kernel would throttle all of them in each period.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = control_groups.cpu_quota()
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def model(cpuinfo: Path = CPUINFO) -> str:
    """What the processors are called, or the kind of machine, if the kernel has no name for them."""
    found = _described("model name", cpuinfo)
    if not found and not cpuinfo.exists():  # another system than Linux
        found = platform.processor()
    return found or platform.machine() or os.name


def is_amd(cpuinfo: Path = CPUINFO) -> bool:
    """Whether the processors are AMD's, on which MKL, torch's matrix library, uses half of a vector's width."""
    return "AuthenticAMD" in _described("vendor_id", cpuinfo).split()


def has_amx(cpuinfo: Path = CPUINFO) -> bool:
    """Whether the processors multiply matrices of bfloat16 in hardware (Intel's AMX)."""
    return "amx_bf16" in _described("flags", cpuinfo).split()


@cache
def _described(what: str, cpuinfo: Path) -> str:
    """What the kernel has for the first processor under a heading; empty if it does not say."""
    try:
        with cpuinfo.open(encoding="utf-8") as lines:
            found = next((line for line in lines if line.partition(":")[0].strip() == what), "")
    except OSError:
        return ""
    return found.partition(":")[2].strip()
