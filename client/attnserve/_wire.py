"""The wire codec: messages to bytes and back, without copying the payloads. SDK and server share it.

A *payload* is the content of a `Tensor.data` field; payloads are nearly all of a message's bytes. A *header* is the
same message with a *ticket* in place of each payload: a few bytes with the payload's index and length. protobuf parses
and serialises headers; payloads never pass through it.

    split(AttendRequest, buffer)   ->  header, [payload, ...]      payloads are views of the buffer
    join(AttendRequest, header, [payload, ...])  ->  pieces        concatenated, they are the message

Because a ticket sits where its payload was, protobuf's own rules (the last of a repeated singular field wins, messages
given twice are merged, oneofs) choose the right payload. Because a ticket holds the payload's length, equal headers
mean requests that are equal except for the contents: what is computed from a header can be cached by it.

The bytes are those of stock protobuf, in both directions. Unusual input (groups, overlong varints, thousands of fields)
is left to stock protobuf to accept or refuse. In one direction a payload is copied four times: once when `b"".join`
assembles the message, three times in gRPC (into a slice, out of a slice, joining slices), and never here. Stock
protobuf with `tobytes` makes nine copies. The receiver's payloads are views of the buffer with no particular alignment.

Callers send the same header again and again. `split` remembers the last ones of each length, and then finds header and
payloads with a few byte comparisons instead of a walk through the fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, cast, overload

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from attnserve._fields import (
    LENGTH_DELIMITED,
    MANY_FIELDS,
    Buffer,
    ManyFieldsError,
    cached,
    field_prefix,
    field_tag,
    fields,
    read_varint,
    varint,
    weight,
)
from attnserve.v1 import tensor_pb2

_REMEMBERED_HEADERS: Final = 4  # per message type and length
_REMEMBERED_LENGTH: Final = 1024  # longer headers are not remembered, or callers could fill memory with them

MOST_FIELDS: Final = 1 << 18
"""A message with more is refused: each field takes protobuf 60 bytes, and a walk 0.3 us."""


class _Schema:
    """Where a message type contains payloads: field number -> its tag and the schema within; None for a payload."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields: dict[int, tuple[bytes, _Schema | None]] = {}


def _schema_of(descriptor: Descriptor, known: dict[str, _Schema | None]) -> _Schema | None:
    """The schema of a message type; None if it cannot contain a payload."""
    if descriptor.full_name in known:
        return known[descriptor.full_name]
    schema = _Schema()
    known[descriptor.full_name] = None  # no message type of ours contains itself
    for field in descriptor.fields:
        tag = field_tag(field.number, LENGTH_DELIMITED)
        if field.containing_type is tensor_pb2.Tensor.DESCRIPTOR and field.name == "data":
            schema.fields[field.number] = tag, None
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = _schema_of(field.message_type, known)
            if inner is not None:
                schema.fields[field.number] = tag, inner
    known[descriptor.full_name] = schema if schema.fields else None
    return known[descriptor.full_name]


@cached(64)
def _schema(message_type: type[Message]) -> _Schema:
    return _schema_of(cast(Descriptor, message_type.DESCRIPTOR), {}) or _Schema()


def ticket(index: int, length: int) -> bytes:
    """The ticket for payload number `index`, of `length` bytes."""
    return varint(index) + varint(length)


def read_ticket(data: bytes) -> tuple[int, int]:
    """The index and the length that a ticket holds; (-1, 0) for the empty data of a tensor without a payload."""
    if not data:
        return -1, 0
    if len(data) == 2:
        return data[0], data[1]
    index, at = read_varint(data, 0)
    return index, read_varint(data, at)[0]


def split(
    message_type: type[Message], buffer: Buffer, at: int = 0, end: int | None = None
) -> tuple[bytes, list[memoryview]]:
    """The header of the message in a part of a buffer, and its payloads as views of the buffer.

    (If a message has thousands of fields, the payloads are views of a copy.) Raises DecodeError if the bytes that lead
    to the payloads are malformed, or have more fields than any message needs; parsing the header checks the rest.
    """
    header, payloads = find(message_type, buffer, at, end)
    return header, list(payloads)


