"""The wire codec against stock protobuf, in both directions: every message type, usual and unusual encodings.

The rule everywhere: `split` and a parse of the header accept what stock protobuf accepts and nothing else, and mean the
same by it; only DecodeError is ever raised. Each message is split several times, in several kinds of buffers, so that
`split` is tested both with headers that it remembers and with new ones.
"""

import tracemalloc
from typing import Any

import pytest
from codec import assert_same_meaning, canonical, tensors, with_payloads
from google.protobuf import unknown_fields, wrappers_pb2
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wire_messages import (
    END_GROUP,
    LENGTH_DELIMITED,
    MESSAGE_TYPES,
    MODULES,
    START_GROUP,
    VARINT,
    encoded,
    message_types,
    messages,
)

from attnserve import _fields, _wire
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2

more_examples = settings(max_examples=5 * settings().max_examples)  # these are quick


# What must hold: see `codec`.


@more_examples
@given(messages())
def test_reads_what_stock_protobuf_writes(message: Message) -> None:
    assert_same_meaning(type(message), message.SerializeToString())


@more_examples
@given(encoded())
@example((tensor_pb2.Tensor, b"\xfa\x80\x80\x80\x80\x00\x01x"))  # a tag of six bytes, which protobuf refuses
@example((tensor_pb2.Tensor, b"\x7a\x81\x80\x80\x80\x80\x80\x80\x80\x80\x00x"))  # a length of ten, which it accepts
@example((tensor_pb2.Tensor, b"\x7a\x81\x80\x80\x80\x80\x80\x80\x80\x80\x02x"))  # and one of more than 64 bits
@example((tensor_pb2.Tensor, b"\x7a\x81\x80\x80\x80\x10x"))  # a length of more than 32 bits
@example((tensor_pb2.Tensor, b"\x7a\x80\x80\x00"))
def test_reads_unusual_encodings_as_stock_protobuf_does(case: tuple[type[Message], bytes]) -> None:
    assert_same_meaning(*case)


@more_examples
@given(st.data())
def test_truncations_and_mutations(data: st.DataObject) -> None:
    message_type, message = data.draw(encoded())
    whole = bytearray(message)
    _wire.split(message_type, b"")
    for _ in range(data.draw(st.integers(1, 4))):
        if whole:
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    assert_same_meaning(message_type, bytes(whole))
    assert_same_meaning(message_type, bytes(whole[: data.draw(st.integers(0, len(whole)))]))


@more_examples
@given(message_types, st.binary(max_size=40))
def test_random_bytes(message_type: type[Message], data: bytes) -> None:
    assert_same_meaning(message_type, data)


