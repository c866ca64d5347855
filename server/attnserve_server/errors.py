"""What can go wrong with a request: a small tree of errors that know their status codes and details.

    RequestError
    ├── InvalidRequest       INVALID_ARGUMENT     BadRequest with the field's path, ErrorInfo
    │   └── Malformed
    ├── Unauthenticated      UNAUTHENTICATED      ErrorInfo
    ├── PermissionDenied     PERMISSION_DENIED    ErrorInfo
    ├── NotFound             NOT_FOUND            ErrorInfo
    ├── FailedPrecondition   FAILED_PRECONDITION  ErrorInfo
    ├── Overloaded           RESOURCE_EXHAUSTED   RetryInfo, ErrorInfo
    ├── RepliesUnread        RESOURCE_EXHAUSTED   ErrorInfo
    ├── OutOfMemory          RESOURCE_EXHAUSTED   ErrorInfo
    ├── DeadlineExceeded     DEADLINE_EXCEEDED    ErrorInfo
    ├── DeadlineUnreachable  DEADLINE_EXCEEDED    ErrorInfo
    ├── Cancelled            CANCELLED            ErrorInfo
    ├── Draining             UNAVAILABLE          ErrorInfo
    ├── Starting             UNAVAILABLE          ErrorInfo
    ├── CallerChanged        UNAVAILABLE          ErrorInfo
    ├── DeviceFailed         UNAVAILABLE          ErrorInfo
    └── ComputationFailed    INTERNAL             ErrorInfo, RequestInfo with the id in the log

RetryInfo is for delays that the server knows: when there should be room. It knows neither how long its start will take
nor who follows it, and when; and a delay would keep callers from other servers, which may answer at once.

Messages concern only the request: no stack traces, no paths, nothing about other callers.
"""

from __future__ import annotations

import logging
from typing import ClassVar

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from attnserve._fields import LongGroupError, ManyFieldsError
from attnserve._wire import MOST_FIELDS
from attnserve_server.no_room import NoRoom
from attnserve_server.statuses import error_info, status_of

logger = logging.getLogger(__name__)

LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
"""The reason if something is larger than the server accepts from anybody; the message and the metadata give the limit,
by the name that it has in `Limits` or among the settings.
"""

MAX_SHOWN = 1000
"""The longest part of a message that says what was found, in characters. A unary call's status travels in trailers,
which contain this part several times; and gRPC accepts 8 KiB of trailers."""

MOST_NAME_SHOWN = 128
"""How much of an unknown name is shown; names of layers are no longer than that."""

SECRET_SHOWN = 4
"""How much of a name that is a secret."""


def shortened(text: str) -> str:
    """The text, truncated if it is longer than may be shown."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class RequestError(Exception):
    """A request that is answered with an error. `reason` is a constant that a program can compare."""

    code: ClassVar[grpc.StatusCode]

    def __init__(self, message: str, reason: str, **metadata: str) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.metadata = metadata

    @property
    def rejection(self) -> str | None:
        """Its label in the metrics of rejections; None if it is none, or was counted where it was rejected."""
        return None

    def details(self) -> list[Message]:
        """The google.rpc details that travel with the status."""
        return [error_info(self.reason, self.metadata)]

    def status(self) -> status_pb2.Status:
        """The google.rpc.Status of this error."""
        return status_of(self.code, self.message, self.details())

    def encoded_status(self) -> bytes:
        """The google.rpc.Status of this error, serialised."""
        encoded: bytes = self.status().SerializeToString()
        return encoded

    def trailers(self) -> tuple[tuple[str, str | bytes], ...]:
        """The trailing metadata of an RPC that ends with this error."""
        return (("grpc-status-details-bin", self.encoded_status()),)


class InvalidRequest(RequestError):
    """A request that breaks the contract. The error says in which field ("" for the request as a whole), what was
    expected there and what was found; and if the request exceeds a limit of the server, the limit's name.
    """

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(
        self, field: str, expected: str, found: object, reason: str = "INVALID_FIELD", *, limit: str = ""
    ) -> None:
        named = f"{expected} ({limit})" if limit else expected
        self.description = shortened(f"expected {named}, found {found}")
        metadata = {name: value for name, value in (("field", field), ("limit", limit)) if value}
        super().__init__(f"{field}: {self.description}" if field else self.description, reason, **metadata)
        self.field = field

    def details(self) -> list[Message]:
        """ErrorInfo, and BadRequest with the path of the field, if it is one that is at fault."""
        if not self.field:
            return super().details()
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=self.field, description=self.description, reason=self.reason
        )
        return [*super().details(), error_details_pb2.BadRequest(field_violations=[violation])]


class Malformed(InvalidRequest):
    """Bytes that are not the message they should be, or a message with more fields than any needs."""

    def __init__(self, field: str, what: object) -> None:
        if isinstance(what, ManyFieldsError) and not isinstance(what, LongGroupError):
            expected = f"at most {MOST_FIELDS} fields"
            super().__init__(field, expected, "more", LIMIT_EXCEEDED, limit="max_request_fields")
        else:
            super().__init__(field, "a serialised message", what, "MALFORMED_MESSAGE")


class Unauthenticated(RequestError):
    """A request of a caller that does not prove who it is."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(RequestError):
    """A request that this caller, or no caller, may make here."""

    code = grpc.StatusCode.PERMISSION_DENIED


