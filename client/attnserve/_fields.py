"""The parts of protobuf's wire format needed to look at messages without parsing them: fields and varints.

In: bytes. Out: where the fields of a message lie; the prefix of a field's content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypeVar, cast

from google.protobuf.message import DecodeError

Buffer: TypeAlias = bytes | bytearray | memoryview
F = TypeVar("F", bound=Callable[..., Any])

VARINT: Final = 0
"""The wire type of integers, bools and enums."""
LENGTH_DELIMITED: Final = 2
"""The wire type of strings, bytes and messages."""
GROUP: Final = 3
"""The wire type with which a group begins."""
MANY_FIELDS: Final = 4096
"""A message with more fields, or with a group of more bytes, is not walked in Python."""


class ManyFieldsError(DecodeError):
    """Walking this message in Python would take too long."""


class LongGroupError(ManyFieldsError):
    """Because of a group, each byte of which may be a field."""


def cached(maxsize: int) -> Callable[[F], F]:
    """`lru_cache` that keeps a function's type: mypy takes message classes to be unhashable, as messages are."""
    return cast(Callable[[F], F], lru_cache(maxsize))


def varint(value: int) -> bytes:
    """The varint of a non-negative number."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field_tag(number: int, wire_type: int) -> bytes:
    """The tag before the content of a field."""
    return varint(number << 3 | wire_type)


def read_varint(buffer: Buffer, at: int) -> tuple[int, int]:
    """The varint at `at`, modulo 2**64, and the position behind it. IndexError if the buffer ends within it."""
    value = shift = 0
    while True:
        byte = buffer[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
        if shift > 63:
            raise DecodeError("a varint is longer than 10 bytes")


def fields(buffer: Buffer, at: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """The fields of the message between `at` and `end`: number, wire type, where the field begins, and where its
    content begins and ends. Raises DecodeError if the bytes are not a message.
    """
    try:
        while at < end:
            start = at
            tag = buffer[at]
            at += 1
            if tag >= 0x80:
                tag, at = read_varint(buffer, start)
            wire_type = tag & 7
            content = at
            if wire_type == LENGTH_DELIMITED:
                length = buffer[at]
                at += 1
                if length >= 0x80:
                    length, at = read_varint(buffer, at - 1)
                content = at
                at += length
            elif wire_type == 0:
                while buffer[at] >= 0x80:
                    at += 1
                    if at - content >= 10:
                        raise DecodeError("a varint is longer than 10 bytes")
                at += 1
            elif wire_type == 5:
                at += 4
            elif wire_type == 1:
                at += 8
            elif wire_type == GROUP:
                at = _skip_group(buffer, at, end, tag >> 3)
            else:
                raise DecodeError(f"wire type {wire_type} does not exist here")
            if at > end or tag < 8:
                raise DecodeError("the message is truncated or malformed")
            yield tag >> 3, wire_type, start, content, at
    except IndexError:
        raise DecodeError("the message is truncated") from None


def weight(wire_type: int, start: int, end: int) -> int:
    """How many fields a field counts as: a group, which contains others, as many as it has bytes."""
    return end - start if wire_type == GROUP else 1


def _skip_group(buffer: Buffer, at: int, end: int, number: int, depth: int = 0) -> int:
    """The position behind a group (an old encoding that only unknown fields can have) whose start tag was read."""
    if depth > 100:
        raise DecodeError("groups are nested too deeply")
    first = at
    while at < end:
        if at - first > MANY_FIELDS:
            raise LongGroupError("a group is too long")
        tag, behind = read_varint(buffer, at)
        if tag & 7 == 4:
            if tag >> 3 != number:
                raise DecodeError("a group ends that has not begun")
            return behind
        if tag & 7 == GROUP:
            at = _skip_group(buffer, behind, end, tag >> 3, depth + 1)
        else:
            at = next(fields(buffer, at, end))[4]
    raise DecodeError("a group does not end")


@cached(4096)
def field_prefix(number: int, length: int) -> bytes:
    """The tag and length before the content of a length-delimited field."""
    return field_tag(number, LENGTH_DELIMITED) + varint(length)
