"""How much memory this process holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_STATM: Final = Path("/proc/self/statm")


def resident_bytes(statm: Path = _STATM) -> int:
    """The bytes that the process has in memory; 0 where the kernel does not say."""
    try:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux, or no /proc
        return 0
