"""What can go wrong, as one tree, to be caught by meaning.

    AttnServeError
    ├── InvalidRequestError      (ValueError)       the request breaks the contract; `field` says where, `limit` whether
    │                                               it is larger than the server takes
    ├── NotFoundError            (LookupError)      no layer, no cache, or no file has that name
    ├── FailedPreconditionError                     the server is not in a state to do that
    ├── PermissionDeniedError    (PermissionError)  the server does not do that for this caller
    ├── OverloadedError                             the server is full; `retry_delay` says when to try again
    ├── DeadlineExceededError    (TimeoutError)     no reply within the timeout
    ├── UnavailableError         (ConnectionError)  no server, or none that accepts calls, after all retries
    ├── RequestCancelledError                       the server gave up the call because it was cancelled
    ├── ServerError                                 the server failed, or does not have the method
    ├── ProtocolError                               the server's answer makes no sense
    └── ClientClosedError                           the client was closed before the reply came

In: a `google.rpc.Status`, as a stream's reply carries it, or a `grpc.RpcError`. Out: an error of the tree. Codes and
details decide which. The text of an error decides only if gRPC itself found a message too long, since gRPC gives no
details.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

_NUMBER: Final = re.compile("0|[1-9][0-9]{0,18}")
"""A number as servers write it, of less than 64 bits. Python would refuse to read one of thousands of digits."""

_LONGEST_DELAY: Final = 315_576_000_000.0
"""Seconds: ten thousand years, the maximum of a protobuf Duration, which nothing enforces in what arrives."""


class AttnServeError(Exception):
    """The root of the tree: every error with which a call can fail, except wrong uses of Python.

    - `code`: the status code that the call ended with, or the one that fits if no server was asked.
    - `details`: the `google.rpc` details that came with the error: BadRequest, ErrorInfo, RequestInfo, RetryInfo.
    - `resent`: whether the call was sent again after an earlier attempt that may have been carried out, its reply lost.
    """

    _default_code: grpc.StatusCode = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, *, code: grpc.StatusCode | None = None, details: tuple[Message, ...] = ()) -> None:
        super().__init__(message)
        self.code: Final = code if code is not None else self._default_code
        self.details: Final = details
        self.resent = False

    @property
    def reason(self) -> str | None:
        """The machine-readable reason (`google.rpc.ErrorInfo.reason`), if the server gave one."""
        info = self._info
        return None if info is None else str(info.reason) or None

    @property
    def request_id(self) -> str | None:
        """The id of the request in the server's log, by which whoever operates the server finds the line (`request_id`)
        of this error. Servers give it with their own faults, of which the log says more (`ServerError`); None
        otherwise.
        """
        return _request_id(self.details)

    @property
    def _info(self) -> error_details_pb2.ErrorInfo | None:
        return next((detail for detail in self.details if isinstance(detail, error_details_pb2.ErrorInfo)), None)

    def _text(self, key: str) -> str:
        """What the server has put into the error's metadata; empty if nothing."""
        info = self._info
        return "" if info is None else str(info.metadata.get(key, ""))

    def _number(self, key: str) -> int | None:
        """A number, 0 or more, that the server has put into the error's metadata; None if there is none, or what is
        there is no number of tokens or bytes as servers write them.
        """
        text = self._text(key)
        return int(text) if _NUMBER.fullmatch(text) else None


class InvalidRequestError(AttnServeError, ValueError):
    """The request breaks the contract; nothing was computed, and sending it again is pointless.

    - `field`: the field that is wrong, such as ``key`` or ``window.left``; None if it is not one field.
    - `limit`: the limit of the server that the request exceeds, such as ``max_request_flops``: `ServerInfo.limits` or
      `ServerInfo.settings` says how much that is. None if it exceeds none, or the server does not say which.
    """

    _default_code = grpc.StatusCode.INVALID_ARGUMENT
    _is_of_message = False
    _is_of_reply = False

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        limit: str | None = None,
        code: grpc.StatusCode | None = None,
        details: tuple[Message, ...] = (),
    ) -> None:
        super().__init__(message, code=code, details=details)
        self.field: Final = field
        self.limit: Final = limit or self._text("limit") or None


class NotFoundError(AttnServeError, LookupError):
    """What the request names does not exist: a layer, a cache, or a file of definitions."""

    _default_code = grpc.StatusCode.NOT_FOUND

    @property
    def name(self) -> str | None:
        """The name that was not found; of several caches, the first. None if the server does not say."""
        return self._text("name") or None


