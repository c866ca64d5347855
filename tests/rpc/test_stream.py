"""Streams of calls: raw messages on a real socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import calls
import grpc
import messages
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2
from occupied import Occupied

from attnserve.v1 import attention_pb2 as pb

if TYPE_CHECKING:
    from conftest import Server


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    options = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
    with grpc.insecure_channel(server.address, options=options) as channel:
        yield channel


@pytest.fixture
def stream(channel: grpc.Channel) -> calls.Stream:
    return calls.Stream(channel)


def codes(replies: list[pb.AttendStreamReply]) -> dict[int, int]:
    """The code of each reply by its id; 0 for a result."""
    assert all(reply.WhichOneof("result") for reply in replies)
    assert len({reply.id for reply in replies}) == len(replies)
    return {reply.id: reply.error.code for reply in replies}


def test_many_calls_in_one_message_are_a_batch(server: Server, stream: calls.Stream) -> None:
    requests = {3 * number: messages.random_attend(number, causal=number % 2 == 0) for number in range(1, 40)}
    with Occupied(server) as occupied:  # however long it takes to read them
        stream.send(*(calls.call(number, request) for number, request in requests.items()))
        stream.half_close()
        occupied.until_waiting(len(requests))
    replies = stream.rest()
    assert codes(replies) == dict.fromkeys(requests, 0)
    for reply in replies:
        calls.assert_answers(reply.attend, requests[reply.id])
        assert reply.attend.batch_size == len(requests)  # causal or not
        timings = reply.attend.timings
        assert all(
            0 < phase < calls.PATIENCE_S * 1e9 for phase in (timings.decode_ns, timings.queue_ns, timings.compute_ns)
        )
        # The native kernel reads the received message and writes the reply in place, so these may be 0.
        assert max(timings.staging_ns, timings.encode_ns) < calls.PATIENCE_S * 1e9


def test_replies_come_in_the_order_in_which_they_ran(stream: calls.Stream) -> None:
    stream.send(*(calls.call(10 + given, messages.random_attend(0, priority=given)) for given in (-8, 0, 8)))
    assert [reply.id for reply in stream.replies(3)] == [18, 10, 2]
    stream.half_close()
    assert stream.rest() == []


def test_a_bad_call_among_good_ones_fails_alone(stream: calls.Stream) -> None:
    good, bad = messages.random_attend(0), messages.random_attend(1, priority=9)
    stream.send(calls.call(1, good), calls.call(2, bad), calls.call(3, good))
    replies = {reply.id: reply for reply in stream.replies(3)}
    calls.assert_answers(replies[1].attend, good)
    calls.assert_answers(replies[3].attend, good)
    error = replies[2].error
    assert error.code == code_pb2.INVALID_ARGUMENT
    (violation,) = calls.detail(error, error_details_pb2.BadRequest).field_violations
    assert violation.field == "priority"
    stream.send(calls.call(2, good))
    calls.assert_answers(stream.replies(1)[0].attend, good)


def test_ids_are_echoed_whatever_they_are(stream: calls.Stream) -> None:
    ids = [0, 1, 127, 128, 2**32, 2**63, 2**64 - 1]
    stream.send(*(calls.call(number, messages.random_attend(0)) for number in ids))
    assert codes(stream.replies(len(ids))) == dict.fromkeys(ids, 0)
    stream.send(*(calls.call(number, None) for number in ids))
    assert codes(stream.replies(len(ids))) == dict.fromkeys(ids, code_pb2.INVALID_ARGUMENT)


def test_an_id_in_flight_cannot_be_used_again_until_its_reply(stream: calls.Stream) -> None:
    request = messages.random_attend(0)
    for _ in range(2):
        stream.send(calls.call(5, request), calls.call(5, messages.random_attend(1)))
        error, result = sorted(stream.replies(2), key=lambda reply: reply.error.code, reverse=True)
        assert (error.id, error.error.code) == (5, code_pb2.INVALID_ARGUMENT)
        assert calls.detail(error.error, error_details_pb2.ErrorInfo).reason == "DUPLICATE_ID"
        assert result.id == 5
        calls.assert_answers(result.attend, request)


def test_a_call_without_operation(stream: calls.Stream) -> None:
    stream.send(calls.call(5, None))
    (reply,) = stream.replies(1)
    (violation,) = calls.detail(reply.error, error_details_pb2.BadRequest).field_violations
    assert (reply.id, reply.error.code, violation.field) == (5, code_pb2.INVALID_ARGUMENT, "operation")


def test_garbage_in_the_place_of_a_request_is_its_calls_own_error(stream: calls.Stream) -> None:
    garbage = b"\x08\x05" + b"\x7a\x03\xff\xff\xff"  # id 5, and a request field that is no message
    stream.send_bytes(b"\x12" + bytes([len(garbage)]) + garbage)
    (reply,) = stream.replies(1)
    assert (reply.id, reply.error.code) == (5, code_pb2.INVALID_ARGUMENT)
    assert calls.detail(reply.error, error_details_pb2.ErrorInfo).reason == "MALFORMED_MESSAGE"


@pytest.mark.parametrize(
    ("garbage", "call_id"), [(b"\x08\xff", 0), (b"\x08\x05\x12\x01\xff", 5), (b"\x08\x05\xff", 5), (b"\x12\x7f", 0)]
)
def test_a_malformed_call_is_its_own_error(stream: calls.Stream, garbage: bytes, call_id: int) -> None:
    """Its id is reported as far as it can be read, and the calls around it are answered."""
    request = messages.random_attend(0)
    good = pb.AttendStreamRequest(calls=[calls.call(number, request) for number in (1, 2)]).SerializeToString()
    stream.send_bytes(good + b"\x12" + bytes([len(garbage)]) + garbage)
    replies = {reply.id: reply for reply in stream.replies(3)}
    for number in (1, 2):
        calls.assert_answers(replies[number].attend, request)
    assert calls.detail(replies[call_id].error, error_details_pb2.ErrorInfo).reason == "MALFORMED_MESSAGE"
    stream.send(calls.call(9, request))
    calls.assert_answers(stream.replies(1)[0].attend, request)


@pytest.mark.parametrize("garbage", [b"\xff", b"\x12\x7f", b"\x0a\x01\xff"], ids=bytes.hex)
def test_garbage_ends_its_stream_and_nothing_else(
    server: Server, channel: grpc.Channel, stream: calls.Stream, garbage: bytes
) -> None:
    request = messages.random_attend(0)
    other = calls.Stream(channel)
    stream.send(calls.call(1, request))
    calls.assert_answers(stream.replies(1)[0].attend, request)
    stream.send_bytes(garbage)
    code, status = stream.error()
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert calls.detail(status, error_details_pb2.ErrorInfo).reason == "MALFORMED_MESSAGE"
    other.send(calls.call(1, request))
    calls.assert_answers(other.replies(1)[0].attend, request)
    calls.until_nothing_is_in_flight(server.http_address)


def test_garbage_behind_calls_lets_go_of_them(server: Server, stream: calls.Stream) -> None:
    stream.send(*(calls.call(number, calls.long_running()) for number in range(2)))
    stream.send_bytes(b"\xff")
    code, _ = stream.error()
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    calls.until_nothing_is_in_flight(server.http_address)


def test_empty_messages_mean_nothing(stream: calls.Stream) -> None:
    stream.send_bytes(b"")
    stream.send(cancel=[1, 2, 3])
    stream.half_close()
    assert stream.rest() == []


@pytest.mark.parametrize(
    "timeout", [Duration(), Duration(seconds=-1), Duration(nanos=-1), Duration(seconds=-(2**60))], ids=repr
)
def test_a_timeout_that_has_passed(stream: calls.Stream, timeout: Duration) -> None:
    stream.send(calls.call(1, messages.random_attend(0), timeout=timeout), calls.call(2, messages.random_attend(0)))
    assert codes(stream.replies(2)) == {1: code_pb2.DEADLINE_EXCEEDED, 2: 0}


def test_a_timeout_that_passes_in_the_queue(server: Server, stream: calls.Stream) -> None:
    """It is clear on arrival that the call's time will not be enough."""

    def expired() -> float:
        return calls.metric(server.http_address, "attnserve_rejected_requests_total", reason="deadline")

    before = expired()
    urgent = messages.random_attend(1)
    stream.send(
        calls.call(1, calls.long_running()),
        calls.call(2, urgent, timeout=Duration(nanos=1)),
        calls.call(3, urgent, timeout=Duration(seconds=2**40)),
    )
    assert codes(stream.replies(3)) == {1: 0, 2: code_pb2.DEADLINE_EXCEEDED, 3: 0}
    assert expired() == before + 1


