"""Messages of every type, for property tests: as stock protobuf writes them, and in odd but legal encodings."""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from attnserve import _fields
from attnserve.v1 import attention_pb2, caches_pb2, layers_pb2, tensor_pb2

MODULES = (tensor_pb2, attention_pb2, caches_pb2, layers_pb2)
MESSAGE_TYPES: list[type[Message]] = [
    value
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, Message)
]
VARINT, FIXED64, LENGTH_DELIMITED, START_GROUP, END_GROUP, FIXED32 = range(6)
WIRE_TYPES = {
    FieldDescriptor.TYPE_DOUBLE: FIXED64,
    FieldDescriptor.TYPE_FIXED64: FIXED64,
    FieldDescriptor.TYPE_FLOAT: FIXED32,
    FieldDescriptor.TYPE_STRING: LENGTH_DELIMITED,
    FieldDescriptor.TYPE_BYTES: LENGTH_DELIMITED,
    FieldDescriptor.TYPE_MESSAGE: LENGTH_DELIMITED,
}
message_types = st.sampled_from(MESSAGE_TYPES)
contents = st.one_of(st.binary(max_size=6), st.binary(min_size=120, max_size=140))


# Messages as stock protobuf builds and writes them.

SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_FIXED64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SINT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.text(max_size=5),
    FieldDescriptor.TYPE_BYTES: contents,
    FieldDescriptor.TYPE_ENUM: st.integers(-1, 7),
}


@st.composite
def messages(draw: st.DrawFn, message_type: type[Message] | None = None) -> Message:
    message = (message_type or draw(message_types))()
    fill(draw, message)
    return message


def fill(draw: st.DrawFn, message: Message) -> None:
    for field in message.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        if field.is_repeated:
            values = getattr(message, field.name)
            for _ in range(draw(st.integers(0, 3))):
                if field.type == FieldDescriptor.TYPE_MESSAGE:
                    fill(draw, values.add())
                else:
                    values.append(draw(SCALARS[field.type]))
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(message, field.name).SetInParent()
            fill(draw, getattr(message, field.name))
        else:
            setattr(message, field.name, draw(SCALARS[field.type]))


# Messages in odd but legal encodings.


def overlong(value: int, extra: int) -> bytes:
    """A varint with more bytes than it needs; 10 at most, the most that a reader accepts anywhere."""
    canonical = _fields.varint(value)
    extra = min(extra, 10 - len(canonical))
    if not extra:
        return canonical
    return canonical[:-1] + bytes((canonical[-1] | 0x80, *[0x80] * (extra - 1), 0))


extras = st.sampled_from([0] * 12 + [1, 2, 3, 4, 8])


@st.composite
def encodings(draw: st.DrawFn, descriptor: Any) -> bytes:
    """The fields of a message type in any order and number, each possibly in an odd way."""
    pieces: list[bytes] = []
    for _ in range(draw(st.integers(0, 7))):
        known = bool(descriptor.fields) and draw(st.integers(0, 5)) > 0
        if known:
            field = draw(st.sampled_from(list(descriptor.fields)))
            number, wire_type = field.number, WIRE_TYPES.get(field.type, VARINT)
            if field.is_repeated and wire_type != LENGTH_DELIMITED and draw(st.booleans()):
                wire_type = LENGTH_DELIMITED
            if draw(st.integers(0, 15)) == 0:
                wire_type = draw(st.sampled_from((VARINT, FIXED64, LENGTH_DELIMITED, START_GROUP, FIXED32)))
        else:
            field = None
            number = draw(st.sampled_from((12, 15, 16, 300, 2**29 - 1)))
            wire_type = draw(st.sampled_from((VARINT, FIXED64, LENGTH_DELIMITED, START_GROUP, FIXED32)))
        pieces.append(overlong(number << 3 | wire_type, draw(extras)))
        match wire_type:
            case 0:
                pieces.append(overlong(draw(st.integers(0, 2**64 - 1) | st.integers(0, 9)), draw(extras)))
            case 1:
                pieces.append(draw(st.binary(min_size=8, max_size=8)))
            case 5:
                pieces.append(draw(st.binary(min_size=4, max_size=4)))
            case 3:
                inner = descriptor if field is None or field.message_type is None else field.message_type
                pieces += (draw(encodings(inner)), _fields.varint(number << 3 | END_GROUP))
            case 2:
                is_message = field is not None and field.message_type is not None
                content = draw(encodings(field.message_type) if is_message else contents)
                pieces += (overlong(len(content), draw(extras)), content)
    return b"".join(pieces)


@st.composite
def encoded(draw: st.DrawFn) -> tuple[type[Message], bytes]:
    message_type = draw(message_types)
    return message_type, draw(encodings(message_type.DESCRIPTOR))
