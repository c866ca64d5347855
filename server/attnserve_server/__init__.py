"""The attention server: requests come in over gRPC, run together on one device, and go back."""

import os

# Before anything imports gRPC, whose core looks at it then. It has log lines of its own form, one for each handshake
# that fails: whoever scans the port could fill the log.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from attnserve._version import __version__

__all__ = ["__version__"]
