"""Whole messages by the library: it reads those it accepts, and answers them, as the ordinary path does."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import messages
import numpy as np
import pytest
from layouts import learn
from random_messages import (
    MOST,
    another_step,
    assert_reads_as_others_do,
    assert_reads_steps_as_others_do,
    known_requests,
    known_steps,
    random_message,
    spoilt,
    with_other_contents,
)
from stepping import Stepping, step

from attnserve import _wire
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.native import library
from attnserve_server.native.layouts import MOST_SEQUENCES
from attnserve_server.native.messages import MOST_LAYOUTS, MOST_REQUESTS, TAGS, Messages

pytestmark = pytest.mark.skipif(not library.available(), reason="no native kernel is here")


@pytest.fixture(scope="module", params=library.available())
def device(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    device = CpuDevice(2, 0, library.best(library._symbol(request.param)))
    yield device
    device.close()


@pytest.fixture
def native(device: CpuDevice) -> Messages:
    assert device.native is not None
    return Messages(device.native.library, device._threads_for)


def test_the_tags_that_the_library_looks_for_take_a_byte_each() -> None:
    assert all(tag < 128 for tag in TAGS)


def test_messages_of_known_layouts_are_answered_as_by_the_device(native: Messages, device: CpuDevice) -> None:
    random = Random(1)
    requests = known_requests(random, native, 12)
    for count in (1, 1, 2, 3, 8, MOST):
        message = random_message(random, requests, count).SerializeToString()
        assert assert_reads_as_others_do(native, device, message) == count
    assert native.read_message(random_message(random, requests, MOST + 1).SerializeToString(), MOST).requests == 0


def test_what_is_spoilt_is_read_as_everybody_reads_it_or_not_at_all(native: Messages, device: CpuDevice) -> None:
    random, found = Random(2), set()
    requests = known_requests(random, native, 6)
    for _ in range(1500):
        message = random_message(random, requests, random.choice((1, 2, 3))).SerializeToString()
        found.add(assert_reads_as_others_do(native, device, spoilt(random, message)))
    assert {-1, 0, 1, 2, 3} <= found


def test_a_unary_request_is_answered_without_an_envelope(native: Messages, device: CpuDevice) -> None:
    random = Random(3)
    for request in known_requests(random, native, 8):
        message = with_other_contents(random, request).SerializeToString()
        asked = native.read_request(message)
        assert asked.requests == 1
        native.compute(asked.effort, 0, 0, 0)
        answer = pb.AttendResponse.FromString(native.write())
        (result,) = device.run([messages.read_request(message)]).results
        assert answer.output.data == bytes(result.output)
        assert answer.lse.data == (b"" if result.lse is None else bytes(result.lse))
        assert answer.batch_size == 1
        assert native.read_request(message[:-1]).requests == -1
        assert native.read_request(message + b"\x08\x01").requests == -1


def test_references_to_caches_are_read_as_everybody_reads_them_or_not_at_all(
    native: Messages, device: CpuDevice
) -> None:
    random, caches, found = Random(6), Stepping(device, native), set()
    requests = known_steps(random, caches, 8)
    for number in range(1500):
        message = random_message(random, requests, random.choice((1, 1, 2, 3)), another_step).SerializeToString()
        message = spoilt(random, message) if number % 3 else message
        found.add(assert_reads_steps_as_others_do(caches, message))
    assert {-1, 0, 1, 2, 3} <= found
    caches.assert_at_rest()


@pytest.mark.parametrize(
    ("field", "reference"),
    [
        ("a name of nothing", b"\x0a\x00"),
        ("no name", b"\x10\x01"),
        ("a layer of 0 that is said", b"\x0a\x01x\x10\x00"),
        ("a name behind the layer", b"\x10\x01\x0a\x01x"),
        ("a field that nobody knows", b"\x0a\x01x\x28\x01"),
        ("a name longer than all", b"\x0a\x7fx"),
        ("a piece of an append's id", b"\x0a\x01x\x21\x01\x02"),
        ("an append's id of 0 that is said", b"\x0a\x01x\x21" + bytes(8)),
    ],
)
def test_references_that_are_unusual_are_for_others(
    native: Messages, device: CpuDevice, field: str, reference: bytes
) -> None:
    """Each takes as many bytes as a usual one, so that the layout is known."""
    caches = Stepping(device, native)
    request = step(caches.create(3))
    request.caches[0].ClearField("name")
    rest = request.SerializeToString()[2:]
    assert request.SerializeToString()[:2] == b"\x62\x00"
    name = "x" * len(reference[2:])
    usual = b"\x62" + bytes([len(reference)]) + b"\x0a" + bytes([len(name)]) + name.encode() + rest
    unusual = b"\x62" + bytes([len(reference)]) + reference + rest
    request.caches[0].name = caches.create(3).name
    (layout,) = [caches.fast_path.layout_of(caches.read(request.SerializeToString()))]
    assert layout is not None
    _, payloads = _wire.find(pb.AttendRequest, usual)
    assert native.learn(field, layout, payloads, 0, len(usual))
    assert native.read_request(usual).requests == (1 if name else 0)
    assert native.read_request(unusual).requests == 0


@pytest.mark.parametrize(
    "change",
    [
        {"cancel": [7]},
        {"calls": [pb.AttendStreamCall(id=1)]},
        {"calls": [pb.AttendStreamCall(id=1, apply=pb.ApplyRequest(layer="x"))]},
    ],
)
def test_what_else_a_message_has_is_for_others(native: Messages, change: dict[str, object]) -> None:
    random = Random(4)
    message = random_message(random, known_requests(random, native, 1), 1)
    assert native.read_message(message.SerializeToString(), MOST).requests == 1
    message.MergeFrom(pb.AttendStreamRequest(**change))  # type: ignore[arg-type]
    assert native.read_message(message.SerializeToString(), MOST).requests == 0


@pytest.mark.parametrize("field", ["id", "timeout", "traceparent"])
def test_a_call_without_an_id_or_time_or_with_a_trace_is_for_others(native: Messages, field: str) -> None:
    random = Random(5)
    message = random_message(random, known_requests(random, native, 1), 1)
    (call,) = message.calls
    if field == "id":
        call.id = 0
    elif field == "timeout":
        call.timeout.FromNanoseconds(0)
    else:
        call.traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert native.read_message(message.SerializeToString(), MOST).requests == 0


def test_a_timeout_that_is_none_is_for_others(native: Messages) -> None:
    """Such as one with a whole second of nanoseconds, which the ordinary path refuses."""
    random = Random(5)
    message = random_message(random, known_requests(random, native, 1), 1)
    found = []
    for nanos in (999_999_999, 1_000_000_000):
        message.calls[0].timeout.nanos = nanos
        found.append(native.read_message(message.SerializeToString(), MOST).requests)
    assert found == [1, 0]


def test_a_request_of_nothing_is_unknown(native: Messages) -> None:
    known_requests(Random(6), native, 1)
    message = pb.AttendStreamRequest(calls=[pb.AttendStreamCall(id=1, attend=pb.AttendRequest())])
    assert native.read_message(message.SerializeToString(), MOST).requests == -1
    assert native.read_request(b"").requests == -1


@pytest.mark.parametrize("bits", [*range(1, 64, 7), 55, 56, 62, 63, 64])
def test_ids_of_any_size_are_answered_or_for_others(native: Messages, device: CpuDevice, bits: int) -> None:
    random = Random(7)
    message = random_message(random, known_requests(random, native, 1), 1)
    for call_id in {1 << bits - 1, (1 << bits) - 1}:
        message.calls[0].id = call_id
        found = assert_reads_as_others_do(native, device, message.SerializeToString())
        assert found == 1 or (found == 0 and bits > 56)


def test_numbers_that_take_more_bytes_than_they_need_are_for_others(native: Messages) -> None:
    random = Random(8)
    message = random_message(random, known_requests(random, native, 1), 1)
    message.calls[0].id = 1
    tag, usual = message.SerializeToString()[:1], message.calls[0].SerializeToString()
    found = []
    for number in (b"\x01", b"\x81\x00", b"\x81\x80\x00"):
        call = usual[:1] + number + usual[2:]
        assert len(call) < 128
        found.append(native.read_message(tag + bytes([len(call)]) + call, MOST).requests)
    assert found == [1, 0, 0]


def test_results_are_written_nowhere_else(native: Messages) -> None:
    """Not even an lse that was not asked for."""
    memory = np.frombuffer(native._results_memory, np.uint8)
    for return_lse in (False, True):
        message = messages.random_attend(0, batch=2, return_lse=return_lse).SerializeToString()
        assert learn(native, message)
        memory[...] = 0xA5
        asked = native.read_request(message)
        native.compute(asked.effort, 0, 0, 0)
        begin = native._results_at - memory.ctypes.data
        assert (memory[begin + asked.result_bytes :] == 0xA5).all()
        assert (memory[begin : begin + asked.result_bytes] != 0xA5).any()


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_not_finite_is_said(native: Messages, name: str) -> None:
    request = messages.random_attend(7)
    tensor = getattr(request, name)
    array = messages.array(tensor).copy()
    array[0, 1, 0, 2] = np.nan
    tensor.data = array.tobytes()
    message = request.SerializeToString()
    assert learn(native, message)
    asked = native.read_request(message)
    assert asked.requests == 1
    with pytest.raises(ArithmeticError):
        native.compute(asked.effort, 0, 0, 0)


@pytest.mark.parametrize(
    "request_",
    [
        messages.random_attend(0, mask=np.ones((3, 3), bool)),
        messages.random_attend(0, sinks=np.zeros(2, np.float32)),
        messages.random_attend(0, query_offset=np.array([1])),
        messages.random_attend(0, dtype=np.float64),
        messages.random_attend(0, 0),
        messages.random_attend(0, 1, batch=MOST_SEQUENCES + 1),
        messages.random_attend(0, batch=0),
        messages.random_attend(0, batch=0, return_lse=True),
    ],
)
def test_layouts_of_what_there_is_something_else_to_do_for_are_not_learnt(
    native: Messages, request_: pb.AttendRequest
) -> None:
    message = request_.SerializeToString()
    read = messages.read_request(message)
    assert not learn(native, message)
    assert not native.knows(read.problem)
    assert native.read_request(message).requests == -1


def test_layouts_that_are_used_stay_when_there_are_too_many(native: Messages) -> None:
    def know(number: int) -> bytes:
        message = messages.random_attend(0, scale=1.0 + number).SerializeToString()
        request = messages.read_request(message)
        assert learn(native, message)
        assert native.knows(request.problem)
        return message

    learnt = [know(number) for number in range(MOST_LAYOUTS)]
    know(MOST_LAYOUTS)  # all were used recently: the first is evicted, and all are marked unused
    assert native.read_request(learnt[0]).requests == -1
    assert not native.knows(messages.read_request(learnt[0]).problem)
    for number in range(MOST_LAYOUTS - 1):
        assert native.read_request(learnt[1]).requests == 1
        know(MOST_LAYOUTS + 1 + number)
    assert native.read_request(learnt[1]).requests == 1
    assert native.read_request(learnt[2]).requests == -1


def test_no_more_requests_nor_results_than_there_is_room_for(native: Messages) -> None:
    def read(request: pb.AttendRequest, count: int) -> int:
        calls = [pb.AttendStreamCall(id=number, attend=request) for number in range(1, count + 1)]
        return native.read_message(pb.AttendStreamRequest(calls=calls).SerializeToString(), 1000).requests

    small, wide = messages.random_attend(0), messages.random_attend(0, 64, heads=16, width=128)  # half a MiB of results
    many = messages.random_attend(0, 1, batch=MOST_SEQUENCES // 2)
    for request in (small, wide, many):
        message = request.SerializeToString()
        assert learn(native, message)
    assert [read(small, count) for count in (MOST_REQUESTS, MOST_REQUESTS + 1)] == [MOST_REQUESTS, 0]
    assert [read(wide, count) for count in (1, 2, 3)] == [1, 2, 0]
    assert [read(many, count) for count in (1, 2, 3)] == [1, 2, 0]
