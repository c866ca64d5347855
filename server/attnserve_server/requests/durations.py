"""Durations as messages carry them: `google.protobuf.Duration` in, seconds out."""

from __future__ import annotations

from typing import Final

from google.protobuf.duration_pb2 import Duration

from attnserve_server.errors import InvalidRequest

MAX_SECONDS: Final = 315_576_000_000
"""Ten thousand years: the range for which `Duration` is defined."""


def seconds_of(field: str, duration: Duration) -> float:
    """A duration in seconds. Raises InvalidRequest if it is not a valid one."""
    seconds, nanos = duration.seconds, duration.nanos
    if abs(seconds) > MAX_SECONDS:
        raise InvalidRequest(f"{field}.seconds", f"at most {MAX_SECONDS}", seconds)
    if abs(nanos) > 999_999_999 or seconds * nanos < 0:
        raise InvalidRequest(f"{field}.nanos", "less than 1000000000, of the sign of the seconds", nanos)
    return seconds + nanos * 1e-9
