"""What a server answered, as messages whose payloads are still where they arrived.

In: the bytes of a stream's message, or of a unary response. Out: responses, with the ids of their calls where they came
on a stream. Whatever makes no sense is a `ProtocolError`, never an exception of another library.
"""

from __future__ import annotations

from typing import NamedTuple

from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

from attnserve import _wire
from attnserve._errors import ProtocolError
from attnserve._operation import OPERATIONS, Operation
from attnserve.v1 import attention_pb2 as pb


class Response(NamedTuple):
    """A decoded response: its header, and the payloads that its tickets name."""

    operation: Operation
    """Which operation it is a response of."""
    message: pb.AttendResponse | pb.ApplyResponse
    payloads: list[memoryview]


class Reply(NamedTuple):
    """The reply to one call of a stream."""

    id: int
    result: Response | Status | ProtocolError
    """What came of the call; a ProtocolError if the reply does not say."""


class Replies(NamedTuple):
    """What a message of a stream holds."""

    replies: list[Reply]
    closing: bool
    """Whether the server wants the stream to be closed."""


def decode_replies(data: bytes) -> Replies:
    """The content of an `AttendStreamResponse`. ProtocolError if the bytes are none."""
    try:
        header, payloads = _wire.split(pb.AttendStreamResponse, data)
        message = pb.AttendStreamResponse.FromString(header)
    except DecodeError as error:
        raise ProtocolError(f"the server sent what is not a message of replies: {error}") from error
    replies = []
    for reply in message.replies:
        kind = reply.WhichOneof("result")
        result: Response | Status | ProtocolError
        if kind in OPERATIONS:
            result = Response(OPERATIONS[kind], getattr(reply, kind), payloads)
        elif kind == "error":
            result = reply.error
        else:
            result = ProtocolError("the server sent a reply with neither a result nor an error")
        replies.append(Reply(reply.id, result))
    return Replies(replies, message.closing)


def decode_response(operation: Operation, data: bytes) -> Response:
    """The response of an operation. ProtocolError if the bytes are none."""
    try:
        header, payloads = _wire.split(operation.response_type, data)
        return Response(operation, operation.response_type.FromString(header), payloads)
    except DecodeError as error:
        raise ProtocolError(f"the server sent what is not a response: {error}") from error