def test_what_is_cancelled_in_the_queue_does_not_run(server: Server, stream: calls.Stream) -> None:
    def cancelled() -> float:
        return calls.metric(server.http_address, "attnserve_cancelled_requests_total", reason="cancelled")

    before = cancelled()
    with Occupied(server) as device:
        stream.send(*(calls.call(number, messages.random_attend(0)) for number in (1, 2, 3)))
        device.until_waiting(3)
        stream.send(cancel=[2, 99])
        calls.until(lambda: cancelled() == before + 1, "it is cancelled")
    stream.half_close()
    outcome = codes(stream.rest())
    outcome.pop(2, None)  # a reply is not promised
    assert outcome == {1: 0, 3: 0}
    calls.until_nothing_is_in_flight(server.http_address)


def test_half_close_drains_all_replies(stream: calls.Stream) -> None:
    requests = {number: messages.random_attend(number, 1 + number % 5) for number in range(60)}
    for number, request in requests.items():
        stream.send(calls.call(number, request))
    stream.half_close()
    replies = stream.rest()
    assert codes(replies) == dict.fromkeys(requests, 0)
    for reply in replies:
        calls.assert_answers(reply.attend, requests[reply.id])


def test_streams_do_not_see_each_other(channel: grpc.Channel) -> None:
    """The same ids on several streams at once: every reply reaches the stream that its call came from."""
    streams = [calls.Stream(channel) for _ in range(4)]
    requests = {
        (place, number): messages.random_attend(100 * place + number) for place in range(4) for number in range(25)
    }
    for number in range(25):
        for place, stream in enumerate(streams):
            stream.send(calls.call(number, requests[place, number]))
    for place, stream in enumerate(streams):
        stream.half_close()
        replies = stream.rest()
        assert codes(replies) == dict.fromkeys(range(25), 0)
        for reply in replies:
            calls.assert_answers(reply.attend, requests[place, reply.id])


