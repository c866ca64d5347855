"""Errors on their way to callers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.rpc.status_pb2 import Status

from attnserve_server.caches.errors import CacheFull
from attnserve_server.errors import (
    InvalidRequest,
    Overloaded,
    RequestError,
)
from attnserve_server.no_room import full, share_exceeded, too_many_streams, too_many_unread, too_many_unsent


@pytest.mark.parametrize(
    "make",
    [
        lambda: Overloaded(full("requests", 16, 0.25)),
        lambda: Overloaded(full("requests", 16, 0.5)),
        lambda: Overloaded(full("bytes", 16, 0.25)),
        lambda: Overloaded(share_exceeded("requests", 16, 0.25)),
        lambda: Overloaded(too_many_streams(3)),
        lambda: Overloaded(too_many_unsent(3)),
        lambda: Overloaded(too_many_unread(3)),
        lambda: CacheFull(100, 10, 0.25),
        lambda: CacheFull(100, 11, 0.25),
        lambda: InvalidRequest("query", "a tensor", "nothing"),
    ],
)
def test_what_travels_is_the_status_however_often_it_is_told(make: Callable[[], RequestError]) -> None:
    for _ in range(2):
        error = make()
        assert Status.FromString(error.encoded_status()) == error.status()
