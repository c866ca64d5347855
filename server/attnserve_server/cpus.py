"""How many processors this process may use, which is what threads default to, and whose they are.

In: the scheduler's affinity, the quotas of the control groups that the process is in, what the kernel says of
processors. Out: a number, at least 1; a yes or no.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROC_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_cpus() -> int:
    """The processors of the affinity, or the whole processors of the tightest quota where that is fewer.

    A quota of 2.5 processors counts as 2: a third thread would have the kernel stop all of them within each period.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota()
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def cgroup_quota(proc_cgroup: Path = _PROC_CGROUP, root: Path = _CGROUP_ROOT) -> float | None:
    """The processors' worth of time that control groups (versions 2 and 1) grant; None where nothing bounds it."""
    try:
        lines = proc_cgroup.read_text().splitlines()
    except OSError:  # not Linux, or no /proc
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, read = root, _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = root / controllers, _quota_v1
            base = base if base.is_dir() else root / "cpu"
        else:
            continue
        # A quota of any group above bounds as well. Within a container the path may name a group that is only
        # visible outside; then the root that is mounted is the group itself.
        group = base / path.lstrip("/")
        while True:
            quota = read(group)
            if quota is not None:
                quotas.append(quota)
            if group == base:
                break
            group = group.parent
    return min(quotas, default=None)


def _quota_v2(group: Path) -> float | None:
    return _ratio(*_words(group / "cpu.max"))


def _quota_v1(group: Path) -> float | None:
    return _ratio(*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us"))


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:  # this group has no such controller
        return []


def _ratio(quota: str = "max", period: str = "0", *_: str) -> float | None:
    """Quota over period, both in microseconds; `max` (version 2) and -1 (version 1) are no quota."""
    if quota == "max" or int(quota) <= 0 or int(period) <= 0:
        return None
    return int(quota) / int(period)


def is_amd() -> bool:
    """Whether the processors are AMD's, on which MKL, by which torch multiplies, uses half of a vector's width."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return any(line.startswith("vendor_id") and "AuthenticAMD" in line for line in lines)
    except OSError:
        return False
