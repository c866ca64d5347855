"""The error tree: which status becomes which error, and what the error tells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest
from askers import Transport, arrays, transport
from google.protobuf import any_pb2
from google.rpc import error_details_pb2 as rpc
from google.rpc.status_pb2 import Status

import attnserve
from attnserve import Client
from attnserve._errors import error_from_status, no_reply

if TYPE_CHECKING:
    from conftest import Server

__all__ = ["transport"]


def status(code: grpc.StatusCode, *details: Any) -> Status:
    result = Status(code=code.value[0], message="key: expected this, found that")
    for detail in details:
        result.details.add().Pack(detail)
    return result


@pytest.mark.parametrize(
    ("code", "error", "builtin"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, attnserve.InvalidRequestError, ValueError),
        (grpc.StatusCode.NOT_FOUND, attnserve.NotFoundError, LookupError),
        (grpc.StatusCode.FAILED_PRECONDITION, attnserve.FailedPreconditionError, Exception),
        (grpc.StatusCode.PERMISSION_DENIED, attnserve.PermissionDeniedError, PermissionError),
        (grpc.StatusCode.UNAUTHENTICATED, attnserve.PermissionDeniedError, PermissionError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, attnserve.DeadlineExceededError, TimeoutError),
        (grpc.StatusCode.UNAVAILABLE, attnserve.UnavailableError, ConnectionError),
        (grpc.StatusCode.CANCELLED, attnserve.RequestCancelledError, Exception),
        (grpc.StatusCode.INTERNAL, attnserve.ServerError, Exception),
        (grpc.StatusCode.UNKNOWN, attnserve.ServerError, Exception),
        (grpc.StatusCode.DATA_LOSS, attnserve.ServerError, Exception),
    ],
)
def test_each_code_has_its_error(code: grpc.StatusCode, error: type[Exception], builtin: type[Exception]) -> None:
    made = error_from_status(status(code))
    assert type(made) is error
    assert isinstance(made, attnserve.AttnServeError)
    assert isinstance(made, builtin)
    assert made.code is code
    assert str(made) == "key: expected this, found that"


def test_an_unknown_code_is_the_servers_error() -> None:
    assert type(error_from_status(Status(code=77))) is attnserve.ServerError


def test_an_error_that_is_ok_is_nonsense() -> None:
    assert type(error_from_status(Status(code=0))) is attnserve.ProtocolError


def test_the_field_of_an_invalid_request() -> None:
    bad = rpc.BadRequest()
    bad.field_violations.add(field="key", description="expected this")
    error = error_from_status(status(grpc.StatusCode.INVALID_ARGUMENT, bad, rpc.ErrorInfo(reason="SHAPE")))
    assert isinstance(error, attnserve.InvalidRequestError)
    assert (error.field, error.reason, error.limit) == ("key", "SHAPE", None)
    assert error.details == (bad, rpc.ErrorInfo(reason="SHAPE"))


def test_the_limit_that_an_invalid_request_exceeds() -> None:
    info = rpc.ErrorInfo(reason="LIMIT_EXCEEDED", metadata={"field": "", "limit": "max_request_flops"})
    error = error_from_status(status(grpc.StatusCode.INVALID_ARGUMENT, rpc.BadRequest(), info))
    assert isinstance(error, attnserve.InvalidRequestError)
    assert (error.field, error.limit) == (None, "max_request_flops")


def test_the_delay_of_an_overload() -> None:
    retry = rpc.RetryInfo()
    retry.retry_delay.FromMilliseconds(250)
    error = error_from_status(status(grpc.StatusCode.RESOURCE_EXHAUSTED, retry))
    assert isinstance(error, attnserve.OverloadedError)
    assert error.retry_delay == 0.25
    for seconds, nanos, delay in ((-5, 0, 0.0), (0, -1, 0.0), (2**63 - 1, 0, 315_576_000_000.0)):  # as no server says
        retry.retry_delay.seconds, retry.retry_delay.nanos = seconds, nanos
        error = error_from_status(status(grpc.StatusCode.RESOURCE_EXHAUSTED, retry))
        assert isinstance(error, attnserve.OverloadedError)
        assert error.retry_delay == delay
    silent = error_from_status(status(grpc.StatusCode.RESOURCE_EXHAUSTED, rpc.ErrorInfo(reason="OUT_OF_MEMORY")))
    assert isinstance(silent, attnserve.OverloadedError)
    assert silent.retry_delay is None


def test_a_message_that_grpc_refuses_is_too_long() -> None:
    """The status from gRPC has no details, whereas that of an overloaded service always does."""
    error = error_from_status(Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="larger than max"))
    assert isinstance(error, attnserve.InvalidRequestError)
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.limit == "max_message_bytes"
    assert "(max_message_bytes): larger than max" in str(error)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("CLIENT: Received message larger than max (9 vs. 5)", "the reply is longer than this client takes"),
        ("Stream removed (CLIENT: Received message larger than max (9 vs. 5))", "the reply is longer than this client"),
        ("CLIENT: Sent message larger than max (9 vs. 5)", "the message is longer than this client sends"),
    ],
)
def test_what_the_channel_itself_refuses_is_not_the_servers_limit(message: str, said: str) -> None:
    error = error_from_status(Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message=message))
    assert isinstance(error, attnserve.InvalidRequestError)
    assert error.limit is None
    assert said in str(error)


def test_metadata_that_are_too_long_are_no_overload(server: Server, transport: Transport) -> None:
    with (
        Client(server.address, token="x" * 20_000, transport=transport) as client,
        pytest.raises(attnserve.InvalidRequestError, match=r"^the call's metadata, such as the token, are too long: "),
    ):
        client.attend(*arrays())


def test_a_compression_that_the_server_does_not_take_is_told_as_it_is(server: Server, transport: Transport) -> None:
    gzip = [("grpc.default_compression_algorithm", grpc.Compression.Gzip.value)]
    with (
        Client(server.address, options=gzip, transport=transport) as client,
        pytest.raises(attnserve.ServerError, match=r"^Compression algorithm 'gzip' is disabled"),
    ):
        client.attend(*arrays())


def test_what_a_proxy_refuses_is_no_mistake_of_the_caller() -> None:
    error = error_from_status(Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="too many requests"))
    assert isinstance(error, attnserve.OverloadedError)
    assert error.retry_delay is None


def test_a_method_that_grpc_does_not_know_is_of_no_attnserve_server() -> None:
    """As above; the code with details, which no server of today gives, would be told in the server's own words."""
    unknown = error_from_status(Status(code=grpc.StatusCode.UNIMPLEMENTED.value[0], message="Method not found!"))
    assert type(unknown) is attnserve.ServerError
    assert unknown.code is grpc.StatusCode.UNIMPLEMENTED
    assert str(unknown) == "what answers there is no attnserve server, or an older one (Method not found!)"
    told = error_from_status(status(grpc.StatusCode.UNIMPLEMENTED, rpc.ErrorInfo(reason="NOT_YET")))
    assert str(told) == "key: expected this, found that"