def test_a_caller_that_vanishes_leaves_nothing_behind(server: Server, channel: grpc.Channel) -> None:
    streams_before = calls.metric(server.http_address, "attnserve_streams")
    said_before = len(server.stderr())
    stream = calls.Stream(channel)
    with Occupied(server) as device:
        stream.send(*(calls.call(number, messages.random_attend(number, number)) for number in range(50)))
        device.until_waiting(50)
        stream.vanish()
    calls.until_nothing_is_in_flight(server.http_address)
    calls.until(lambda: calls.metric(server.http_address, "attnserve_streams") == streams_before, "the stream is gone")
    assert "Traceback" not in server.stderr()[said_before:]


def test_what_is_computed_for_a_caller_that_vanishes_is_on_its_account(server: Server, channel: grpc.Channel) -> None:
    metric = partial(calls.metric, server.http_address)

    def flops() -> tuple[float, float]:
        return metric("attnserve_flops_total"), metric("attnserve_caller_flops_total", caller="anonymous")

    before, stream = flops(), calls.Stream(channel)
    stream.send(calls.call(1, messages.random_attend(0, 2048, heads=1, width=32, dtype=np.float64, softcap=1.0)))
    calls.until(lambda: metric("attnserve_in_flight_requests") or flops() > before, "it is there")
    calls.until(lambda: not metric("attnserve_queue_requests"), "it is being computed")
    stream.vanish()
    calls.until_nothing_is_in_flight(server.http_address)
    computed, counted = (now - then for now, then in zip(flops(), before, strict=True))
    assert computed == counted > 0


