"""The calls in a message of a stream: parsed as protobuf parses them, and bounded."""

from __future__ import annotations

import messages
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from attnserve import _fields
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.errors import InvalidRequest
from attnserve_server.rpc.calls import read_message

durations = st.builds(Duration, seconds=st.integers(-5, 5), nanos=st.integers(-999_999_999, 999_999_999))
attends = st.builds(messages.random_attend, st.integers(0, 5), st.integers(0, 2))
applies = st.builds(lambda name, causal: pb.ApplyRequest(layer=name, causal=causal), st.text(), st.booleans())
drawn_calls = st.builds(
    lambda call_id, operation, timeout: pb.AttendStreamCall(id=call_id, timeout=timeout, **operation),
    st.integers(0, 2**64 - 1),
    st.just({}) | attends.map(lambda attend: {"attend": attend}) | applies.map(lambda apply: {"apply": apply}),
    st.none() | durations,
)
drawn_messages = st.builds(
    lambda cancel, given: pb.AttendStreamRequest(cancel=cancel, calls=given),
    st.lists(st.integers(0, 2**64 - 1), max_size=3),
    st.lists(drawn_calls, max_size=4),
)


@given(drawn_messages, drawn_messages)
def test_a_message_is_read_as_protobuf_reads_it(one: pb.AttendStreamRequest, other: pb.AttendStreamRequest) -> None:
    serialised = one.SerializeToString() + b"\xfa\x3f\x01\x00" + other.SerializeToString()  # with an unknown field
    expected = pb.AttendStreamRequest.FromString(serialised)
    cancelled, read = read_message(serialised, 100)
    assert cancelled == list(expected.cancel)
    assert len(read) == len(expected.calls)
    for found, wanted in zip(read, expected.calls, strict=True):
        assert found.id == wanted.id
        assert (found.timeout is not None) == wanted.HasField("timeout")
        if found.timeout is not None:
            assert found.timeout == pytest.approx(wanted.timeout.seconds + wanted.timeout.nanos / 1e9, abs=1e-12)
        assert found.operation == wanted.WhichOneof("operation")
        if found.operation is not None:
            buffer, at, end = found.request
            asked = getattr(wanted, found.operation)
            assert type(asked).FromString(buffer[at:end]) == asked


