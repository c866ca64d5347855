"""Unary calls whose message has not come: what a server does before it has one, over a real socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import calls
import grpc
import messages
import pytest
from frames import HEADERS, Connection
from google.rpc import code_pb2, error_details_pb2

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.access.tokens import digest, format_hash, new_token

if TYPE_CHECKING:
    from conftest import Server

METHODS = ("AttentionService/Attend", "AttentionService/Apply", "CacheService/Append")
OF_ITS_OWN = (("grpc.use_local_subchannel_pool", 1),)
"""The options of a channel with a connection that no other has."""
PLAIN_METHODS = ("AttentionService/ServerInfo", "CacheService/List", "LayerService/Load")


def begin(channel: grpc.Channel, method: str, sent: Iterator[bytes], **options: Any) -> Any:
    """The future of the reply to a call that sends those messages."""
    callable_: Any = channel.stream_unary(f"/attnserve.v1.{method}")
    return callable_.future(sent, **{"timeout": calls.PATIENCE_S, **options})


def nothing(until: threading.Event) -> Iterator[bytes]:
    """No message, for as long as it takes."""
    until.wait()
    yield from ()


def test_a_full_server_refuses_without_it(start_server: Callable[..., Server]) -> None:
    server = start_server("--max-requests", "1")
    over = threading.Event()
    with grpc.insecure_channel(server.address, calls.ANY_LENGTH) as channel:
        unread = calls.Stream(channel)
        unread.send(calls.call(1, calls.large_reply()))
        calls.until(lambda: calls.metric(server.http_address, "attnserve_in_flight_requests") == 1, "it is full")
        received = calls.metric(server.http_address, "attnserve_received_bytes_total")
        errors: list[Any] = [begin(channel, method, nothing(over)).exception() for method in METHODS]
        over.set()
        for error in errors:
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            status = calls.status_of(error)
            assert calls.detail(status, error_details_pb2.ErrorInfo).metadata["bound"] == "requests"
            assert calls.detail(status, error_details_pb2.RetryInfo).retry_delay.ToNanoseconds() > 0
        assert calls.metric(server.http_address, "attnserve_rejected_requests_total", reason="requests") == len(METHODS)
        assert calls.metric(server.http_address, "attnserve_received_bytes_total") == received
        unread.half_close()
        assert [reply.error.code for reply in unread.rest()] == [0]
        calls.until_nothing_is_in_flight(server.http_address)
        request = messages.random_attend(0)
        reply = calls.unary(channel, "Attend", request.SerializeToString())
        calls.assert_answers(pb.AttendResponse.FromString(reply), request)


def test_who_is_unknown_is_refused_without_it(start_server: Callable[..., Server], tmp_path: Path) -> None:
    callers = tmp_path / "callers.toml"
    callers.write_text(
        f'[[tokens]]\nname = "ann"\nroles = ["use", "layers"]\nhash = "{format_hash(digest(new_token()))}"\n'
    )
    server = start_server("--callers", str(callers))
    over = threading.Event()
    with grpc.insecure_channel(server.address) as channel:
        errors: list[Any] = [begin(channel, method, nothing(over)).exception() for method in METHODS + PLAIN_METHODS]
        over.set()
    assert [error.code() for error in errors] == [grpc.StatusCode.UNAUTHENTICATED] * len(errors)


def test_a_call_that_ends_without_it_is_told_so(server: Server) -> None:
    """A second later: it might be cancelled."""
    with grpc.insecure_channel(server.address) as channel:
        begun = [begin(channel, method, iter(())) for method in METHODS + PLAIN_METHODS]
        errors: list[Any] = [call.exception() for call in begun]
    for error in errors:
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        status = calls.status_of(error)
        assert status.code == code_pb2.INVALID_ARGUMENT
        assert calls.detail(status, error_details_pb2.ErrorInfo).reason == "MALFORMED_MESSAGE"


@pytest.mark.parametrize("method", ["AttentionService/Attend", "AttentionService/ServerInfo"])
def test_so_many_calls_of_a_caller_may_wait_for_theirs(start_server: Callable[..., Server], method: str) -> None:
    """One more is refused at once, and others are served; when they have come, there is room again."""
    server = start_server("--max-requests", "3")
    request = messages.random_attend(0) if method.endswith("Attend") else pb.ServerInfoRequest()
    come = threading.Event()

    def late() -> Iterator[bytes]:
        come.wait()
        yield request.SerializeToString()

    with grpc.insecure_channel(server.address) as channel, grpc.insecure_channel(server.address, OF_ITS_OWN) as other:
        begun = [begin(channel, method, late()) for _ in range(4)]
        calls.until(lambda: any(call.done() for call in begun), "one is refused")
        assert calls.unary(other, method.rpartition("/")[2], request.SerializeToString())
        (refused,) = (call for call in begun if call.done())
        error: Any = refused.exception()
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        status = calls.status_of(error)
        assert status.message == "the caller has as many calls whose messages have not come as one may have: 3"
        assert calls.detail(status, error_details_pb2.ErrorInfo).reason == "TOO_MANY_UNSENT"
        assert calls.detail(status, error_details_pb2.RetryInfo).retry_delay.ToNanoseconds() > 0
        assert calls.metric(server.http_address, "attnserve_rejected_requests_total", reason="unsent_messages") == 1
        come.set()
        assert all(call.result() for call in begun if call is not refused)
        assert begin(channel, method, late()).result()


def test_a_message_may_take_so_long(start_server: Callable[..., Server]) -> None:
    """As long as a reply may be unread, and a second for each MiB that a message may have."""
    server = start_server("--max-unread-time", "100ms", "--max-message-bytes", "512KiB")
    over = threading.Event()
    with grpc.insecure_channel(server.address) as channel:
        error: Any = begin(channel, METHODS[0], nothing(over)).exception()
        over.set()
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "expected a message within 0.6 s, found none"
        request = messages.random_attend(0)
        reply = calls.unary(channel, "Attend", request.SerializeToString())
        calls.assert_answers(pb.AttendResponse.FromString(reply), request)
    assert server.stop() == 0
    assert "Traceback" not in server.stderr()


def test_a_message_may_take_for_ever_if_a_reply_may(start_server: Callable[..., Server]) -> None:
    """However short it must be."""
    server = start_server("--max-unread-time", "0", "--max-message-bytes", "64KiB")
    come, request = threading.Event(), messages.random_attend(0)

    def late() -> Iterator[bytes]:
        come.wait(1.0)
        yield request.SerializeToString()

    with grpc.insecure_channel(server.address) as channel:
        calls.assert_answers(pb.AttendResponse.FromString(begin(channel, METHODS[0], late()).result()), request)


def test_the_time_that_a_message_takes_is_no_part_of_its_calls(start_server: Callable[..., Server]) -> None:
    """The metrics tell of what comes after it."""
    server = start_server()
    come, sent, request = threading.Event(), list[float](), messages.random_attend(0)

    def late() -> Iterator[bytes]:
        come.wait()
        sent.append(time.perf_counter())
        yield request.SerializeToString()

    with grpc.insecure_channel(server.address) as channel:
        call = begin(channel, METHODS[0], late())
        # Calls of one connection begin in their order: once a later one is answered, this one has begun.
        calls.unary(channel, "ServerInfo", b"")
        come.wait(0.5)
        come.set()
        calls.assert_answers(pb.AttendResponse.FromString(call.result()), request)
        waited = time.perf_counter() - sent[0]
    name = "attnserve_request_duration_seconds_sum"
    assert 0 < calls.metric(server.http_address, name, operation="attend") <= waited


def test_those_of_strangers_come_soon_or_not_at_all(start_server: Callable[..., Server]) -> None:
    """Whatever others may take."""
    server = start_server("--max-unread-time", "0")
    with Connection(server.address) as checking, Connection(server.address) as watching:
        checking.begin("/grpc.health.v1.Health/Check", 4, message=None)
        watching.begin("/grpc.health.v1.Health/Watch", 4, message=None)
        assert checking.until(HEADERS, True, 4)
        assert watching.until(HEADERS, True, 4)
    assert calls.metric(server.http_address, "attnserve_rejected_requests_total", reason="unsent_messages") == 2 + 2


def test_a_call_that_is_cancelled_without_it_is_no_bad_request(start_server: Callable[..., Server]) -> None:
    server = start_server()
    over = threading.Event()

    def ended(code: str) -> float:
        return calls.metric(server.http_address, "attnserve_requests_total", operation="attend", code=code)

    with grpc.insecure_channel(server.address) as channel:
        for _ in range(5):
            call = begin(channel, METHODS[0], nothing(over))
            # Calls of one connection begin in their order: once a later one is answered, this one has begun.
            calls.unary(channel, "Attend", messages.random_attend(0).SerializeToString())
            call.cancel()
        calls.until(lambda: ended("CANCELLED") == 5, "they are cancelled", lambda: ended("CANCELLED"))
        over.set()
    assert ended("INVALID_ARGUMENT") == 0
    assert server.stop() == 0
    assert "Traceback" not in server.stderr()
    assert "refused" not in server.stderr()


@pytest.mark.parametrize("path", ["/attnserve.v1.AttentionService/ServerInfo", "/grpc.health.v1.Health/Check"])
def test_compressed_messages_are_not_unpacked(server: Server, path: str) -> None:
    """A small one may become a large one, before it is known whose it is."""
    with grpc.insecure_channel(server.address) as channel:
        call: Any = channel.unary_unary(path)
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\x0a\x80\x08" + bytes(1024), timeout=calls.PATIENCE_S, compression=grpc.Compression.Gzip)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
        assert call(b"", timeout=calls.PATIENCE_S) is not None
