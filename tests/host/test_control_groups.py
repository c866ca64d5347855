"""What control groups grant, read from files like the kernel's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnserve_server.host import control_groups


def granted(tmp_path: Path, read: Any, lines: str, files: dict[str, str]) -> Any:
    """What a process gets with these lines in /proc/self/cgroup and these files below /sys/fs/cgroup."""
    (tmp_path / "cgroup").write_text(lines)
    for name, content in files.items():
        file = tmp_path / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return read(tmp_path / "cgroup", tmp_path / "fs")


@pytest.mark.parametrize(
    ("lines", "files", "quota"),
    [
        ("0::/", {"cpu.max": "max 100000\n"}, None),
        ("0::/", {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/pod/app", {"pod/cpu.max": "150000 100000\n", "pod/app/cpu.max": "max 100000\n"}, 1.5),
        ("0::/pod/app", {"pod/cpu.max": "400000 100000\n", "pod/app/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/outside/the/container", {"cpu.max": "100000 100000\n"}, 1.0),
        ("0::/pods.slice:cri:app", {"pods.slice:cri:app/cpu.max": "300000 100000\n"}, 3.0),
        (
            "4:cpu,cpuacct:/a",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "200000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            2.0,
        ),
        (
            "5:cpuset:/a\n4:cpu,cpuacct:/b",
            {
                "cpu/a/cpu.cfs_quota_us": "50000",
                "cpu/a/cpu.cfs_period_us": "100000",
                "cpu/b/cpu.cfs_quota_us": "300000",
                "cpu/b/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
        ("1:cpu:/\n0::/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("8:pids:/\n0::/", {}, None),
    ],
)
def test_processors(tmp_path: Path, lines: str, files: dict[str, str], quota: float | None) -> None:
    assert granted(tmp_path, control_groups.cpu_quota, lines, files) == quota


@pytest.mark.parametrize(
    ("lines", "files", "limit"),
    [
        ("0::/", {"memory.max": "max\n"}, None),
        ("0::/", {"memory.max": "4294967296\n"}, 2**32),
        ("0::/pod/app", {"pod/memory.max": "1000\n", "pod/app/memory.max": "max\n"}, 1000),
        ("0::/pod/app", {"pod/memory.max": "3000\n", "pod/app/memory.max": "2000\n"}, 2000),
        ("0::/outside/the/container", {"memory.max": "5000\n"}, 5000),
        ("4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "7000\n"}, 7000),
        ("4:cpu:/a\n0::/", {"memory/a/memory.limit_in_bytes": "7000\n"}, None),
    ],
)
def test_memory(tmp_path: Path, lines: str, files: dict[str, str], limit: int | None) -> None:
    assert granted(tmp_path, control_groups.memory_limit, lines, files) == limit


@pytest.mark.parametrize("read", [control_groups.cpu_quota, control_groups.memory_limit])
def test_no_control_groups_bound_nothing(tmp_path: Path, read: Any) -> None:
    assert read(tmp_path / "absent", tmp_path) is None
