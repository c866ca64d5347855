"""What can be asked of a server on a stream, as data: where the calls and replies of each operation lie in messages.

Whatever carries calls (`_transports`) knows no operation by name; one more in the protocol is one more value here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from google.protobuf.message import Message

from attnserve._settings.config import SERVICE
from attnserve.v1 import attention_pb2 as pb


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An operation of the protocol, as a unary method and as a choice of a stream's calls and replies."""

    field: str
    """The field of a stream's reply that holds its response, and that of a stream's call that holds its request."""
    number: int
    """The number of that field in a stream's call."""
    path: str
    """Its unary method."""
    request_type: type[Message]
    """The message that asks for it."""
    response_type: type[pb.AttendResponse] | type[pb.ApplyResponse]
    """The message that it is answered with."""


def _number(field: str) -> int:
    number: int = pb.AttendStreamCall.DESCRIPTOR.fields_by_name[field].number
    return number


ATTEND: Final = Operation("attend", _number("attend"), SERVICE + "Attend", pb.AttendRequest, pb.AttendResponse)
"""One attention."""

APPLY: Final = Operation("apply", _number("apply"), SERVICE + "Apply", pb.ApplyRequest, pb.ApplyResponse)
"""A resident layer, applied."""

OPERATIONS: Final = {operation.field: operation for operation in (ATTEND, APPLY)}
"""All operations, by their field."""
