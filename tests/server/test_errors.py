"""Errors on their way to callers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RequestInfo
from google.rpc.status_pb2 import Status

from attnserve_server.caches.errors import CacheFull
from attnserve_server.errors import (
    LIMIT_EXCEEDED,
    CallerChanged,
    ComputationFailed,
    DeadlineUnreachable,
    DeviceFailed,
    Draining,
    InvalidRequest,
    Overloaded,
    RequestError,
    Starting,
    error_for_caller,
)
from attnserve_server.no_room import NoRoom, full, share_exceeded, too_many_streams, too_many_unread, too_many_unsent


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


@pytest.mark.parametrize(
    ("why", "reason", "bound", "rejection"),
    [
        (full("bytes", 16, 0.25), "OVERLOADED", "bytes", "bytes"),
        (share_exceeded("bytes", 16, 0.25), "SHARE_EXCEEDED", "bytes", "share"),
        (too_many_streams(3), "TOO_MANY_STREAMS", "caller_streams", "caller_streams"),
        (too_many_unsent(3), "TOO_MANY_UNSENT", "unsent_messages", "unsent_messages"),
        (too_many_unread(3), "TOO_MANY_UNREAD", "unread_replies", "unread_replies"),
    ],
)
def test_programs_and_metrics_can_tell_what_there_is_no_room_for(
    why: NoRoom, reason: str, bound: str, rejection: str
) -> None:
    error = Overloaded(why)
    info = next(detail for detail in error.details() if isinstance(detail, ErrorInfo))
    assert (info.reason, info.metadata["bound"], error.rejection) == (reason, bound, rejection)


@pytest.mark.parametrize("error", [Starting(), Draining(), DeviceFailed(), CallerChanged()], ids=type)
def test_a_server_that_takes_no_calls_names_no_delay(error: RequestError) -> None:
    """It does not know one, and another server may answer at once: gRPC's own retries are not held back either."""
    assert [type(detail) for detail in error.details()] == [ErrorInfo]
    assert [key for key, _ in error.trailers()] == ["grpc-status-details-bin"]


@pytest.mark.parametrize(("field", "violations"), [("query.shape", ["query.shape"]), ("", [])])
def test_a_field_is_named_where_one_is_at_fault(field: str, violations: list[str]) -> None:
    error = InvalidRequest(field, "at most 5 FLOPs", 6, LIMIT_EXCEEDED, limit="max_request_flops")
    info, *rest = error.details()
    assert isinstance(info, ErrorInfo)
    assert dict(info.metadata) == {"limit": "max_request_flops"} | ({"field": field} if field else {})
    named = [details.field_violations[0].field for details in rest if isinstance(details, BadRequest)]
    assert named == violations


@pytest.mark.parametrize(
    ("needed", "left", "said"),
    [
        (1.5, 0.25, "1.500 s, and 0.250 s"),
        (1.0004, 0.9996, "1.000 s, and 1.000 s"),
        (1234.5, 999.7, "1234.500 s, and 999.700 s"),
        (2e-5, 1e-6, "2e-05 s, and 1e-06 s"),
        (0.5, -1e-9, "0.500 s, and 0 s"),
    ],
)
def test_times_are_told_however_short(needed: float, left: float, said: str) -> None:
    assert said in DeadlineUnreachable(needed, left).message


def test_a_fault_has_the_id_of_its_line_in_the_log_once_that_is_known() -> None:
    fault = ComputationFailed("a kernel")
    assert [type(detail) for detail in fault.details()] == [ErrorInfo]
    fault.request_id = "rpc-4f7d21-1/2"
    assert fault.details()[1:] == [RequestInfo(request_id="rpc-4f7d21-1/2")]
    assert Status.FromString(fault.encoded_status()) == fault.status()


def test_a_bug_is_told_in_full_to_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Its words may have paths in them, or what belongs to other callers."""
    bug = OSError("no such file: /etc/attnserve/weights")
    told = error_for_caller(bug)
    assert isinstance(told, ComputationFailed)
    assert "weights" not in str(told.status())
    (line,) = caplog.records
    assert line.exc_info is not None
    assert (line.levelname, line.exc_info[1]) == ("ERROR", bug)
