"""What both clients retry and what they do not: broken streams, full servers, messages that are too long."""

from __future__ import annotations

import gc
import itertools
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from askers import Attend, Transport, array, attend, transport
from calls import PATIENCE_S
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status
from peers import good, good_unary, peer, replies, response

from attnserve import InvalidRequestError, OverloadedError, UnavailableError
from attnserve._settings.retry import BUDGET_ALWAYS
from attnserve._transports.unary import UnaryCall
from attnserve.v1 import attention_pb2 as pb

__all__ = ["attend", "transport"]


def test_a_peer_that_ends_the_stream_in_good_order_after_every_message(attend: Attend) -> None:
    """The calls that it left unanswered are retried."""
    lost = []

    def forgetful(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        message = next(messages)
        if len(lost) < 2:
            lost.append(message)
            return
        yield from replies(message)
        yield from good(messages, context)

    with peer(forgetful) as address:
        results = attend(address, [array(number) for number in range(20)])
    assert [result.output[0, 0] for result in results] == list(range(20))
    assert len(lost) == 2


@pytest.mark.parametrize(
    "code", [getattr(grpc.StatusCode, name) for name in ("UNAVAILABLE", "INTERNAL", "UNKNOWN", "CANCELLED")]
)
def test_a_stream_that_breaks_is_followed_by_another(attend: Attend, code: grpc.StatusCode) -> None:
    broken = []

    def breaking(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        message = next(messages)
        if not broken:
            broken.append(message)
            context.abort(code, "gone")
        yield from replies(message)
        yield from good(messages, context)

    with peer(breaking) as address:
        results = attend(address, [array(number) for number in range(20)])
    assert [result.output[0, 0] for result in results] == list(range(20))


def test_a_stream_that_always_breaks(attend: Attend) -> None:
    attempts = []

    def breaking(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        attempts.append(next(messages))
        context.abort(grpc.StatusCode.INTERNAL, "gone")
        yield b""

    with peer(breaking) as address:
        (result,) = attend(address, [array(1)], retries=2)
    assert isinstance(result, UnavailableError)
    assert result.code is grpc.StatusCode.INTERNAL
    assert "gone" in str(result)
    assert len(attempts) == 3


def test_a_reply_unavailable_is_tried_again_on_another_stream(attend: Attend) -> None:
    streams: list[object] = []

    def draining(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        streams.append(context)
        if len(streams) > 1:
            yield from good(messages, context)
            return
        for message in messages:
            for call in pb.AttendStreamRequest.FromString(message).calls:
                error = Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="draining")
                reply = pb.AttendStreamReply(id=call.id, error=error)
                yield pb.AttendStreamResponse(replies=[reply]).SerializeToString()

    with peer(draining) as address:
        results = attend(address, [array(1), array(2)])
    assert [result.output[0, 0] for result in results] == [1, 2]
    assert len(streams) == 2


def test_unary_calls_are_tried_again(attend: Attend) -> None:
    attempts = []

    def reluctant(message: bytes, context: grpc.ServicerContext) -> bytes:
        attempts.append(message)
        if len(attempts) <= 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        return good_unary(message, context)

    with peer(good, reluctant) as address:
        (result,) = attend(address, [array(1)], transport="unary")
        assert result.output[0, 0] == 1
        attempts.clear()
        (result,) = attend(address, [array(1)], transport="unary", retries=1)
    assert isinstance(result, UnavailableError)
    assert len(attempts) == 2


def overloaded(reason: str, delay_ms: int) -> Status:
    """The status of a full server."""
    error = Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="full")
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(delay_ms)
    error.details.add().Pack(retry)
    error.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason))
    return error


def refusing(error: Status, attempts: list[float], times: int = 1000) -> Any:
    """A peer that refuses `times` calls, and answers all others."""

    def stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            attempts.append(time.monotonic())
            if len(attempts) > times:
                yield from replies(message)
                continue
            for call in pb.AttendStreamRequest.FromString(message).calls:
                reply = pb.AttendStreamReply(id=call.id, error=error)
                yield pb.AttendStreamResponse(replies=[reply]).SerializeToString()

    return stream