class FailedPreconditionError(AttnServeError):
    """The request is valid, but the server is not in a state to do it; or a cache does not have the expected length."""

    _default_code = grpc.StatusCode.FAILED_PRECONDITION

    @property
    def name(self) -> str | None:
        """The name of the cache whose length, or whose layers' lengths, are not as needed: of several, the first. None
        for other errors.
        """
        return self._text("name") or None

    @property
    def actual_length(self) -> int | None:
        """How many tokens the cache has, if the request expected another number; None for other errors."""
        return self._number("length")

    @property
    def appended(self) -> bool:
        """Whether an earlier attempt of this very request was carried out: what it appends is there, and would be
        doubled if it were asked for again. If this is False but `resent` is True, an earlier attempt may still have
        been carried out: after many appends by others, the server cannot tell.
        """
        return self._says("appended")

    @property
    def truncated(self) -> bool:
        """Whether an earlier attempt of this very request cut the cache off, whatever was appended since."""
        return self._says("truncated")

    def _says(self, what: str) -> bool:
        return self._text(what) == "true"


class PermissionDeniedError(AttnServeError, PermissionError):
    """The server does not do that for this caller, or does not know who it is."""

    _default_code = grpc.StatusCode.PERMISSION_DENIED


class OverloadedError(AttnServeError):
    """The server is full, despite all retries that could help (none was made sooner than the server said). While the
    server answers few calls, most new ones get this error without being sent.
    """

    _default_code = grpc.StatusCode.RESOURCE_EXHAUSTED

    @property
    def retry_delay(self) -> float | None:
        """When to try again, in seconds from now, 0 or more; None if the server does not say."""
        for detail in self.details:
            if isinstance(detail, error_details_pb2.RetryInfo):
                seconds = float(detail.retry_delay.seconds + detail.retry_delay.nanos / 1e9)
                return min(max(0.0, seconds), _LONGEST_DELAY)  # what has passed is over, and what is longer is no delay
        return None

    @property
    def bound(self) -> str | None:
        """Which of the server's bounds the call would have exceeded, such as ``requests``; None if it does not say."""
        return self._text("bound") or None

    @property
    def free_bytes(self) -> int | None:
        """How many bytes are free for caches, if one lacks room; None for other errors."""
        return self._number("free_bytes")


class DeadlineExceededError(AttnServeError, TimeoutError):
    """The reply did not come within the call's timeout. Or it could not have: a busy server says so at once."""

    _default_code = grpc.StatusCode.DEADLINE_EXCEEDED


class UnavailableError(AttnServeError, ConnectionError):
    """No server could be reached, or none that accepts calls, although the call was retried."""

    _default_code = grpc.StatusCode.UNAVAILABLE


class RequestCancelledError(AttnServeError):
    """The server gave up the call because it was cancelled. A cancelled future raises `CancelledError` instead."""

    _default_code = grpc.StatusCode.CANCELLED


class ServerError(AttnServeError):
    """The server failed to compute, or does not have the method. The message ends with the `request_id`, if there is
    one.
    """

    _default_code = grpc.StatusCode.INTERNAL


class ProtocolError(AttnServeError):
    """The server's answer makes no sense: it is no valid message, or no reply to the request."""

    _default_code = grpc.StatusCode.INTERNAL


class ClientClosedError(AttnServeError):
    """The client cannot make or finish the call:

    - it was closed, before the call or before the reply;
    - it was used before a fork, and this is the child process; or it is an `AsyncClient`, and the parent had any;
    - the interpreter is ending.
    """

    _default_code = grpc.StatusCode.CANCELLED

    def __init__(self, message: str = "the client is closed") -> None:
        super().__init__(message)


_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}