class Payloads(Sequence[memoryview]):
    """The payloads of a message that starts at `at` in a buffer: views of the buffer, made when asked for. `places` has
    the start and end of each, relative to `at`; messages with the same layout share it.
    """

    __slots__ = ("at", "buffer", "places")

    def __init__(self, buffer: Buffer, at: int, places: Sequence[tuple[int, int]]) -> None:
        self.buffer = buffer
        self.at = at
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...

    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...

    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self.places)))]
        start, behind = self.places[index]
        return memoryview(self.buffer)[self.at + start : self.at + behind]


def find(message_type: type[Message], buffer: Buffer, at: int = 0, end: int | None = None) -> tuple[bytes, Payloads]:
    """Like `split`, for callers that need the places of payloads rather than views of them."""
    if end is None:
        end = len(buffer)
    memory = _memory(message_type, end - at)
    for layout in memory.layouts:
        for start, behind, fixed in layout.fixed:
            if buffer[at + start : at + behind] != fixed:
                break
        else:
            return layout.header, Payloads(buffer, at, layout.payloads)
    walk = _Walk(buffer, MANY_FIELDS)
    try:
        header = walk.header(_schema(message_type), at, end)
    except ManyFieldsError:
        if _has_too_many_fields(_schema(message_type), buffer, at, end):
            raise ManyFieldsError(f"more than {MOST_FIELDS} fields") from None
        buffer = _in_order(message_type, buffer[at:end])
        walk = _Walk(buffer, MOST_FIELDS)
        header = walk.header(_schema(message_type), 0, len(buffer))
    else:
        if header == memory.last:
            memory.layouts.insert(0, _Layout(header, buffer, at, end, walk.payloads))
            del memory.layouts[_REMEMBERED_HEADERS:]
        elif len(header) <= _REMEMBERED_LENGTH:
            memory.last = header
    return header, Payloads(buffer, 0, walk.payloads)


class _Layout:
    """A header seen before, and where its bytes and the payloads were, relative to the start of the message.

    Another message of the same type and length, with the same bytes in these places, has the same header: the bytes
    include all tags and lengths, so that a walk through its fields would take the same path.
    """

    __slots__ = ("fixed", "header", "payloads")

    def __init__(self, header: bytes, buffer: Buffer, at: int, end: int, payloads: list[tuple[int, int]]) -> None:
        self.header = header
        self.payloads = tuple((start - at, behind - at) for start, behind in payloads)
        edges = [at, *(edge for extent in payloads for edge in extent), end]
        self.fixed = tuple(
            (start - at, behind - at, bytes(buffer[start:behind]))
            for start, behind in zip(edges[::2], edges[1::2], strict=True)
            if start < behind
        )


class _Memory:
    """The layouts of messages of one type and length, the latest first, and the last header without a layout.

    A header gets a layout when it comes twice: those of replies, whose timings differ each time, never do. Threads may
    share a memory: a search during a change may miss a layout, which only costs a walk.
    """

    __slots__ = ("last", "layouts")

    def __init__(self) -> None:
        self.layouts: list[_Layout] = []
        self.last: bytes | None = None


@cached(256)
def _memory(message_type: type[Message], length: int) -> _Memory:
    return _Memory()


