"""Whether a server is healthy: grpc.health.v1, asked for readiness and for liveness, once or until it is ready.

Its messages have one field each, and are encoded just like google.protobuf's wrappers of a string and of a number, so
no package is needed for them.
"""

from __future__ import annotations

import time
from math import inf
from typing import Final

from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from attnserve._errors import DeadlineExceededError, UnavailableError
from attnserve._rpc import Rpc

_PATH: Final = "/grpc.health.v1.Health/Check"
_SERVING: Final = 1
_LONGEST_PAUSE_S: Final = 1.0
"""The longest pause between two questions. The first is a twentieth of it, and each further one half as long again."""


def _read(status: Int32Value) -> bool:
    return status.value == _SERVING


READINESS: Final = Rpc(_PATH, StringValue(value="readiness"), Int32Value, _read, anyhow=True)
"""Asks whether to send requests to a server."""
LIVENESS: Final = Rpc(_PATH, StringValue(value="liveness"), Int32Value, _read, anyhow=True)
"""Asks whether a server's process works at all."""


class Patience:
    """How long to wait for a server, and how often to ask."""

    def __init__(self, timeout: float | None) -> None:
        """`timeout` in seconds; None for no limit."""
        self._timeout = timeout
        self._deadline = inf if timeout is None else time.monotonic() + timeout
        self._pause = _LONGEST_PAUSE_S / 20

    @property
    def left(self) -> float | None:
        """How many seconds an answer may take; None for no limit."""
        return None if self._deadline == inf else max(0.001, self._deadline - time.monotonic())

    def pause(self, failure: UnavailableError | DeadlineExceededError | None) -> float:
        """How many seconds to wait before asking again. `failure` says why the server could not be asked; None if it
        answered that it is not ready. Raises DeadlineExceededError if the time is over.
        """
        left = self._deadline - time.monotonic()
        if left <= 0:
            why = "it says that it is not" if failure is None else str(failure)
            raise DeadlineExceededError(f"the server is not ready after {self._timeout:g} s: {why}")
        pause, self._pause = self._pause, min(1.5 * self._pause, _LONGEST_PAUSE_S)
        return min(pause, left)