@more_examples
@given(messages(pb.AttendRequest), st.data())
def test_what_is_remembered_changes_nothing(message: Message, data: st.DataObject) -> None:
    """A message that differs in one byte from one that `split` knows well is read as if nothing were known."""
    known = message.SerializeToString()
    for _ in range(3):
        _wire.split(pb.AttendRequest, known)
    for _ in range(4):
        other = bytearray(known)
        if other:
            other[data.draw(st.integers(0, len(other) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        assert_same_meaning(pb.AttendRequest, bytes(other))


@more_examples
@given(messages(), st.randoms(use_true_random=False))
def test_writes_what_stock_protobuf_reads(message: Message, random: Any) -> None:
    """As a sender does: protobuf writes a header with tickets, payloads in any order, and `join` adds the payloads."""
    payloads: list[bytes] = []
    with_tickets = type(message)()
    with_tickets.CopyFrom(message)
    owners = list(tensors(with_tickets))
    random.shuffle(owners)
    for tensor in owners:
        payloads.append(tensor.data)
        tensor.data = _wire.ticket(len(payloads) - 1, len(tensor.data))
    pieces, size = _wire.join(type(message), with_tickets.SerializeToString(), payloads)
    data = b"".join(pieces)
    assert len(data) == size
    assert canonical(type(message).FromString(data)) == canonical(message)


def test_every_message_type_is_covered() -> None:
    names = {message_type.DESCRIPTOR.full_name for message_type in MESSAGE_TYPES}
    declared = {f"attnserve.v1.{name}" for module in MODULES for name in module.DESCRIPTOR.message_types_by_name}
    assert names == declared
    assert {"attnserve.v1.AttendRequest", "attnserve.v1.Tensor", "attnserve.v1.CacheServiceAppendRequest"} <= names


def request(length: int, *, fill: int = 0) -> pb.AttendRequest:
    def tensor(value: int) -> tensor_pb2.Tensor:
        data = bytes([value % 256]) * length
        return tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[length // 4], data=data)

    return pb.AttendRequest(causal=True, query=tensor(fill), key=tensor(fill + 1), value=tensor(fill + 2))


def test_split_copies_no_payload() -> None:
    message = request(4 << 20)
    buffer = message.SerializeToString()
    for _ in range(3):  # never seen, seen once, remembered
        tracemalloc.start()
        header, payloads = _wire.split(pb.AttendRequest, buffer)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 64 << 10
        assert [bytes(payload) for payload in payloads] == [message.query.data, message.key.data, message.value.data]
        assert all(payload.obj is buffer for payload in payloads)
        assert len(header) < 100


def test_join_hands_out_the_very_payloads() -> None:
    header, payloads = _wire.split(pb.AttendRequest, request(4 << 20).SerializeToString())
    pieces, _ = _wire.join(pb.AttendRequest, header, payloads)
    assert [piece for piece in pieces if isinstance(piece, memoryview)] == payloads
    assert all(any(piece is payload for piece in pieces) for payload in payloads)
    assert sum(len(piece) for piece in pieces if isinstance(piece, bytes)) < 100


def test_equal_headers_are_one_object_once_remembered() -> None:
    """Wherever they lie: what is computed from a header can be cached by it, and its hash is computed once."""
    headers = []
    for i in range(6):
        data = request(64, fill=i).SerializeToString()
        headers.append(_wire.split(pb.AttendRequest, bytes(i) + data + b"x", i, i + len(data))[0])
    assert len(set(headers)) == 1
    assert headers[3] is headers[4] is headers[5]


def test_a_remembered_header_is_not_taken_for_another_one() -> None:
    """Same length, other fixed bytes: the dtype, the shape and where the payloads lie are part of what is compared."""
    base = request(64)
    for _ in range(3):
        _wire.split(pb.AttendRequest, base.SerializeToString())
    dtype, shape, extents = request(64), request(64), request(64)
    dtype.key.dtype = tensor_pb2.DATA_TYPE_INT64
    shape.value.shape[0] = 17
    extents.query.data, extents.key.data = bytes(63), bytes(65)
    for other in (dtype, shape, extents):
        assert len(other.SerializeToString()) == len(base.SerializeToString())
        assert_same_meaning(pb.AttendRequest, other.SerializeToString())


def test_a_remembered_header_is_compared_where_the_message_lies() -> None:
    """A known message at the start of the buffer says nothing about another one behind it."""
    known, other = request(64), request(64)
    other.key.dtype = tensor_pb2.DATA_TYPE_INT64
    buffer = known.SerializeToString() + other.SerializeToString()
    half = len(buffer) // 2
    for _ in range(3):
        _wire.split(pb.AttendRequest, buffer, 0, half)
    for at, expected in ((half, other), (0, known), (half, other)):
        header, payloads = _wire.split(pb.AttendRequest, buffer, at, at + half)
        assert with_payloads(pb.AttendRequest.FromString(header), payloads) == expected


def test_thousands_of_fields_are_left_to_protobuf() -> None:
    """One payload comes out where stock protobuf sees one, however often the field occurs."""
    one = b"\x7a\x01"
    data = b"".join(one + bytes([i % 256]) for i in range(50_000)) + b"\x98\x06\x01" * 50_000
    expected = tensor_pb2.Tensor.FromString(data)
    assert len(unknown_fields.UnknownFieldSet(expected)) == 50_000
    header, payloads = _wire.split(tensor_pb2.Tensor, data)
    assert [bytes(payload) for payload in payloads] == [expected.data]
    expected.DiscardUnknownFields()  # type: ignore[attr-defined]
    assert canonical(with_payloads(tensor_pb2.Tensor.FromString(header), payloads)) == canonical(expected)
    with pytest.raises(DecodeError):
        _wire.split(tensor_pb2.Tensor, data + b"\x7a")


def test_more_fields_than_any_message_needs_are_refused() -> None:
    """In whatever order: walking through as many as fit into a message would take seconds."""
    data = pb.AttendRequest(caches=[pb.CacheReference()] * (_wire.MOST_FIELDS + 1)).SerializeToString()
    with pytest.raises(DecodeError):
        _wire.split(pb.AttendRequest, data)
    header, _ = _wire.split(pb.AttendRequest, data[: 2 * 50_000])
    assert header == data[: 2 * 50_000]


def test_fields_are_counted_where_they_are() -> None:
    """In tensors, where an unpacked shape takes protobuf 8 bytes for each 2. In groups, and after them."""
    shape = b"\x10\x01" * (_wire.MOST_FIELDS + 1)
    query = pb.AttendRequest.DESCRIPTOR.fields_by_name["query"].number
    references = pb.AttendRequest(caches=[pb.CacheReference()] * _wire.MOST_FIELDS).SerializeToString()
    begin, end = _fields.varint(20 << 3 | START_GROUP), _fields.varint(20 << 3 | END_GROUP)
    short, long = (begin + b"\x08\x01" * fields + end for fields in (1000, 50_000))
    assert tensor_pb2.Tensor.FromString(shape[:4]).shape == [1, 1]
    for data in (_fields.field_prefix(query, len(shape)) + shape, short * 200, long + references, references + long):
        assert pb.AttendRequest.FromString(data) is not None
        with pytest.raises(_fields.ManyFieldsError, match=f"more than {_wire.MOST_FIELDS} fields"):
            _wire.split(pb.AttendRequest, data)
    assert _wire.split(pb.AttendRequest, short * 100)[0] == b""  # by protobuf, which knows none of them


def test_a_long_group_is_left_to_protobuf() -> None:
    begin, end = _fields.varint(20 << 3 | START_GROUP), _fields.varint(20 << 3 | END_GROUP)
    data = begin + b"\x08\x01" * 50_000 + end + b"\x7a\x02ab"
    header, payloads = _wire.split(tensor_pb2.Tensor, data)
    assert [bytes(payload) for payload in payloads] == [b"ab"]
    assert tensor_pb2.Tensor.FromString(header).data == _wire.ticket(0, 2)
    with pytest.raises(DecodeError):
        _wire.split(tensor_pb2.Tensor, data[: -len(end) - 4])


def test_an_endless_varint_is_refused_before_its_end() -> None:
    for begin in (b"\x08", b"", b"\x7a"):
        assert_same_meaning(tensor_pb2.Tensor, begin + b"\x80" * 100_000 + b"\x00")
        with pytest.raises(DecodeError, match="longer than 10 bytes"):
            list(_fields.fields(begin + b"\x80" * 11, 0, len(begin) + 11))


def test_many_calls_in_one_message() -> None:
    """More fields than are walked at once, all of them legitimate."""
    message = pb.AttendStreamRequest(calls=[pb.AttendStreamCall(id=i, attend=request(4, fill=i)) for i in range(1000)])
    header, payloads = _wire.split(pb.AttendStreamRequest, message.SerializeToString())
    assert len(payloads) == 3000
    assert with_payloads(pb.AttendStreamRequest.FromString(header), payloads) == message


@pytest.mark.parametrize("depth", [1, 50, 99, 100, 101, 102, 5000])
def test_nested_groups(depth: int) -> None:
    begin, end = _fields.varint(20 << 3 | START_GROUP), _fields.varint(20 << 3 | END_GROUP)
    assert_same_meaning(tensor_pb2.Tensor, begin * depth + end * depth + b"\x7a\x01x")
    assert_same_meaning(pb.AttendRequest, b"\x82\x01" + _fields.field_prefix(0, 0)[1:] + begin * depth + end * depth)


@given(st.integers(0, 2**64 - 1))
@example(0)
@example(127)
@example(128)
@example(2**63)
def test_varints_are_those_of_protobuf(value: int) -> None:
    encoded_value = wrappers_pb2.UInt64Value(value=value).SerializeToString()
    assert _fields.varint(value) == (encoded_value[1:] or b"\0")
    data = b"\x08" + _fields.varint(value)
    assert list(_fields.fields(data, 0, len(data))) == [(1, VARINT, 0, 1, len(data))]


@given(st.integers(0, 10**6), st.integers(0, 2**40))
def test_tickets(index: int, length: int) -> None:
    assert _wire.read_ticket(_wire.ticket(index, length)) == (index, length)


def test_no_ticket() -> None:
    assert _wire.read_ticket(b"") == (-1, 0)


@given(st.integers(1, 2**29 - 1), st.binary(max_size=300))
def test_fields_of_a_length_delimited_field(number: int, content: bytes) -> None:
    prefix = _fields.field_prefix(number, len(content))
    data = b"\x08\x01" + prefix + content + b"\x10\x02"
    begin = 2 + len(prefix)
    field = (number, LENGTH_DELIMITED, 2, begin, begin + len(content))
    assert list(_fields.fields(data, 2, begin + len(content))) == [field]
    for end in range(3, begin + len(content)):
        with pytest.raises(DecodeError):
            list(_fields.fields(data, 2, end))