def test_a_connection_that_breaks_leaves_nothing_behind(server: Server) -> None:
    said_before = len(server.stderr())
    with (
        Occupied(server) as device,
        grpc.insecure_channel(server.address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel,
    ):
        stream = calls.Stream(channel)
        stream.send(*(calls.call(number, messages.random_attend(number)) for number in range(2)))
        device.until_waiting(2)
    stream.half_close()
    calls.until_nothing_is_in_flight(server.http_address)
    assert "Traceback" not in server.stderr()[said_before:]


def test_a_caller_that_does_not_read_is_not_read_from(server: Server, channel: grpc.Channel) -> None:
    """Replies of 4 MiB are requested but not read: the server stops reading once 16 MiB of them are waiting."""

    def received() -> float:
        return calls.metric(server.http_address, "attnserve_received_bytes_total")

    request = messages.random_attend(0, 1024, heads=1, width=1, return_scores=pb.SCORE_STAGE_RAW)
    size = len(pb.AttendStreamRequest(calls=[calls.call(1, request)]).SerializeToString())
    before, count = received(), 40
    stream = calls.Stream(channel)
    for number in range(count):
        stream.send(calls.call(number, request))
    calls.until(
        lambda: (
            calls.metric(server.http_address, "attnserve_in_flight_bytes") > 16 * 2**20
            and calls.metric(server.http_address, "attnserve_queue_requests") == 0
        ),
        "replies lie around",
    )
    assert received() - before < count * size
    stream.half_close()
    assert codes(stream.rest()) == dict.fromkeys(range(count), 0)
    assert received() - before >= count * (size - 2)
    calls.until_nothing_is_in_flight(server.http_address)


def test_what_is_answered_while_others_are_written_comes_after_them(server: Server, channel: grpc.Channel) -> None:
    """A stream writes one message at a time; 12 MiB wait for their reader when more replies become ready at once."""
    before = calls.metric(server.http_address, "attnserve_received_bytes_total")

    def have_been_read(given: list[pb.AttendStreamCall]) -> None:
        size = sum(len(pb.AttendStreamRequest(calls=[each]).SerializeToString()) for each in given)
        calls.until(
            lambda: (
                calls.metric(server.http_address, "attnserve_received_bytes_total") - before >= size
                and calls.metric(server.http_address, "attnserve_in_flight_flops") == 0
            ),
            "the calls have been read, and computed",
        )

    large = messages.random_attend(0, 1024, heads=1, width=1, return_scores=pb.SCORE_STAGE_RAW)
    given = [calls.call(number, large) for number in range(3)]
    others = [pb.AttendStreamCall(id=number) for number in range(3, 12)]
    stream = calls.Stream(channel)
    for each in given:
        stream.send(each)
    have_been_read(given)
    for each in others:
        stream.send(each)
    have_been_read(given + others)
    stream.half_close()
    replies = stream.rest()
    assert [reply.id for reply in replies] == list(range(12))
    assert codes(replies) == dict.fromkeys(range(3), 0) | dict.fromkeys(range(3, 12), code_pb2.INVALID_ARGUMENT)
    calls.until_nothing_is_in_flight(server.http_address)


def test_callers_that_leave_while_they_are_written_to_are_no_fault_of_the_server(
    start_server: Callable[..., Server],
) -> None:
    server = start_server()
    request = messages.random_attend(0, 2048, heads=4, width=64)  # its reply is 2 MiB
    for attempt in range(20):
        with grpc.insecure_channel(server.address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            stream = calls.Stream(channel)
            for number in range(8):
                stream.send(calls.call(number, request))
            if attempt % 2:
                stream.replies(1)
            stream.vanish()
    assert server.stop() == 0
    assert " error " not in server.stderr()
