"""The wire format of what a stream carries to the server: calls and cancellations, as fields of AttendStreamRequest.

In: calls that have their ids. Out: bytes to go before a call's own pieces, or by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration

from attnserve._fields import VARINT, field_prefix, field_tag, varint
from attnserve._transports.in_flight import Call
from attnserve.v1 import attention_pb2 as pb

_CANCEL: Final = pb.AttendStreamRequest.CANCEL_FIELD_NUMBER
_CALLS: Final = pb.AttendStreamRequest.CALLS_FIELD_NUMBER
_TIMEOUT: Final = pb.AttendStreamCall.TIMEOUT_FIELD_NUMBER
_ID: Final = field_tag(pb.AttendStreamCall.ID_FIELD_NUMBER, VARINT)
_SECONDS: Final = field_tag(Duration.SECONDS_FIELD_NUMBER, VARINT)
_NANOS: Final = field_tag(Duration.NANOS_FIELD_NUMBER, VARINT)


def prefix(call: Call[Any], now: float) -> bytes:
    """What goes before the pieces of a call that is sent now: its id, the rest of its time, its trace."""
    envelope = _ID + varint(call.id)
    if call.deadline != inf:
        timeout = _duration(call.deadline - now)
        envelope += field_prefix(_TIMEOUT, len(timeout)) + timeout
    if call.trace:
        envelope += call.trace
    envelope += field_prefix(call.field, call.size)
    return field_prefix(_CALLS, len(envelope) + call.size) + envelope


def cancellation(ids: Iterable[int]) -> bytes:
    """Tells the server that nobody waits for the calls with these ids."""
    packed = b"".join(map(varint, ids))
    return field_prefix(_CANCEL, len(packed)) + packed


def _duration(seconds: float) -> bytes:
    """A serialised `google.protobuf.Duration`; `seconds` is more than 0."""
    whole, nanoseconds = divmod(int(seconds * 1e9) or 1, 1_000_000_000)
    return (_SECONDS + varint(whole) if whole else b"") + (_NANOS + varint(nanoseconds) if nanoseconds else b"")
