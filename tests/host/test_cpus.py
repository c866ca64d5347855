"""What processors are, read from a description like the kernel's."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from attnserve_server.host import control_groups
from attnserve_server.host.cpus import has_amx, is_amd, model, usable_cpus

DESCRIPTION = "processor\t: 0\nvendor_id\t: {}\nmodel name\t: AuthenticAMD amx_bf16\nflags\t\t: fpu avx512f {}\n\n"


@pytest.mark.parametrize(
    ("vendor", "flags", "amd", "amx"),
    [
        ("AuthenticAMD", "avx512_bf16", True, False),
        ("GenuineIntel", "avx512_bf16 amx_bf16 amx_tile", False, True),
        ("GenuineIntel", "avx512_bf16 amx_int8", False, False),
    ],
)
def test_vendor_and_instructions(tmp_path: Path, vendor: str, flags: str, amd: bool, amx: bool) -> None:
    description = tmp_path / "cpuinfo"
    description.write_text(2 * DESCRIPTION.format(vendor, flags))
    assert (is_amd(description), has_amx(description)) == (amd, amx)


def test_the_name(tmp_path: Path) -> None:
    description = tmp_path / "cpuinfo"
    description.write_text(DESCRIPTION.format("AuthenticAMD", "") + "model name\t: of the second processor\n")
    assert model(description) == "AuthenticAMD amx_bf16"


@pytest.mark.parametrize("processor", ["", "a processor"])
def test_where_nothing_is_described(tmp_path: Path, processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python is asked, except on Linux, where it knows no more."""
    monkeypatch.setattr(platform, "processor", lambda: processor)
    assert not is_amd(tmp_path / "cpuinfo")
    assert not has_amx(tmp_path / "cpuinfo")
    assert model(tmp_path / "cpuinfo") == (processor or platform.machine())
    (tmp_path / "other").write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert model(tmp_path / "other") == platform.machine()


@pytest.mark.parametrize(("count", "usable"), [(8, 8), (None, 1)])
def test_where_there_is_no_affinity_all_may_be_used(
    monkeypatch: pytest.MonkeyPatch, count: int | None, usable: int
) -> None:
    """On macOS, or where nobody knows how many there are."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    monkeypatch.setattr(control_groups, "cpu_quota", lambda: None)
    assert usable_cpus() == usable
