"""The creation of a cache at several servers, without any."""

from __future__ import annotations

import itertools

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo

from attnserve import OverloadedError, UnavailableError
from attnserve._caching.creation import Making
from attnserve._requests import cache_requests


def full(seconds: float | None) -> OverloadedError:
    """The error of a server that has room in some seconds, or does not say when."""
    details: tuple[ErrorInfo | RetryInfo, ...] = (ErrorInfo(reason="OVERLOADED"),)
    if seconds is not None:
        delay = Duration()
        delay.FromMilliseconds(round(seconds * 1000))
        details += (RetryInfo(retry_delay=delay),)
    return OverloadedError("full", code=grpc.StatusCode.RESOURCE_EXHAUSTED, details=details)


ERRORS = (full(0.0), full(3.0), full(None), UnavailableError("gone"))


@pytest.mark.parametrize("best", range(len(ERRORS)))
def test_the_error_is_that_of_the_server_with_room_soonest(best: int) -> None:
    """Whichever is asked first."""
    for order in itertools.permutations(ERRORS[best:]):
        rpc = cache_requests.create(2, 8, None, 1, "float32", None)
        with Making(rpc, lambda rpc, home: None) as making:
            for home, error in enumerate(order):
                making.at(str(home))
                making.failed(error)
        assert making.failure is ERRORS[best]
