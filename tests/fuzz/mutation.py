"""Mutations of serialised messages: arbitrarily corrupted bytes, and messages with invalid values in their fields.

In: a message type, its bytes, and a `random.Random`. Out: other bytes. The same seed gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from attnserve import _fields

MAX_BYTES: Final = 1 << 16
"""Mutations of mutations do not grow beyond this."""

WHOLE_NUMBERS: Final = (0, 1, 2, 3, 4, 5, 7, 8, 24, 127, 128, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1)
NUMBERS: Final = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS: Final = (
    "", "rotary", "additive", "gpt2", "bert", "decoder/relu/post", "layers.toml", "../layers.toml", "/etc/passwd",
    "nothing", "\0", "\n", "a" * 300, "\N{SNOWMAN}", "%s%n", "bert/float32",
)  # fmt: skip
BOUNDS: Final[dict[int, tuple[int, int]]] = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}


def mutated(random: Random, message_type: type[Message], data: bytes, other: bytes = b"") -> bytes:
    """The bytes after one to four mutations; parts of `other` may be mixed in."""
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        if random.random() < 0.7:
            data = _with_other_fields(random, message_type, data)
        else:
            data = random.choice(_OF_BYTES)(random, data, other)
    return data[:MAX_BYTES]


def is_message(message_type: type[Message], data: bytes) -> bool:
    """Whether stock protobuf parses the bytes as a message of the type."""
    try:
        message_type.FromString(data)
    except DecodeError:
        return False
    return True


def random_bytes(random: Random) -> bytes:
    """Purely random bytes."""
    return random.randbytes(random.choice((0, 1, 2, 3, 5, 8, 13, 40, 200)))


# Mutations that keep a message valid.


def _with_other_fields(random: Random, message_type: type[Message], data: bytes) -> bytes:
    try:
        message = message_type.FromString(data)
    except DecodeError:
        return random.choice(_OF_BYTES)(random, data, b"")
    owner = random.choice([message, *_inner(message)])
    fields = list(owner.DESCRIPTOR.fields)
    if not fields:
        return data + random_bytes(random)
    field = random.choice(fields)
    if random.random() < 0.15:
        owner.ClearField(field.name)
    elif field.is_repeated:
        _change_repeated(random, getattr(owner, field.name), field)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        given = getattr(owner, field.name)
        given.SetInParent()
        same = [inner for inner in _inner(message) if inner.DESCRIPTOR is given.DESCRIPTOR]
        if same and random.random() < 0.7:  # one field's value in another, such as a mask for a bias
            given.CopyFrom(random.choice(same))
    else:
        setattr(owner, field.name, _value(random, field, getattr(owner, field.name)))
    return message.SerializeToString()


def _inner(message: Message) -> Iterator[Any]:
    """Every message within a message."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else (value,):
                yield inner
                yield from _inner(inner)


def _change_repeated(random: Random, values: Any, field: FieldDescriptor) -> None:
    place = random.randrange(len(values)) if values else 0
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        if values and random.random() < 0.4:
            del values[place]
        else:
            added = values.add()
            if len(values) > 1:
                added.CopyFrom(values[0])
    elif values and random.random() < 0.3:
        del values[place]
    elif values and random.random() < 0.6:
        values[place] = _value(random, field, values[place])
    else:
        nothing = b"" if field.type == FieldDescriptor.TYPE_BYTES else 0
        values.append(_value(random, field, values[0] if values else nothing))


def _value(random: Random, field: FieldDescriptor, old: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_BOOL:
        return not old
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return random.choice(NUMBERS)
    if field.type == FieldDescriptor.TYPE_STRING:
        return random.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _other_payload(random, old)
    low, high = BOUNDS[field.type]
    if field.type == FieldDescriptor.TYPE_ENUM and random.random() < 0.7:
        return random.randrange(8)
    value = random.choice(
        (old - 1, old + 1, 2 * old, -old, random.choice(WHOLE_NUMBERS), -random.choice(WHOLE_NUMBERS))
    )
    return min(max(value, low), high)


def _other_payload(random: Random, old: bytes) -> bytes:
    """A payload of another length, or of the same length with special contents: NaN, infinities, large numbers."""
    choice = random.randrange(5)
    if choice == 0:
        return old[: random.randrange(len(old) + 1)]
    if choice == 1:
        return old + random_bytes(random)
    if choice == 2:
        return bytes(min(MAX_BYTES, random.choice(WHOLE_NUMBERS[:13])))
    if choice == 3 and old:
        return (random.choice((b"\xff", b"\x7f\x80", b"\0\0\x80\x7f", b"\x01")) * len(old))[: len(old)]
    return random.randbytes(len(old))


# Mutations whose bytes may or may not be a message.


def _flip(random: Random, data: bytes, other: bytes) -> bytes:
    if not data:
        return random_bytes(random)
    changed = bytearray(data)
    changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _overwrite(random: Random, data: bytes, other: bytes) -> bytes:
    place = random.randrange(len(data) + 1)
    new = random.choice((b"\0", b"\xff", b"\x7f", b"\x80", b"\xff" * 9 + b"\1", b"\x80" * 10, random_bytes(random)))
    return data[:place] + new + data[place + len(new) :]


def _insert(random: Random, data: bytes, other: bytes) -> bytes:
    place = random.randrange(len(data) + 1)
    return data[:place] + random_bytes(random) + data[place:]


def _truncate(random: Random, data: bytes, other: bytes) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _remove(random: Random, data: bytes, other: bytes) -> bytes:
    place = random.randrange(len(data) + 1)
    return data[:place] + data[place + random.choice((1, 1, 2, 4, 8, 64)) :]


def _repeat(random: Random, data: bytes, other: bytes) -> bytes:
    place = random.randrange(len(data) + 1)
    part = data[place : place + random.choice((1, 2, 8, 64, 4096))]
    return data[:place] + part * random.choice((2, 2, 3, 50)) + data[place + len(part) :]


def _splice(random: Random, data: bytes, other: bytes) -> bytes:
    return data[: random.randrange(len(data) + 1)] + other[random.randrange(len(other) + 1) :]


def _field(random: Random, data: bytes, other: bytes) -> bytes:
    """Adds a field with any number, wire type and length."""
    number = random.choice((1, 2, 3, 12, 15, 16, 17, 18, 25, 300, 2**29 - 1))
    tag = _fields.varint(number << 3 | random.randrange(8))
    length = random.choice((b"", _fields.varint(random.choice(WHOLE_NUMBERS))))
    place = random.choice((0, len(data), random.randrange(len(data) + 1)))
    return data[:place] + tag + length + random_bytes(random) + data[place:]


_OF_BYTES: Final = (_flip, _flip, _overwrite, _insert, _truncate, _remove, _repeat, _splice, _field)