def test_a_full_server_is_asked_again_when_it_says(attend: Attend) -> None:
    attempts: list[float] = []
    with peer(refusing(overloaded("OVERLOADED", 60), attempts, times=2)) as address:
        (result,) = attend(address, [array(7)])
    assert result.output[0, 0] == 7
    assert len(attempts) == 3
    first, second = (after - before for before, after in itertools.pairwise(attempts))
    assert first >= 0.06, "no sooner than it was told"
    assert second >= 0.12, "and twice that, the second time"


@pytest.mark.parametrize(
    ("reason", "delay_ms", "count"), [("SHARE_EXCEEDED", 5, 3), ("CACHE_FULL", 5, 1), ("OVERLOADED", 60_000, 1)]
)
def test_a_server_that_stays_full(attend: Attend, reason: str, delay_ms: int, count: int) -> None:
    """The call is retried as often as allowed; not at all if waiting does not help, or takes too long."""
    attempts: list[float] = []
    with peer(refusing(overloaded(reason, delay_ms), attempts)) as address:
        (result,) = attend(address, [array(1)], retries=2)
    assert isinstance(result, OverloadedError)
    assert (result.retry_delay, result.reason) == (delay_ms / 1000, reason)
    assert len(attempts) == count


def test_few_come_back_to_a_server_that_refuses_all(attend: Attend, transport: Transport) -> None:
    attempts: list[int] = []
    full = overloaded("OVERLOADED", 5)

    def stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            calls = pb.AttendStreamRequest.FromString(message).calls
            attempts.extend(call.id for call in calls)
            refused = [pb.AttendStreamReply(id=call.id, error=full) for call in calls]
            yield pb.AttendStreamResponse(replies=refused).SerializeToString()

    def unary(message: bytes, context: grpc.ServicerContext) -> bytes:
        attempts.append(0)
        context.abort_with_status(rpc_status.to_status(full))
        raise AssertionError("aborted")

    with peer(stream, unary) as address:
        results = attend(address, [array(n) for n in range(100)], transport=transport)
    assert all(isinstance(result, OverloadedError) and result.retry_delay == 0.005 for result in results)
    if transport == "stream":
        assert len(attempts) <= 100 + 3, "by one at a time, as often as a call is retried"
        return
    assert 100 + BUDGET_ALWAYS <= len(attempts) <= 100 + 2 * BUDGET_ALWAYS, (
        "twice where it takes longer than the window"
    )


def test_what_a_full_server_refuses_another_answers(attend: Attend, transport: Transport) -> None:
    """Though the full one, which answers faster than the other computes, always has fewer calls in flight."""
    count = 16
    refused: list[bytes] = []
    arrived: list[bytes] = []
    released = threading.Event()

    def refuse(call: pb.AttendRequest) -> None:
        refused.append(call.query.data)
        if refused.count(call.query.data) > 1:
            released.set()

    def compute(call: pb.AttendRequest) -> None:
        arrived.append(call.query.data)
        if len(arrived) == count:
            released.set()

    def full_stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            for call in pb.AttendStreamRequest.FromString(message).calls:
                refuse(call.attend)
                reply = pb.AttendStreamReply(id=call.id, error=overloaded("OVERLOADED", 5))
                yield pb.AttendStreamResponse(replies=[reply]).SerializeToString()

    def full_unary(message: bytes, context: grpc.ServicerContext) -> bytes:
        refuse(pb.AttendRequest.FromString(message))
        context.abort_with_status(rpc_status.to_status(overloaded("OVERLOADED", 5)))
        raise AssertionError("aborted")

    def slow_stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        kept = []
        for message in messages:
            kept.append(message)
            for call in pb.AttendStreamRequest.FromString(message).calls:
                compute(call.attend)
            if released.is_set():
                yield from itertools.chain.from_iterable(map(replies, kept))
                kept.clear()

    def slow_unary(message: bytes, context: grpc.ServicerContext) -> bytes:
        compute(pb.AttendRequest.FromString(message))
        assert released.wait(PATIENCE_S)
        return good_unary(message, context)

    with peer(full_stream, full_unary) as full, peer(slow_stream, slow_unary) as slow:
        results = attend([full, slow], [array(n) for n in range(count)], transport=transport)  # type: ignore[arg-type]
    assert [result.output[0, 0] for result in results] == list(range(count))
    assert 1 <= len(refused) == len(set(refused)) <= count


