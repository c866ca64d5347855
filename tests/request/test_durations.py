"""Durations as messages carry them: all that are defined, in seconds."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration

from attnserve_server.errors import InvalidRequest
from attnserve_server.requests.durations import MAX_SECONDS, seconds_of


@pytest.mark.parametrize(
    ("seconds", "nanos", "expected"),
    [
        (0, 0, 0.0),
        (1, 500_000_000, 1.5),
        (-1, -500_000_000, -1.5),
        (0, 999_999_999, 0.999999999),
        (0, -1, -1e-9),
        (MAX_SECONDS, 0, MAX_SECONDS),
        (-MAX_SECONDS, 0, -MAX_SECONDS),
    ],
)
def test_seconds_and_their_parts(seconds: int, nanos: int, expected: float) -> None:
    assert seconds_of("ttl", Duration(seconds=seconds, nanos=nanos)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("seconds", "nanos", "field"),
    [
        (MAX_SECONDS + 1, 0, "ttl.seconds"),
        (-MAX_SECONDS - 1, 0, "ttl.seconds"),
        (0, 10**9, "ttl.nanos"),
        (0, -(10**9), "ttl.nanos"),
        (1, -1, "ttl.nanos"),
        (-1, 1, "ttl.nanos"),
    ],
)
def test_what_is_none_is_refused(seconds: int, nanos: int, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        seconds_of("ttl", Duration(seconds=seconds, nanos=nanos))
    assert caught.value.field == field
