"""What is decided without torch is imported without it: policy is apart from execution."""

from __future__ import annotations

import subprocess
import sys

ROOMS = (
    "admission",
    "batching",
    "config",
    "engine",
    "errors",
    "health",
    "http",
    "layers.application",
    "layers.check",
    "layers.definitions",
    "layers.specification",
    "metrics",
    "options",
    "problem",
    "reply",
    "request",
    "service",
    "stream",
    "tensors",
    "tracing",
    "work",
    "__main__",
)


def test_only_what_computes_imports_torch() -> None:
    imports = "\n".join(
        f"import attnserve_server.{room}\nassert 'torch' not in sys.modules, '{room} imports torch'" for room in ROOMS
    )
    done = subprocess.run([sys.executable, "-c", f"import sys\n{imports}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
