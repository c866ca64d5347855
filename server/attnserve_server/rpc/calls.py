"""The messages of a stream.

In: a message, as bytes; and replies to its calls, in pieces. Out: the `Call`s in the message; and the pieces of the
replies as they go into a message. Neither requests nor responses are looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError

from attnserve import _fields
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.access.callers import Caller
from attnserve_server.errors import LIMIT_EXCEEDED, InvalidRequest, Malformed, RequestError
from attnserve_server.observability.metrics import Operation
from attnserve_server.observability.tracing import TraceParent
from attnserve_server.requests.work import Work

MAX_ID_BYTES: Final = 11
"""The longest varint and its tag."""

MAX_CALL_FIELDS: Final = 64
"""The most fields in a call, which defines 6; those of its request do not count."""

OPERATIONS: Final = {
    pb.AttendStreamCall.ATTEND_FIELD_NUMBER: "attend",
    pb.AttendStreamCall.APPLY_FIELD_NUMBER: "apply",
}
"""The fields of a call that hold what it asks for."""

ERROR_FIELD: Final = pb.AttendStreamReply.ERROR_FIELD_NUMBER
"""The field of a reply that holds an error."""

LABELS: Final[dict[str, Operation]] = {"attend": "attend_stream", "apply": "apply_stream"}
"""The metrics' names for operations on a stream."""

# Tags of fields whose numbers fit into a tag of one byte.
_CALLS_TAG: Final = pb.AttendStreamRequest.CALLS_FIELD_NUMBER << 3 | _fields.LENGTH_DELIMITED
_ID_TAG: Final = pb.AttendStreamCall.ID_FIELD_NUMBER << 3 | _fields.VARINT
_TIMEOUT_TAG: Final = pb.AttendStreamCall.TIMEOUT_FIELD_NUMBER << 3 | _fields.LENGTH_DELIMITED
_REPLY_ID_TAG: Final = _fields.field_tag(pb.AttendStreamReply.ID_FIELD_NUMBER, _fields.VARINT)
_OPERATION_TAGS: Final = {number << 3 | _fields.LENGTH_DELIMITED: operation for number, operation in OPERATIONS.items()}


Read: TypeAlias = Callable[[Caller, bytes, int, int], Work]
"""Reads a caller's request from a part of a message. Raises RequestError."""


class Call(NamedTuple):
    """A call on a stream: its id, how long its caller waits (seconds), its operation, its request (a message, and where
    in it the request begins and ends), what is wrong with the call, if anything, and its caller's trace context.
    """

    id: int
    timeout: float | None = None
    operation: str | None = None
    request: tuple[bytes, int, int] = (b"", 0, 0)
    error: RequestError | None = None
    parent: TraceParent | None = None

    @property
    def label(self) -> Operation:
        """Its name in the metrics."""
        return LABELS[self.operation or "attend"]


def read_message(message: bytes, max_calls: int) -> tuple[Sequence[int], list[Call]]:
    """The ids to cancel and the calls of an AttendStreamRequest, at most `max_calls` of each.

    Raises DecodeError, and InvalidRequest if there are more.
    """
    cancelled: Sequence[int] = ()
    calls: list[Call] = []
    rest: list[bytes] = []
    rest_bytes = 0
    at, whole = 0, len(message)
    # Nearly all messages hold nothing but plain calls: these are read first, without what any other field takes.
    while at < whole and message[at] == _CALLS_TAG and (call := _next_call(message, at + 1)) is not None:
        if len(calls) == max_calls:
            raise _too_many_calls(max_calls)
        calls.append(call)
        at = call.request[2]
    for number, wire_type, start, content, end in _fields.fields(message, at, whole) if at < whole else ():
        if number == pb.AttendStreamRequest.CALLS_FIELD_NUMBER and wire_type == 2:
            if len(calls) == max_calls:
                raise _too_many_calls(max_calls)
            calls.append(_read_call(message, content, end))
        else:
            rest_bytes += end - start
            if len(rest) == max_calls or rest_bytes > MAX_ID_BYTES * max_calls:
                raise _too_many_ids(max_calls)
            rest.append(message[start:end])
    if rest:
        cancelled = pb.AttendStreamRequest.FromString(b"".join(rest)).cancel
        if len(cancelled) > max_calls:
            raise _too_many_ids(max_calls)
    return cancelled, calls