class _Walk:
    """A walk through a message that collects the places of its payloads, and gives up if there are too many fields."""

    __slots__ = ("buffer", "fields_left", "payloads")

    def __init__(self, buffer: Buffer, fields_left: int) -> None:
        self.buffer = buffer
        self.fields_left = fields_left
        self.payloads: list[tuple[int, int]] = []

    def header(self, schema: _Schema, at: int, end: int) -> bytes:
        """The header of the message of this schema from `at` to `end`: its bytes with tickets for its payloads."""
        buffer = self.buffer
        inner = schema.fields
        pieces: list[Buffer] = []
        kept = at  # from here on, bytes are copied unchanged
        walked = 0
        for number, wire_type, start, content, behind in fields(buffer, at, end):
            walked += weight(wire_type, start, behind)
            if walked > self.fields_left:
                raise ManyFieldsError("a message has too many fields")
            if number not in inner or wire_type != LENGTH_DELIMITED:
                continue
            tag, field_schema = inner[number]
            length = behind - content
            if field_schema is None:
                replacement = ticket(len(self.payloads), length)
                self.payloads.append((content, behind))
            else:
                replacement = self.header(field_schema, content, behind)
            if content - start == len(tag) + ((length.bit_length() + 6) // 7 or 1):
                prefix = tag + varint(len(replacement))
            else:
                prefix = _overlong_prefix(buffer, start, content, len(replacement))
            pieces += (buffer[kept:start], prefix, replacement)
            kept = behind
        self.fields_left -= walked
        pieces.append(buffer[kept:end])
        return b"".join(pieces)


def _overlong_prefix(buffer: Buffer, start: int, content: int, length: int) -> bytes:
    """A field's tag as it is in the buffer, and a length as overlong as the one there, for protobuf to judge."""
    _, at = read_varint(buffer, start)
    canonical = varint(length)
    missing = content - at - len(canonical)
    if missing <= 0:
        return bytes(buffer[start:at]) + canonical
    return bytes(buffer[start:at]) + canonical[:-1] + bytes((canonical[-1] | 0x80, *[0x80] * (missing - 1), 0))


def _has_too_many_fields(schema: _Schema, buffer: Buffer, at: int, end: int) -> bool:
    """Whether a message has more fields than any message needs, those of its tensors included."""
    count = 0
    try:
        for each in _weights(schema, buffer, at, end):
            count += each
            if count > MOST_FIELDS:
                return True
    except ManyFieldsError:  # a long group is not walked: every byte in it and behind it may be a field
        return end - at > MOST_FIELDS
    return False


def _weights(schema: _Schema, buffer: Buffer, at: int, end: int) -> Iterator[int]:
    """How many fields each field counts as, in a message of this schema and in those within it."""
    for number, wire_type, start, content, behind in fields(buffer, at, end):
        yield weight(wire_type, start, behind)
        _, inner = schema.fields.get(number, (b"", None))
        if inner is not None and wire_type == LENGTH_DELIMITED:
            yield from _weights(inner, buffer, content, behind)


def _in_order(message_type: type[Message], message: Buffer) -> bytes:
    """The message as protobuf would have written it: each field once, without unknown fields."""
    parsed = message_type.FromString(bytes(message))
    parsed.DiscardUnknownFields()  # type: ignore[attr-defined]  # the stubs do not know it
    return parsed.SerializeToString()


@cached(1024)
def _template(message_type: type[Message], header: bytes) -> tuple[tuple[bytes | int, ...], int]:
    """A header split into bytes to send as they are and payload indices; and the length of the whole message."""
    pieces: list[bytes | int] = []
    size = _expand(_schema(message_type), header, 0, len(header), pieces)
    merged: list[bytes | int] = []
    for piece in pieces:
        if isinstance(piece, bytes) and merged and isinstance(last := merged[-1], bytes):
            merged[-1] = last + piece
        else:
            merged.append(piece)
    return tuple(merged), size


def _expand(schema: _Schema, header: bytes, at: int, end: int, pieces: list[bytes | int]) -> int:
    """Splits a part of a header, with the lengths of the real payloads; returns the length of the resulting part."""
    size = 0
    for number, wire_type, start, content, behind in fields(header, at, end):
        if number not in schema.fields or wire_type != LENGTH_DELIMITED:
            pieces.append(header[start:behind])
            size += behind - start
            continue
        _, field_schema = schema.fields[number]
        inside: list[bytes | int] = []
        if field_schema is None:
            index, length = read_ticket(header[content:behind])
            if index >= 0:
                inside.append(index)
        else:
            length = _expand(field_schema, header, content, behind, inside)
        prefix = field_prefix(number, length)
        pieces.append(prefix)
        pieces += inside
        size += len(prefix) + length
    return size


def join(message_type: type[Message], header: bytes, payloads: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """The pieces of the message made from a header and its payloads, and their total length.

    The header is a serialised message with tickets for payloads; payload i must have the length in its ticket.
    """
    template, size = _template(message_type, header)
    return [payloads[piece] if isinstance(piece, int) else piece for piece in template], size
