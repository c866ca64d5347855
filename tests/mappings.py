"""What Linux knows of the memory of this process."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

SETTING: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_huge_pages = pytest.mark.skipif(not SETTING.exists(), reason="this kernel has no transparent huge pages")


def flags_at(address: int) -> list[str]:
    """What Linux knows of the mapping that an address is in: `hg` if huge pages were asked for."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            begin, end = (int(bound, 16) for bound in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return rest
    raise LookupError(hex(address))
