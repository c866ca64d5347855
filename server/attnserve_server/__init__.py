"""The attention server: requests come in over gRPC, run together on one device, and go back."""

import os

# Before anything imports gRPC, whose core looks at it then. It has log lines of its own form, one for each handshake
# that fails: whoever scans the port could fill the log.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# It also has two ways to wait for sockets. This one hands what has come from thread to thread once less: see
# "What they mean" in docs/performance.md. Releases of gRPC that do not know the name ignore it.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")

from attnserve._version import __version__

__all__ = ["__version__"]