@pytest.mark.parametrize("retries", [0, 1])
def test_an_error_does_not_keep_what_was_asked(attend: Attend, retries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[weakref.ref[Any]] = []
    connect = UnaryCall.connect
    monkeypatch.setattr(UnaryCall, "connect", lambda call: (calls.append(weakref.ref(call)), connect(call))[1])

    def unary(message: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort_with_status(rpc_status.to_status(overloaded("OVERLOADED", 5)))
        raise AssertionError("aborted")

    gc.collect()
    gc.disable()  # it would free them, later
    try:
        with peer(good, unary) as address:
            (error,) = attend(address, [array(1)], transport="unary", retries=retries)
        assert isinstance(error, OverloadedError)
        assert len(calls) == 1 + retries
        assert [call() for call in calls] == [None] * len(calls)
    finally:
        gc.enable()


def test_all_come_back_to_a_server_that_answers_as_many(attend: Attend) -> None:
    full = overloaded("OVERLOADED", 5)
    calls = itertools.count()

    def stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            for call in pb.AttendStreamRequest.FromString(message).calls:
                reply = pb.AttendStreamReply(id=call.id, attend=response(call.attend))
                if 50 <= next(calls) < 100:
                    reply = pb.AttendStreamReply(id=call.id, error=full)
                yield pb.AttendStreamResponse(replies=[reply]).SerializeToString()

    with peer(stream) as address:
        results = attend(address, [array(n) for n in range(100)], retries=1)
    assert [result.output[0, 0] for result in results] == list(range(100))


def test_a_bad_call_fails_alone(attend: Attend) -> None:
    def strict(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            calls = pb.AttendStreamRequest.FromString(message)
            for call in list(calls.calls):
                if len(call.attend.query.shape) != 2:
                    bad = error_details_pb2.BadRequest()
                    bad.field_violations.add(field="query")
                    error = Status(code=3, message="query: expected rank 2")
                    error.details.add().Pack(bad)
                    calls.calls.remove(call)
                    reply = pb.AttendStreamReply(id=call.id, error=error)
                    yield pb.AttendStreamResponse(replies=[reply]).SerializeToString()
            yield from replies(calls.SerializeToString())

    with peer(strict) as address:
        first, bad, last = attend(address, [array(1), array(2, 1, 1, 1), array(3)])
    assert (first.output[0, 0], last.output[0, 0]) == (1, 3)
    assert isinstance(bad, InvalidRequestError)
    assert bad.field == "query"


def test_a_message_that_is_too_long_fails_alone(attend: Attend) -> None:
    """A message over the server's limit ends the whole stream. If that happens during a write, gRPC's asyncio may
    report an error of its own, hence the retries.
    """

    def limited(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            if len(message) > 1 << 20:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max")
            yield from replies(message)

    with peer(limited) as address:
        first, long, last = attend(address, [array(1), array(2, 700, 700), array(3)], retries=8)
    assert (first.output[0, 0], last.output[0, 0]) == (1, 3)
    assert isinstance(long, InvalidRequestError)
    assert long.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_nobody_there(attend: Attend, transport: Transport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    begin = time.monotonic()
    (result,) = attend(address, [array(1)], transport=transport)
    assert isinstance(result, UnavailableError)
    assert time.monotonic() - begin < PATIENCE_S


@pytest.mark.parametrize("code", [getattr(grpc.StatusCode, name) for name in ("CANCELLED", "INTERNAL", "UNKNOWN")])
def test_unary_calls_that_fail_with_the_connection_are_tried_again(attend: Attend, code: grpc.StatusCode) -> None:
    """Calls on a server that exits, or on a garbled connection, end with a status of gRPC's own."""
    attempts = []

    def ending(message: bytes, context: grpc.ServicerContext) -> bytes:
        attempts.append(message)
        if len(attempts) == 1:
            context.abort(code, "gRPC's word")
        return good_unary(message, context)

    with peer(good, ending) as address:
        (result,) = attend(address, [array(1)], transport="unary")
        assert result.output[0, 0] == 1
        attempts.clear()
        (result,) = attend(address, [array(1)], transport="unary", retries=0)
    assert isinstance(result, UnavailableError)
