"""Replies that callers do not read: how long they may take, what becomes of them, and of whom they kept out."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import calls
import grpc
import messages
import numpy as np
import pytest
import soon_ending
from clock import Clock, clock
from conftest import POOL, Server
from dam import Dam
from google.rpc import code_pb2, error_details_pb2
from rpcs import ANYBODY, endings_of, new_metrics

from attnserve import Client, OverloadedError
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.errors import RepliesUnread
from attnserve_server.host.allocator import KEPT
from attnserve_server.rpc import unread
from attnserve_server.rpc.unread import UnreadReplies

__all__ = ["clock"]  # a fixture

OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),  # on a fast connection gRPC would read megabytes ahead
)
BOUND = 192 << 20
MIB = 1 << 20


@contextmanager
def serving(tmp_path: Path, *flags: str, farewell: float = 0.1) -> Iterator[Server]:
    """A server that soon ends what is not read."""
    bounds = ("--max-bytes", str(BOUND), "--max-message-bytes", "64MiB")
    server = Server(
        (*POOL, "--device", "cpu", *bounds, *flags), tmp_path / "stderr", (soon_ending.__file__, str(farewell))
    )
    try:
        yield server
    finally:
        status = server.stop()
    assert status == 0, server.stderr()
    assert "Traceback" not in server.stderr()


def metric(server: Server, name: str, **labels: str) -> float:
    return calls.metric(server.http_address, f"attnserve_{name}", **labels)


def ended(server: Server) -> float:
    return metric(server, "rejected_requests_total", reason="unread")


def pin(
    server: Server, channels: list[grpc.Channel], streams: int, large: pb.AttendRequest | None = None
) -> list[calls.Stream]:
    """Streams whose callers ask for more than the server may hold, and read nothing: most of it is replies to them."""
    opened = [calls.Stream(channel) for channel in channels for _ in range(streams)]
    for stream in opened:
        stream.send(calls.call(0, messages.random_attend(0)))  # gRPC may read one reply ahead
    numbers = itertools.count(1)

    def is_full() -> bool:
        if metric(server, "in_flight_flops") > 0:
            return False
        if metric(server, "in_flight_bytes") > BOUND * 3 // 4:
            return True
        number = next(numbers)
        for stream in opened:
            stream.send(calls.call(number, large or calls.large_reply()))
        return False

    calls.until(is_full, "the server is full of replies")
    return opened


def own_bytes(server: Server) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def test_two_who_do_not_read_keep_others_out_for_a_while_only(tmp_path: Path) -> None:
    large = messages.random_attend(1, 1 << 16, kv_length=1, width=64)  # 64 MiB with its reply
    with serving(tmp_path, "--max-unread-time", "5s") as server, ExitStack() as stack:
        deaf = [stack.enter_context(grpc.insecure_channel(server.address, OPTIONS)) for _ in range(2)]
        other = stack.enter_context(grpc.insecure_channel(server.address, OPTIONS))
        grpc.channel_ready_future(other).result(calls.PATIENCE_S)
        streams = pin(server, deaf, 6)
        assert ended(server) == 0
        with pytest.raises(grpc.RpcError) as refused:
            calls.unary(other, "Attend", large.SerializeToString())
        status = calls.status_of(refused.value)
        assert calls.detail(status, error_details_pb2.ErrorInfo).metadata["bound"] == "bytes"
        delay = calls.detail(status, error_details_pb2.RetryInfo).retry_delay
        assert 0.5 <= delay.ToNanoseconds() / 1e9 <= 10
        assert metric(server, "caller_in_flight_bytes", caller="anonymous") == metric(server, "in_flight_bytes")

        calls.until_nothing_is_in_flight(server.http_address)
        assert ended(server) > 0
        assert len(streams) == 12, "they are kept: gRPC cancels those that nobody holds"
        reply = calls.unary(other, "Attend", large.SerializeToString())
        calls.assert_answers(pb.AttendResponse.FromString(reply), large)
        calls.until(lambda: metric(server, "streams") == 0, "their streams have ended")
        assert "REPLIES_UNREAD" in server.stderr()


def stream_of(channel: grpc.Channel, request: pb.AttendRequest) -> Callable[[], Any]:
    """Asks on a stream. Returns what reads the reply."""
    stream = calls.Stream(channel)
    stream.send(calls.call(0, messages.random_attend(0)))  # gRPC may read one reply ahead
    stream.send(calls.call(1, request))
    return lambda: stream.replies(2)


def unary_of(channel: grpc.Channel, request: pb.AttendRequest) -> Callable[[], Any]:
    """Asks by a unary call, of which gRPC reads nothing ahead if for the client its reply is a stream."""
    method: Any = channel.unary_stream("/attnserve.v1.AttentionService/Attend")
    replies = method(request.SerializeToString(), timeout=calls.PATIENCE_S)
    return lambda: next(replies)


@pytest.mark.parametrize("ask", [stream_of, unary_of], ids=["stream", "unary"])
def test_of_what_is_answered_the_reply_alone_counts_while_nobody_reads_it(
    tmp_path: Path, ask: Callable[[grpc.Channel, pb.AttendRequest], Callable[[], Any]]
) -> None:
    request = messages.random_attend(1, 4096, kv_length=1 << 14, width=16)
    reply_bytes = len(request.query.data)
    with serving(tmp_path) as server, grpc.insecure_channel(server.address, OPTIONS) as channel:
        read = ask(channel, request)
        calls.until(
            lambda: reply_bytes < metric(server, "in_flight_bytes") < 3 * reply_bytes, "the request counts no longer"
        )
        assert request.ByteSize() > 8 * reply_bytes
        assert metric(server, "in_flight_requests") == 1
        assert read()
        calls.until_nothing_is_in_flight(server.http_address)


of_linux = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the system does not tell a process' own memory"
)


@of_linux
@pytest.mark.parametrize(("length", "most"), [(250, 1.0), (900, 2.5), (2000, 3.5)])
def test_unread_replies_take_about_what_is_counted(tmp_path: Path, length: int, most: float) -> None:
    """Replies of 0.25, 3 and 15 MiB. Batches of large ones have taken memory, too, and the heap has gaps."""
    large = messages.random_attend(0, length, heads=1, width=1, return_scores=pb.SCORE_STAGE_RAW)
    with serving(tmp_path) as server, ExitStack() as stack:
        idle = own_bytes(server)
        deaf = [stack.enter_context(grpc.insecure_channel(server.address, OPTIONS)) for _ in range(4)]
        streams = pin(server, deaf, 4, large)
        assert own_bytes(server) - idle < most * BOUND
        assert len(streams) == 16, "they are kept: gRPC cancels those that nobody holds"


@of_linux
def test_the_memory_of_unread_replies_is_let_go(tmp_path: Path) -> None:
    """What is held the next time takes its place: 16 times 40 MiB are held in turn. The heap keeps some of it."""
    small, large = (
        messages.random_attend(0, length, heads=1, width=1, return_scores=pb.SCORE_STAGE_RAW) for length in (3, 3200)
    )
    with serving(tmp_path, "--max-unread-time", "100ms") as server:
        idle = own_bytes(server)
        for times in range(1, 17):
            with grpc.insecure_channel(server.address, OPTIONS) as channel:
                stream = calls.Stream(channel)
                stream.send(calls.call(1, small))  # gRPC may read one reply ahead
                stream.replies(1)
                stream.send(calls.call(2, large))
                calls.until(lambda times=times: ended(server) == times, "it is late")  # type: ignore[misc]
                calls.until_nothing_is_in_flight(server.http_address)
                calls.until(lambda: metric(server, "streams") == 0, "it is gone")
        calls.until(
            lambda: own_bytes(server) - idle < KEPT + 48 * MIB, "what the heap does not keep has been given back"
        )


def test_who_reads_after_all_is_told_why_the_stream_ended(tmp_path: Path) -> None:
    with (
        serving(tmp_path, "--max-unread-time", "1s", farewell=calls.PATIENCE_S) as server,
        grpc.insecure_channel(server.address, OPTIONS) as channel,
    ):
        stream = calls.Stream(channel)
        stream.send(*(calls.call(number, calls.large_reply()) for number in range(3)))
        calls.until(lambda: ended(server) == 1, "it is late")
        calls.until(lambda: 0 < metric(server, "in_flight_requests") <= 1, "what gRPC still has counts")
        with pytest.raises(grpc.RpcError) as raised:
            stream.rest()
        error: Any = raised.value
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert calls.detail(calls.status_of(error), error_details_pb2.ErrorInfo).reason == "REPLIES_UNREAD"
        calls.until_nothing_is_in_flight(server.http_address)


def test_the_sdk_says_why_a_stream_ended(tmp_path: Path) -> None:
    ones = np.ones((1, 1500, 1), np.float32)
    with serving(tmp_path, "--max-unread-time", "1s", farewell=calls.PATIENCE_S) as server, Dam(server.address) as dam:
        with Client(dam.address) as client:
            client.attend(ones[:, :1], ones[:, :1], ones[:, :1])
            dam.shut()
            futures = [client.submit(ones, ones, ones, return_scores="raw") for _ in range(3)]
            calls.until(lambda: ended(server) == 1, "it is late")
            dam.open()
            errors = [future.exception(calls.PATIENCE_S) for future in futures]
        (error, *_) = found = [error for error in errors if error is not None]
        assert len(found) < 3, "the reply that was on its way arrives"
        assert isinstance(error, OverloadedError)
        assert error.reason == "REPLIES_UNREAD"
        assert "was not read within" in str(error)


def test_a_connection_that_takes_nothing_is_closed_and_its_caller_tries_again(tmp_path: Path) -> None:
    ones = np.ones((1, 1500, 1), np.float32)
    with (
        serving(tmp_path, "--max-unread-time", "1s") as server,
        Dam(server.address) as dam,
        Client(dam.address) as client,
    ):
        client.attend(ones[:, :1], ones[:, :1], ones[:, :1])
        dam.shut()
        future = client.submit(ones, ones, ones, return_scores="raw")
        calls.until(lambda: ended(server) == 1, "it is late")
        calls.until_nothing_is_in_flight(server.http_address)
        calls.until(lambda: metric(server, "streams") == 0, "it is gone")
        dam.open()
        assert future.result(calls.PATIENCE_S).output.shape == (1, 1500, 1)


def test_unary_replies_that_do_not_arrive_end_with_their_connection(tmp_path: Path) -> None:
    large = calls.large_reply().SerializeToString()
    with (
        serving(tmp_path, "--max-unread-time", "1s") as server,
        Dam(server.address) as dam,
        grpc.insecure_channel(dam.address, OPTIONS) as slow,
        grpc.insecure_channel(server.address, OPTIONS) as other,
    ):
        grpc.channel_ready_future(slow).result(calls.PATIENCE_S)
        dam.shut()
        futures = [calls.unary_future(slow, "Attend", large) for _ in range(4)]
        calls.until(lambda: ended(server) > 0, "they are late")
        calls.until_nothing_is_in_flight(server.http_address)
        assert len(calls.unary(other, "Attend", large)) > 8 * MIB
        dam.open()
        assert {future.code() for future in futures} <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
        assert "attend refused" in server.stderr() or "REPLIES_UNREAD" in server.stderr()


def test_who_reads_is_left_alone(tmp_path: Path) -> None:
    """Also while the server has nothing to send, and where a long stream of replies takes longer than one may."""
    with (
        serving(tmp_path, "--max-unread-time", "500ms") as server,
        grpc.insecure_channel(server.address, OPTIONS) as channel,
    ):
        stream = calls.Stream(channel)
        stream.send(calls.call(1, messages.random_attend(0)))
        stream.replies(1)
        resting = threading.Event()
        resting.wait(1.5)  # longer than a reply may take
        for number in range(2, 12):
            stream.send(calls.call(number, calls.large_reply()))
        assert [reply.error.code for reply in stream.replies(10)] == [code_pb2.OK] * 10
        stream.half_close()
        stream.rest()
        assert ended(server) == 0


def test_for_ever_is_possible(start_server: Callable[..., Server]) -> None:
    server = start_server("--max-unread-time", "0")
    with grpc.insecure_channel(server.address, OPTIONS) as channel:
        reply = calls.unary(channel, "Attend", calls.large_reply().SerializeToString())
        assert len(reply) > 8 * MIB
        stream = calls.Stream(channel)
        stream.send(calls.call(1, messages.random_attend(0)))
        assert [reply.id for reply in stream.replies(1)] == [1]


def replies(max_time: float = 30.0) -> UnreadReplies:
    return UnreadReplies(max_time, ANYBODY, endings_of(new_metrics()))


class Late:
    """Which replies were late, and when."""

    def __init__(self, clock: Clock) -> None:
        self.at: dict[str, float] = {}
        self._clock = clock

    def named(self, name: str) -> Callable[[RepliesUnread], object]:
        def late(error: RepliesUnread) -> None:
            assert name not in self.at
            self.at[name] = self._clock.now - 100

        return late


@pytest.mark.parametrize(
    ("size", "least", "most"),
    [(100, 30, 34), (30 * MIB, 60, 64), (200 * MIB, 230, 234)],
)
def test_a_long_reply_may_take_as_long_as_on_a_slow_link(clock: Clock, size: int, least: float, most: float) -> None:
    sent, late = replies(), Late(clock)
    sent.begin("ipv4:192.0.2.1:1", size, late.named("it"))
    clock.until(100 + least - 0.1)
    assert not late.at
    clock.until(1000)
    assert least <= late.at["it"] <= most
    assert not clock.timers, "nothing is left to look at"


def test_replies_on_one_connection_take_turns(clock: Clock) -> None:
    """With 1 000 of 1 MiB each, at 10 MiB/s, all take 100 s."""
    sent, late = replies(), Late(clock)
    for number in range(1000):
        sent.begin("ipv4:192.0.2.1:1", MIB, late.named(str(number)))
    sent.begin("ipv4:192.0.2.1:2", MIB, late.named("alone"))
    clock.until(100 + 100)
    assert list(late.at) == ["alone"]
    clock.until(100 + 170)
    assert len(late.at) == 1001


def test_what_is_sent_after_a_pause_may_be_late_too(clock: Clock) -> None:
    sent, late = replies(), Late(clock)
    sent.end(sent.begin("ipv4:192.0.2.1:1", 100, late.named("in time")))
    clock.until(500)
    assert not clock.timers, "nothing is left to look at"
    sent.begin("ipv4:192.0.2.1:1", 100, late.named("late"))
    clock.until(1000)
    assert 400 + 30 <= late.at["late"] <= 400 + 34
    assert len(late.at) == 1


def test_what_is_sent_is_not_late_and_is_looked_at_rarely(clock: Clock) -> None:
    sent, late = replies(), Late(clock)
    looks = 0
    for second in range(300):
        sending = [sent.begin("ipv4:192.0.2.1:1", 100, late.named(f"{second}/{number}")) for number in range(10)]
        looks += clock.until(101 + second)
        for each in sending:
            sent.end(each)
    assert not late.at
    assert looks <= 300 * unread.LOOKS / 30 + 1