@pytest.mark.parametrize(
    ("metadata", "number"),
    [
        ({"length": "12", "free_bytes": "12", "appended": "true"}, 12),
        ({"length": "0", "free_bytes": "0"}, 0),
        ({"length": str(2**63 - 1), "free_bytes": str(2**63 - 1)}, 2**63 - 1),
        ({"length": "-1", "free_bytes": "a lot"}, None),
        ({"length": "1_0", "free_bytes": "9" * 5000}, None),
        ({}, None),
    ],
)
def test_what_a_cache_has(metadata: dict[str, str], number: int | None) -> None:
    info = rpc.ErrorInfo(reason="UNEXPECTED_LENGTH", metadata=metadata)
    unexpected = error_from_status(status(grpc.StatusCode.FAILED_PRECONDITION, info), resent=True)
    assert isinstance(unexpected, attnserve.FailedPreconditionError)
    assert (unexpected.actual_length, unexpected.resent) == (number, True)
    assert unexpected.appended is (metadata.get("appended") == "true")
    full = error_from_status(status(grpc.StatusCode.RESOURCE_EXHAUSTED, info))
    assert isinstance(full, attnserve.OverloadedError)
    assert (full.free_bytes, full.resent) == (number, False)
    silent = error_from_status(status(grpc.StatusCode.FAILED_PRECONDITION))
    assert isinstance(silent, attnserve.FailedPreconditionError)
    assert (silent.actual_length, silent.name) == (None, None)


def test_the_id_in_the_servers_log_ends_the_message_of_a_fault() -> None:
    info = rpc.RequestInfo(request_id="rpc-4f7d21-1/2")
    fault = error_from_status(status(grpc.StatusCode.INTERNAL, rpc.ErrorInfo(reason="COMPUTATION_FAILED"), info))
    assert (fault.request_id, fault.reason) == ("rpc-4f7d21-1/2", "COMPUTATION_FAILED")
    assert str(fault) == "key: expected this, found that (request rpc-4f7d21-1/2 in the server's log)"
    invalid = error_from_status(status(grpc.StatusCode.INVALID_ARGUMENT, info))
    assert (invalid.request_id, str(invalid)) == ("rpc-4f7d21-1/2", "key: expected this, found that")
    for details in ((), (rpc.RequestInfo(),)):
        silent = error_from_status(status(grpc.StatusCode.INTERNAL, *details))
        assert (silent.request_id, str(silent)) == (None, "key: expected this, found that")


def test_details_that_are_unknown_or_broken_do_no_harm() -> None:
    broken = Status(code=3, message="bad")
    broken.details.add(type_url="type.googleapis.com/google.rpc.BadRequest", value=b"\xff\xff\xff")
    broken.details.add(type_url="type.googleapis.com/google.rpc.Nothing", value=b"\1")
    broken.details.append(any_pb2.Any())
    error = error_from_status(broken)
    assert isinstance(error, attnserve.InvalidRequestError)
    assert (error.field, error.details, error.reason) == (None, (), None)


@pytest.mark.parametrize(
    ("timeout", "address", "text"),
    [
        (0.4999937, "10.0.0.1:8001", "no reply from 10.0.0.1:8001 within 0.5 s"),
        (3600.0, "", "no reply within 3600 s"),
        (None, "unix:/a", "no reply from unix:/a"),
    ],
)
def test_who_has_not_replied_in_time(timeout: float | None, address: str, text: str) -> None:
    assert str(no_reply(timeout, address)) == text


async def test_what_grpc_said_is_not_said_twice() -> None:
    """A traceback ends with the error of the tree, without gRPC's own, whose information it includes."""
    async with attnserve.AsyncClient("unix:/nonexistent/socket", retries=0) as client:
        with pytest.raises(attnserve.UnavailableError, match="/nonexistent/socket") as caught:
            await client.server_info()
    assert caught.value.__suppress_context__


def test_every_error_is_public_and_documented() -> None:
    classes = {attnserve.AttnServeError, *attnserve.AttnServeError.__subclasses__()}
    for error in classes:
        assert getattr(attnserve, error.__name__) is error
        assert error.__name__ in attnserve.__all__
        assert error.__doc__
    for error in classes - {attnserve.AttnServeError}:
        assert error("text").code is error._default_code
