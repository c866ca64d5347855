"""The attention server: requests come in over gRPC, run together on one device, and are replied to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnserve._version import __version__

# Set before anything imports gRPC, whose core reads it then. It writes log lines of its own form, one for each failed
# handshake: whoever scans the port could fill the log.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# It also has two ways to wait for sockets. With this one, received data passes between threads one time fewer: see
# "What all are measured with" in docs/performance.md. gRPC releases that do not know the name ignore it.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")

# Set before anything imports torch, which reads it then. On CUDA, torch 2.13 would compile its products over an axis of
# length 1 (one key, or heads of width 1) with Triton when they are first needed: that takes a C compiler and a home
# directory that can be written; without them, the request would fail.
os.environ.setdefault("TORCH_DISABLE_NATIVE_JIT", "1")

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    # Only when asked for: the SDK takes a third of a second to load, and a signal to stop must be expected before that
    # (see `__main__`).
    if name == "__version__":
        from attnserve._version import __version__

        return __version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
