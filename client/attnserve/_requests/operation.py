"""The operations that a stream carries, as data: where each one's calls and replies are in messages.

The code that carries calls (`_transports`) names no operation; a new one in the protocol is one more value here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from google.protobuf.message import Message

from attnserve._settings.config import SERVICE
from attnserve.v1 import attention_pb2 as pb


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An operation of the protocol, as a unary method and as one kind of a stream's calls and replies."""

    field: str
    """The name of its field in a stream's call and in a stream's reply."""
    number: int
    """The number of its field in a stream's call."""
    path: str
    """Its unary method."""
    request_type: type[Message]
    """The type of its request."""
    response_type: type[pb.AttendResponse] | type[pb.ApplyResponse]
    """The type of its response."""


def _number(field: str) -> int:
    number: int = pb.AttendStreamCall.DESCRIPTOR.fields_by_name[field].number
    return number


ATTEND: Final = Operation("attend", _number("attend"), SERVICE + "Attend", pb.AttendRequest, pb.AttendResponse)
"""Computes one attention."""

APPLY: Final = Operation("apply", _number("apply"), SERVICE + "Apply", pb.ApplyRequest, pb.ApplyResponse)
"""Applies a resident layer."""

OPERATIONS: Final = {operation.field: operation for operation in (ATTEND, APPLY)}
"""All operations, by the name of their field."""
