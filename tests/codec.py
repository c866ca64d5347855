"""What must hold for the wire codec, whatever the bytes: it accepts what stock protobuf accepts, and reads the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from attnserve import _fields, _wire
from attnserve.v1 import tensor_pb2


def tensors(message: Message) -> Iterator[tensor_pb2.Tensor]:
    """Every tensor anywhere within a message."""
    if isinstance(message, tensor_pb2.Tensor):
        yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else (value,):
                yield from tensors(inner)


def with_payloads(message: Message, payloads: list[memoryview]) -> Message:
    """A parsed header with each ticket replaced by the payload it stands for."""
    for tensor in tensors(message):
        index, length = _wire.read_ticket(tensor.data)
        if index >= 0:
            assert len(payloads[index]) == length
            tensor.data = bytes(payloads[index])
        else:
            assert tensor.data == b""
    return message


def canonical(message: Message) -> bytes:
    """Equal for equal messages, NaN included, which `==` would call different."""
    return message.SerializeToString(deterministic=True)


def stock_parse(message_type: type[Message], data: bytes) -> Message | None:
    try:
        return message_type.FromString(data)
    except DecodeError:
        return None


def codec_parse(message_type: type[Message], buffer: Any, at: int, end: int) -> Message | None:
    """The message as `split` reads it, having checked that payloads are views of the buffer and `join` restores it."""
    try:
        header, payloads = _wire.split(message_type, buffer, at, end)
        message = message_type.FromString(header)
    except DecodeError:
        return None
    owner = buffer.obj if isinstance(buffer, memoryview) else buffer
    assert all(payload.obj is owner for payload in payloads) or may_have_many_fields(end - at)
    pieces, size = _wire.join(message_type, header, payloads)
    joined = b"".join(pieces)
    assert len(joined) == size
    message = with_payloads(message, payloads)
    assert canonical(message_type.FromString(joined)) == canonical(message)
    return message


def may_have_many_fields(length: int) -> bool:
    """Whether a message is long enough to have so many fields that the codec leaves it to protobuf."""
    return length > _fields.MANY_FIELDS  # a group counts by its bytes


def assert_same_meaning(message_type: type[Message], data: bytes) -> None:
    """Codec and stock protobuf accept the same bytes and read the same from them, wherever the bytes lie."""
    expected = stock_parse(message_type, data)
    surrounded = b"\xff\xfa\x80" + data + b"\x7a\x05"
    places = (
        (data, 0),
        (surrounded, 3),
        (bytearray(surrounded), 3),
        (memoryview(surrounded), 3),
        (data, 0),
    )
    for buffer, at in places:
        found = codec_parse(message_type, buffer, at, at + len(data))
        assert (found is None) == (expected is None)
        if found is not None and expected is not None and canonical(found) != canonical(expected):
            assert may_have_many_fields(len(data))  # the codec drops unknown fields of such a message
            expected.DiscardUnknownFields()  # type: ignore[attr-defined]
            assert canonical(found) == canonical(expected)