def _too_many_calls(most: int) -> InvalidRequest:
    return InvalidRequest("calls", f"at most {most}", "more", LIMIT_EXCEEDED, limit="max_message_calls")


def _too_many_ids(most: int) -> InvalidRequest:
    return InvalidRequest("cancel", f"at most {most} ids", "more", LIMIT_EXCEEDED, limit="max_message_calls")


def _next_call(message: bytes, at: int) -> Call | None:
    """The call whose length prefix is at `at`, if it is a plain one that ends within the message."""
    try:
        length, at = _fields.read_varint(message, at)
    except (DecodeError, IndexError):
        return None
    return _plain_call(message, at, at + length) if at + length <= len(message) else None


def _plain_call(message: bytes, at: int, end: int) -> Call | None:
    """The call in a part of a message, if it has the form in which clients write nearly all: an id, maybe a timeout,
    and an operation, each once and in this order. None for any other, valid or not.
    """
    try:
        if message[at] != _ID_TAG:
            return None
        call_id, at = _fields.read_varint(message, at + 1)
        timeout = None
        if message[at] == _TIMEOUT_TAG:
            length, begin = _fields.read_varint(message, at + 1)
            at = begin + length
            timeout = _seconds(Duration.FromString(message[begin:at]))
        operation = _OPERATION_TAGS.get(message[at])
        length, begin = _fields.read_varint(message, at + 1)
    except (DecodeError, IndexError):
        return None
    if operation is None or begin + length != end:
        return None
    return Call(call_id, timeout, operation, (message, begin, end))


def _seconds(duration: Duration) -> float:
    """The seconds of a timeout, however large or odd: one that breaks the rules for durations is no error."""
    return duration.seconds + duration.nanos * 1e-9


def _read_call(message: bytes, at: int, end: int) -> Call:
    """The call in a part of a message. All but its operation is left to protobuf."""
    if (plain := _plain_call(message, at, end)) is not None:
        return plain
    found: dict[int, list[tuple[int, int]]] = {}
    rest: list[bytes] = []
    count = 0
    try:
        for number, wire_type, start, content, behind in _fields.fields(message, at, end):
            count += _fields.weight(wire_type, start, behind)
            if count > MAX_CALL_FIELDS:
                expected = f"at most {MAX_CALL_FIELDS} fields in one"
                error = InvalidRequest("calls", expected, "more", LIMIT_EXCEEDED, limit="max_call_fields")
                return Call(_id_of(rest), error=error)
            if number in OPERATIONS and wire_type == 2:
                # Of different operations, the last counts. One that is repeated, with no other in between, is merged.
                parts = found.pop(number, [])
                found = {number: [*parts, (content, behind)]}
            else:
                rest.append(message[start:behind])
        envelope = pb.AttendStreamCall.FromString(b"".join(rest))
    except DecodeError as malformed:
        return Call(_id_of(rest), error=Malformed("calls", malformed))
    timeout = None
    if envelope.HasField("timeout"):
        timeout = _seconds(envelope.timeout)
    parent = TraceParent(envelope.traceparent, envelope.tracestate) if envelope.traceparent else None
    if not found:
        return Call(envelope.id, timeout, parent=parent)
    ((number, places),) = found.items()
    if len(places) == 1:
        return Call(envelope.id, timeout, OPERATIONS[number], (message, *places[0]), None, parent)
    # A repeated message field means all occurrences merged, which is what their concatenated bytes decode to.
    merged = b"".join(message[begin:stop] for begin, stop in places)
    return Call(envelope.id, timeout, OPERATIONS[number], (merged, 0, len(merged)), None, parent)


def _id_of(fields: Sequence[bytes]) -> int:
    """The id among the readable fields of a malformed call; 0 if there is none."""
    for field in reversed(fields):
        try:
            if call_id := pb.AttendStreamCall.FromString(field).id:
                return call_id
        except DecodeError:
            continue
    return 0


def stream_reply(call_id: int, field: int, pieces: list[_fields.Buffer], size: int) -> tuple[list[_fields.Buffer], int]:
    """The pieces of one reply on a stream, as a field of `AttendStreamResponse`, and their total length."""
    envelope = _REPLY_ID_TAG + _fields.varint(call_id) if call_id else b""
    envelope += _fields.field_prefix(field, size)
    prefix = _fields.field_prefix(pb.AttendStreamResponse.REPLIES_FIELD_NUMBER, len(envelope) + size) + envelope
    return [prefix, *pieces], len(prefix) + size
