"""The limits of the control groups (versions 2 and 1) that this process is in.

In: the kernel's list of the groups, and its files for each. Out: processors, bytes; None where nothing limits them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

_OWN: Final = Path("/proc/self/cgroup")
_ROOT: Final = Path("/sys/fs/cgroup")


def cpu_quota(own: Path = _OWN, root: Path = _ROOT) -> float | None:
    """The quota of processor time, in processors."""
    found = []
    for group, version in _groups("cpu", own, root):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota, period = [word for name in names for word in _words(group / name)] or ("max", "0")
        if quota != "max" and int(quota) > 0:  # both are in microseconds; version 1 says -1 where there is no quota
            found.append(int(quota) / int(period))
    return min(found, default=None)


def memory_limit(own: Path = _OWN, root: Path = _ROOT) -> int | None:
    """The limit of memory in bytes; version 1 states a number beyond all memory where there is none."""
    found = []
    for group, version in _groups("memory", own, root):
        words = _words(group / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        found += [int(word) for word in words if word != "max"]
    return min(found, default=None)


def _groups(controller: str, own: Path, root: Path) -> Iterator[tuple[Path, int]]:
    """The groups that limit the process by a controller, and their version: its own, and all above it.

    Within a container a group's path may exist only outside of it; then the mounted root is the group itself.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux, or no /proc
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, version = root, 2
        elif controller in controllers.split(","):
            base, version = root / controllers, 1
            base = base if base.is_dir() else root / controller
        else:
            continue
        group = base / path.lstrip("/")
        yield group, version
        while group != base:
            group = group.parent
            yield group, version


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:  # this group has no such controller
        return []
