"""A server's replies as messages; the payloads of large ones stay in the buffer that they arrived in.

In: the bytes of a stream's message, or of a unary response. Out: responses, with the ids of their calls if they came on
a stream. Malformed input is a `ProtocolError`, never an exception of another library.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status

from attnserve import _fields, _wire
from attnserve._errors import ProtocolError
from attnserve._fields import Buffer
from attnserve._memory import keep_memory
from attnserve._requests.operation import OPERATIONS, Operation
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2

M = TypeVar("M", bound=Message)

_SMALL: Final = 1 << 16
"""Up to this size, protobuf parses a response with its payloads, which copies them twice. That takes less time than
finding them: the layout differs with every response, because of its timings.
"""

_JOINED: Final = 1 << 20
"""The same limit for a message of several replies, if these are small."""


class Response(NamedTuple):
    """A decoded response."""

    operation: Operation
    """The operation that it answers."""
    message: pb.AttendResponse | pb.ApplyResponse
    """The whole message, or its header."""
    payloads: list[memoryview] | None
    """The payloads that the header's tickets refer to; None if the message contains its payloads."""

    def elements(self, tensor: tensor_pb2.Tensor) -> Buffer:
        """The payload of a tensor of the message."""
        if self.payloads is None:
            return tensor.data
        index, _ = _wire.read_ticket(tensor.data)
        return self.payloads[index] if index >= 0 else b""


class Reply(NamedTuple):
    """The reply to one call of a stream."""

    id: int
    result: Response | Status | ProtocolError
    """The outcome of the call; a ProtocolError if the reply has none."""


class Replies(NamedTuple):
    """The content of one message of a stream."""

    replies: list[Reply]
    closing: bool
    """Whether the server asks for the stream to be closed."""


def decode_replies(data: bytes) -> Replies:
    """The content of an `AttendStreamResponse`. ProtocolError if the bytes are not one."""
    try:
        message, payloads = _read(pb.AttendStreamResponse, data, len(data) <= _JOINED and _begins_small(data))
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
    """The response of an operation. ProtocolError if the bytes are not one."""
    try:
        return Response(operation, *_read(operation.response_type, data, len(data) <= _SMALL))
    except DecodeError as error:
        raise ProtocolError(f"the server sent what is not a response: {error}") from error


def _read(message_type: type[M], data: bytes, small: bool) -> tuple[M, list[memoryview] | None]:
    """A message with its payloads (and None), or its header and its payloads."""
    keep_memory(len(data))
    if small:
        return message_type.FromString(data), None
    header, payloads = _wire.split(message_type, data)
    return message_type.FromString(header), payloads


def _begins_small(data: bytes) -> bool:
    """Whether the first reply in a message is small: replies in one message are usually alike."""
    if len(data) <= _SMALL:
        return True
    *_, content, behind = next(_fields.fields(data, 0, len(data)))
    return behind - content <= _SMALL