_CLASSES: Final[dict[grpc.StatusCode, type[AttnServeError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.ALREADY_EXISTS: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.UNAUTHENTICATED: PermissionDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
}
"""The class of each code; a code that is not here makes a ServerError."""

_DETAILS: Final[tuple[type[Message], ...]] = (
    error_details_pb2.BadRequest,
    error_details_pb2.ErrorInfo,
    error_details_pb2.RequestInfo,
    error_details_pb2.RetryInfo,
)


def error_from_status(status: Status, *, resent: bool = False) -> AttnServeError:
    """The error that a status describes; details that are unknown or malformed are left out.

    `resent` says that an earlier attempt may have been carried out.
    """
    error = _error(status)
    error.resent = resent
    return error


def _error(status: Status) -> AttnServeError:
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    if code is grpc.StatusCode.OK:
        return ProtocolError("the server reports an error whose status is OK")
    details: list[Message] = []
    for packed in status.details:
        for message_type in _DETAILS:
            if packed.Is(message_type.DESCRIPTOR):
                detail = message_type()
                try:
                    packed.Unpack(detail)
                except DecodeError:
                    continue
                details.append(detail)
    message = status.message or code.name
    error_class = _CLASSES.get(code, ServerError)
    if error_class is OverloadedError and not status.details and (too_long := _too_long(message, code)) is not None:
        return too_long  # a service that is full gives details; gRPC itself has this reason, and proxies have others
    if code is grpc.StatusCode.UNIMPLEMENTED and not status.details and not message.startswith("Compression algorithm"):
        # No service that has the method says so: it is gRPC itself, where nothing has that name.
        message = f"what answers there is no attnserve server, or an older one ({message})"
    if error_class is InvalidRequestError:
        return InvalidRequestError(message, field=_field(details), code=code, details=tuple(details))
    if error_class is ServerError and (request_id := _request_id(details)) is not None:
        message = f"{message} (request {request_id} in the server's log)"
    return error_class(message, code=code, details=tuple(details))


def _too_long(message: str, code: grpc.StatusCode) -> InvalidRequestError | None:
    """The error if a message, or the call's metadata, were longer than the server or the client's own channel options
    allow; None if that is not the reason.
    """
    if "metadata size exceeds" in message:
        return InvalidRequestError(f"the call's metadata, such as the token, are too long: {message}", code=code)
    if "larger than max" not in message:
        return None
    limit = None
    if "CLIENT: Received" in message:  # "Stream removed (CLIENT: ...)" in some versions
        why = "the reply is longer than this client takes (grpc.max_receive_message_length)"
    elif "CLIENT: Sent" in message:
        why = "the message is longer than this client sends (grpc.max_send_message_length)"
    else:
        limit = "max_message_bytes"
        why = f"a message is longer than the server takes ({limit})"
    error = InvalidRequestError(f"{why}: {message}", limit=limit, code=code)
    error._is_of_message, error._is_of_reply = True, "CLIENT: Received" in message
    return error


def is_of_message(error: AttnServeError) -> bool:
    """Whether an error is that of a message that is too long, which may be a reply."""
    return isinstance(error, InvalidRequestError) and error._is_of_message


def is_of_reply(error: AttnServeError) -> bool:
    """Whether an error is that of a message that is too long, and that message is a reply."""
    return isinstance(error, InvalidRequestError) and error._is_of_reply


def _request_id(details: Iterable[Message]) -> str | None:
    for detail in details:
        if isinstance(detail, error_details_pb2.RequestInfo):
            return str(detail.request_id) or None
    return None


def _field(details: list[Message]) -> str | None:
    for detail in details:
        if isinstance(detail, error_details_pb2.BadRequest) and detail.field_violations:
            return detail.field_violations[0].field or None
    return None


def no_reply(timeout: float | None, address: str = "") -> DeadlineExceededError:
    """The error of a call without a reply. `timeout` is what its caller allowed; some of that may have passed before it
    was sent.
    """
    whom = f" from {address}" if address else ""
    return DeadlineExceededError(f"no reply{whom}{_within(timeout)}")


def no_room(refusal: OverloadedError, timeout: float | None) -> OverloadedError:
    """The error of a call for which the server had no room in all the seconds that it was given (`timeout`). `refusal`
    is what the server said last.
    """
    return OverloadedError(f"{refusal}; no room{_within(timeout)}", code=refusal.code, details=refusal.details)


def _within(timeout: float | None) -> str:
    return "" if timeout is None else f" within {float(f'{timeout:.3g}'):g} s"


def unreadable(error: BaseException) -> str:
    """The message of the ProtocolError of calls whose replies could not be taken, whatever the reason."""
    return str(error) if isinstance(error, ProtocolError) else f"a reply could not be taken: {error!r}"


def status_from_rpc_error(error: grpc.RpcError) -> Status:
    """The status that an RPC ended with, with its details where the server sent any (gRPC's rich error model)."""
    try:
        rich = rpc_status.from_call(error)  # ValueError: the details contradict the code, so they are not to be trusted
    except (ValueError, DecodeError):
        rich = None
    if rich is not None:
        return rich
    return Status(code=error.code().value[0], message=error.details() or "")
