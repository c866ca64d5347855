"""The attention server: requests come in over gRPC, run together on one device, and are replied to."""

import os

# Set before anything imports gRPC, whose core reads it then. It writes log lines of its own form, one for each failed
# handshake: whoever scans the port could fill the log.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# It also has two ways to wait for sockets. With this one, received data passes between threads one time fewer: see
# "What they mean" in docs/performance.md. gRPC releases that do not know the name ignore it.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")

from attnserve._version import __version__

__all__ = ["__version__"]