def test_what_is_read_at_a_glance_is_read_alike_field_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with a call that looks like most: truncated, a bit flipped, doubled, a second id in front."""
    whole = pb.AttendStreamCall(id=300, timeout=Duration(seconds=2), apply=pb.ApplyRequest(layer="a"))
    body = whole.SerializeToString()
    bodies = [body[:cut] for cut in range(len(body) + 1)] + [body + body, b"\x08\x05" + body, body[3:]]
    for place in range(len(body)):
        bodies += [body[:place] + bytes((body[place] ^ 1 << bit,)) + body[place + 1 :] for bit in range(8)]

    def read() -> list[tuple[object, ...]]:
        found = []
        for each in bodies:
            message = (b"\x12" + _fields.varint(len(each)) + each) + (b"\x12" + _fields.varint(len(body)) + body)
            for call in read_message(message, 2)[1]:
                buffer, at, end = call.request
                found.append((call.id, call.timeout, call.operation, buffer[at:end], type(call.error)))
        return found

    at_a_glance = read()
    monkeypatch.setattr("attnserve_server.rpc.calls._plain_call", lambda *_: None)
    assert at_a_glance == read()
    assert at_a_glance.count((300, 2.0, "apply", b"\x0a\x01a", type(None))) > len(bodies)


def test_of_two_operations_the_last_counts() -> None:
    first, last = pb.AttendStreamCall(attend=messages.random_attend(0)), pb.AttendStreamCall(id=3)
    last.apply.layer = "a"
    again = pb.AttendStreamCall(apply=pb.ApplyRequest(causal=True))
    body = first.SerializeToString() + last.SerializeToString() + again.SerializeToString()
    expected = pb.AttendStreamCall.FromString(body)
    _, (call,) = read_message(b"\x12" + _fields.varint(len(body)) + body, 1)
    assert (call.id, call.operation) == (3, expected.WhichOneof("operation"))
    buffer, at, end = call.request
    assert pb.ApplyRequest.FromString(buffer[at:end]) == expected.apply


def test_a_message_has_a_bounded_number_of_calls() -> None:
    few = pb.AttendStreamRequest(calls=[pb.AttendStreamCall(id=number) for number in range(3)], cancel=[1, 2, 3])
    _, read = read_message(few.SerializeToString(), 3)
    assert [call.id for call in read] == [0, 1, 2]
    for calls_given, cancel, field in ((3, 0, "calls"), (0, 30, "cancel")):
        many = pb.AttendStreamRequest(calls=few.calls[:calls_given], cancel=range(cancel))
        with pytest.raises(InvalidRequest) as caught:
            read_message(many.SerializeToString(), 2)
        assert (caught.value.field, caught.value.reason) == (field, "LIMIT_EXCEEDED")


@pytest.mark.parametrize("packed", [True, False])
def test_ids_to_cancel_are_counted_however_they_are_given(packed: bool) -> None:
    def message(count: int) -> bytes:
        longest = 2**64 - 1
        if packed:
            return pb.AttendStreamRequest(cancel=[longest] * count).SerializeToString()
        return (b"\x08" + _fields.varint(longest)) * count

    assert read_message(message(1024), 1024)[0] == [2**64 - 1] * 1024
    packs = pb.AttendStreamRequest(cancel=[1] * 600).SerializeToString()
    for many in (message(1025), packs + packs, packs * 100, b"\xfb\x3f" + b"\x08\x01" * 2000 + b"\xfc\x3f"):
        with pytest.raises(InvalidRequest) as caught:
            read_message(many * 4, 1024)
        assert (caught.value.field, caught.value.reason) == ("cancel", "LIMIT_EXCEEDED")


def test_a_call_with_a_long_group_is_said_to_be_malformed() -> None:
    """It has few fields, of which one may have any number: that is no bound which the server states."""
    body = b"\x08\x07\x7b" + b"\x08\x01" * 2100 + b"\x7c"
    _, (call,) = read_message(b"\x12" + _fields.varint(len(body)) + body, 1)
    assert call.id == 7
    assert isinstance(call.error, InvalidRequest)
    assert (call.error.reason, call.error.metadata) == ("MALFORMED_MESSAGE", {"field": "calls"})
    assert "a group is too long" in str(call.error)


@pytest.mark.parametrize("field", [b"\x78\x01", b"\x7a\x00", b"\x7b" + b"\x08\x01" * 50 + b"\x7c"])
def test_a_call_of_too_many_fields_is_its_own_error(field: bytes) -> None:
    """Unknown fields, requests in parts, and groups: parsing all that fit into a message would take minutes."""
    others = pb.AttendStreamCall(id=1, attend=pb.AttendRequest(causal=True))
    body = b"\x08\x07" + field * 64
    message = b"".join(
        b"\x12" + _fields.varint(len(each)) + each
        for each in (others.SerializeToString(), body, others.SerializeToString())
    )
    pb.AttendStreamRequest.FromString(message)
    _, read = read_message(message, 3)
    assert [(call.id, call.error is None) for call in read] == [(1, True), (7, False), (1, True)]
    assert isinstance(read[1].error, InvalidRequest)
    assert (read[1].error.field, read[1].error.reason) == ("calls", "LIMIT_EXCEEDED")
    late = field * 64 + b"\x08\x07"
    _, (call,) = read_message(b"\x12" + _fields.varint(len(late)) + late, 1)
    assert (call.id, isinstance(call.error, InvalidRequest)) == (0, True)  # no id is looked for behind so many


def test_a_request_in_parts_is_the_merger_of_them() -> None:
    """A message field given twice means the merger of both, in order."""
    request = messages.random_attend(0)
    head, tail = pb.AttendRequest(query=request.query, causal=True), pb.AttendRequest(key=request.key)
    parts = [pb.AttendStreamCall(id=7), pb.AttendStreamCall(attend=head), pb.AttendStreamCall(attend=tail)]
    body = b"".join(part.SerializeToString() for part in parts)
    message = pb.AttendStreamRequest.FromString(b"")
    message.calls.add().ParseFromString(body)
    envelope = b"\x12" + bytes([len(body) & 0x7F | 0x80, len(body) >> 7]) + body
    _, (call,) = read_message(envelope, 100)
    assert (call.id, call.timeout, call.operation, call.error) == (7, None, "attend", None)
    buffer, at, end = call.request
    assert pb.AttendRequest.FromString(buffer[at:end]) == message.calls[0].attend
