"""The environment of servers in processes of their own: without settings, and with this checkout's code."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {name: text for name, text in os.environ.items() if not name.startswith("ATTNSERVE_")} | {
    "PYTHONPATH": os.pathsep.join((str(ROOT / "client"), str(ROOT / "server")))
}
