"""What the control groups (versions 2 and 1) that this process is in grant it.

In: the kernel's list of the groups, and its files of each. Out: processors, bytes; None where nothing bounds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

_OWN: Final = Path("/proc/self/cgroup")
_ROOT: Final = Path("/sys/fs/cgroup")


def cpu_quota(own: Path = _OWN, root: Path = _ROOT) -> float | None:
    """The processors' worth of time."""
    found = []
    for group, version in _groups("cpu", own, root):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota, period = [word for name in names for word in _words(group / name)] or ("max", "0")
        if quota != "max" and int(quota) > 0:  # both are in microseconds; version 1 says -1 where there is no quota
            found.append(int(quota) / int(period))
    return min(found, default=None)


def memory_limit(own: Path = _OWN, root: Path = _ROOT) -> int | None:
    """The bytes of memory; version 1 says a number beyond all memory where nothing bounds them."""
    found = []
    for group, version in _groups("memory", own, root):
        words = _words(group / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        found += [int(word) for word in words if word != "max"]
    return min(found, default=None)


def _groups(controller: str, own: Path, root: Path) -> Iterator[tuple[Path, int]]:
    """The groups that bound the process by a controller, and their version: its own, and all above it.

    Within a container the path of a group may be one that is only there outside; then the root that is mounted is the
    group itself.
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