class NotFound(RequestError):
    """A request that names something that does not exist."""

    code = grpc.StatusCode.NOT_FOUND

    def __init__(self, what: str, name: str, *, is_secret: bool = False) -> None:
        """What is not there. A secret name is for the caller's program alone: logs have the message."""
        name = name[:MOST_NAME_SHOWN]
        shown = f"{name[:SECRET_SHOWN]}..." if is_secret else name
        super().__init__(f"there is no {what} {shown!r}", "NOT_FOUND", name=name)


class FailedPrecondition(RequestError):
    """A request that cannot be met in the present state of the server or of what it names."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Overloaded(RequestError):
    """A request that the server has no room for now."""

    code = NoRoom.code

    def __init__(self, why: NoRoom) -> None:
        super().__init__(why.message, why.reason, **why.metadata)
        self._why = why

    @property
    def bound(self) -> str:
        """What it would have exceeded."""
        return self._why.bound

    @property
    def retry_delay(self) -> float:
        """Seconds after which there should be room."""
        return self._why.retry_delay

    @property
    def rejection(self) -> str:
        """Its label in the metrics of rejections: mostly the bound."""
        return self._why.rejection

    def details(self) -> list[Message]:
        """ErrorInfo, and RetryInfo with the delay."""
        return self._why.details()

    def encoded_status(self) -> bytes:
        """As for every error, but serialised once for all that are told the same."""
        return self._why.encoded_status()

    def trailers(self) -> tuple[tuple[str, str | bytes], ...]:
        """The trailers of every error, and how long gRPC's own retries should wait."""
        return *super().trailers(), ("grpc-retry-pushback-ms", str(max(1, round(self.retry_delay * 1000))))


class OutOfMemory(RequestError):
    """A request for which the device has too little memory, even alone."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self) -> None:
        super().__init__("the device has not the memory for this", "OUT_OF_MEMORY")


class RepliesUnread(RequestError):
    """The end of a stream, or of a unary call with its connection, whose caller does not take its replies."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, size: int, seconds: float) -> None:
        super().__init__(
            f"a reply of {size} bytes was not read within {seconds:.3g} s; what is held for its caller is given up",
            "REPLIES_UNREAD",
        )

    @property
    def rejection(self) -> str:
        """Its label in the metrics, though it was not refused at the door."""
        return "unread"


class DeadlineExceeded(RequestError):
    """A request whose deadline passed before it ran."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED

    def __init__(self) -> None:
        super().__init__("the deadline passed before the request ran", "DEADLINE_EXCEEDED")


class DeadlineUnreachable(RequestError):
    """A request that would not be computed before its deadline, as is known on arrival."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED

    def __init__(self, needed: float, left: float) -> None:
        super().__init__(
            f"at the measured rate the reply takes {_seconds(needed)}, and {_seconds(max(0.0, left))} are left",
            "DEADLINE_UNREACHABLE",
        )

    @property
    def rejection(self) -> str:
        """The deadline."""
        return "deadline"


def _seconds(seconds: float) -> str:
    """Seconds to the millisecond, fewer to three digits."""
    return f"{seconds:.3f} s" if seconds >= 0.001 else f"{seconds:.3g} s"


class Cancelled(RequestError):
    """A request whose caller no longer waits."""

    code = grpc.StatusCode.CANCELLED

    def __init__(self) -> None:
        super().__init__("the request was cancelled before it ran", "CANCELLED")


class Draining(RequestError):
    """A request that came while the server was ending."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self) -> None:
        super().__init__("the server is draining; another one will answer", "DRAINING")


class CallerChanged(RequestError):
    """The end of a stream whose caller is no longer the same, or may no longer use the service: most likely its token
    was replaced, and it has the new one. UNAVAILABLE, so that it tries another stream, on which it learns if it is
    refused.
    """

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self) -> None:
        super().__init__("what the caller may do has changed; another stream will be answered", "CALLER_CHANGED")


class Starting(RequestError):
    """A request that came before the server was ready."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self) -> None:
        super().__init__("the server is starting", "STARTING")


class DeviceFailed(RequestError):
    """A request to a server whose device is lost or stuck, and which is about to end."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self) -> None:
        super().__init__("the server's device failed; another server will answer", "DEVICE_FAILED")


class ComputationFailed(RequestError):
    """A request whose computation failed on the device by itself, and not because of others: each has an error of its
    own. The log has more of it than its caller is told.
    """

    code = grpc.StatusCode.INTERNAL

    def __init__(self, what: str) -> None:
        super().__init__(f"the computation failed: {what}", "COMPUTATION_FAILED")
        self.request_id = ""
        """The id of the request's line in the log; empty until that is known."""

    def details(self) -> list[Message]:
        """ErrorInfo, and RequestInfo with the id, by which whoever operates the server finds the line."""
        if not self.request_id:
            return super().details()
        return [*super().details(), error_details_pb2.RequestInfo(request_id=self.request_id)]


def error_for_caller(error: Exception) -> RequestError:
    """What a caller is told about an error: all of a RequestError; of any other, which is a bug, only that it happened.

    gRPC by itself would send the exception's own words. Those go to the log. The error of a request loses its frames,
    which hold the message, and are often part of a reference cycle with it.
    """
    if isinstance(error, RequestError):
        error.__context__ = None
        return error.with_traceback(None)
    logger.error("a request failed through no fault of its own", exc_info=error)
    return ComputationFailed("an error of the server")
