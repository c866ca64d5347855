"""Whether a server is healthy: grpc.health.v1, asked for readiness and for liveness.

Its messages have one field each, and are encoded just like google.protobuf's wrappers of a string and of a number, so
no package is needed for them.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from attnserve._rpc import Rpc

_PATH: Final = "/grpc.health.v1.Health/Check"
_SERVING: Final = 1


def _read(status: Int32Value) -> bool:
    return status.value == _SERVING


READINESS: Final = Rpc(_PATH, StringValue(value="readiness"), Int32Value, _read, anyhow=True)
"""Asks whether to send requests to a server."""
LIVENESS: Final = Rpc(_PATH, StringValue(value="liveness"), Int32Value, _read, anyhow=True)
"""Asks whether a server's process works at all."""
