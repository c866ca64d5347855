"""Servers in processes of their own: their environment, without settings and with this checkout's code, and a server
without what it needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {name: text for name, text in os.environ.items() if not name.startswith("ATTNSERVE_")} | {
    "PYTHONPATH": os.pathsep.join((str(ROOT / "client"), str(ROOT / "server")))
}
EXTRA = ("torch", "prometheus_client", "grpc_health", "grpc_reflection", "safetensors")
"""The modules that `attnserve[server]` installs."""


def run_without_the_extra(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line where only the SDK and its dependencies are installed."""
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({EXTRA}))"  # how Python marks modules that cannot be imported
        "; from attnserve_server.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, *argv]
    return subprocess.run(command, env=ENVIRONMENT | environ, capture_output=True, text=True, timeout=60, check=False)
