"""The unary RPCs and a server's limits, over a real socket, with raw messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import calls
import grpc
import messages
import numpy as np
import pytest
from google.rpc import code_pb2, error_details_pb2
from occupied import Occupied

from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from attnserve_server import __version__
from attnserve_server.requests.limits import default_request_flops
from attnserve_server.scheduling.opening import BATCH_FLOPS
from attnserve_server.settings.config import Config

if TYPE_CHECKING:
    from conftest import Server


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def attend(channel: grpc.Channel, request: pb.AttendRequest, **options: Any) -> pb.AttendResponse:
    return pb.AttendResponse.FromString(calls.unary(channel, "Attend", request.SerializeToString(), **options))


def test_unary(channel: grpc.Channel) -> None:
    request = messages.random_attend(0, 5, kv_length=7, causal=True)
    reply = attend(channel, request)
    calls.assert_answers(reply, request)
    assert reply.batch_size == 1
    assert not reply.HasField("lse")
    assert not reply.HasField("scores")
    timings = reply.timings
    assert all(
        0 < phase < calls.PATIENCE_S * 1e9 for phase in (timings.decode_ns, timings.queue_ns, timings.compute_ns)
    )
    # The native kernel reads the received message and writes the reply in place, so these may be 0.
    assert all(0 <= phase < calls.PATIENCE_S * 1e9 for phase in (timings.staging_ns, timings.encode_ns))


def test_a_burst_of_unary_calls_that_there_is_room_for_is_taken_whole(server: Server) -> None:
    """They come faster than the event loop can begin them: gRPC's core must cancel none."""
    request = messages.random_attend(0)
    options = (("grpc.use_local_subchannel_pool", 1),)
    with grpc.insecure_channel(server.address, options) as one, grpc.insecure_channel(server.address, options) as other:
        payload = request.SerializeToString()
        futures = [calls.unary_future(channel, "Attend", payload) for _ in range(1500) for channel in (one, other)]
        assert {future.code() for future in futures} == {grpc.StatusCode.OK}


def test_unary_and_stream_give_the_same_bits(channel: grpc.Channel) -> None:
    request = messages.random_attend(0, 9, causal=True, return_lse=True, return_scores=pb.SCORE_STAGE_WEIGHTS)
    stream = calls.Stream(channel)
    stream.send(*(calls.call(number, request) for number in range(3)))
    alone = attend(channel, request)
    for reply in stream.replies(3):
        for name in ("output", "lse", "scores"):
            assert getattr(reply.attend, name) == getattr(alone, name)
    stream.half_close()
    assert stream.rest() == []


def test_a_bad_request_names_its_field(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        attend(channel, messages.random_attend(0, kv_lengths=np.array([99])))
    error: Any = caught.value
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    status = calls.status_of(error)
    assert (status.code, status.message) == (code_pb2.INVALID_ARGUMENT, error.details())
    (violation,) = calls.detail(status, error_details_pb2.BadRequest).field_violations
    assert violation.field == "kv_lengths[0]"
    assert "99" in violation.description


@pytest.mark.parametrize("method", ["Attend", "ServerInfo"])
def test_garbage_is_the_callers_mistake(channel: grpc.Channel, method: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        calls.unary(channel, method, b"\xff\xff")
    error: Any = caught.value
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    calls.assert_answers(attend(channel, messages.random_attend(0)), messages.random_attend(0))


def test_what_does_not_exist(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        calls.unary(channel, "Attain", b"")
    error: Any = caught.value
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED


def test_server_info(channel: grpc.Channel) -> None:
    info = pb.ServerInfoResponse.FromString(calls.unary(channel, "ServerInfo", b""))
    assert info.version == __version__
    assert re.fullmatch(r"cpu|cuda:\d+", info.device)
    assert info.device_name
    assert info.torch_version
    assert (info.threads > 0) == (info.device == "cpu")
    floating = ("FLOAT32", "FLOAT16", "BFLOAT16", "FLOAT64")
    assert sorted(info.dtypes) == sorted(tensor_pb2.DataType.Value(f"DATA_TYPE_{name}") for name in floating)
    config = Config()
    no_settings = {
        "max_request_flops": default_request_flops(info.threads, config.max_flops),  # depends on the device
        "max_batch_flops": BATCH_FLOPS,
        "max_header_bytes": (1 << 16) + 64 * config.max_sequences,
        "max_request_fields": 1 << 18,
        "max_call_fields": 64,
        "max_plain_message_bytes": 4 << 20,
        "max_axis_length": 2**31 - 1,
    }
    for field, limit in info.limits.ListFields():
        expected = no_settings[field.name] if field.name in no_settings else getattr(config, field.name)
        assert limit == expected, field.name
    assert len(info.limits.ListFields()) == len(info.limits.DESCRIPTOR.fields)
    assert all(kernel.name and kernel.description for kernel in info.kernels)
    assert "reflection" in info.features


def test_a_caller_that_gives_up_leaves_nothing_behind(server: Server, channel: grpc.Channel) -> None:
    def cancelled() -> float:
        return calls.metric(server.http_address, "attnserve_requests_total", operation="attend", code="CANCELLED")

    before = cancelled()
    with Occupied(server) as device:
        call = calls.unary_future(channel, "Attend", messages.random_attend(0).SerializeToString(), timeout=None)
        device.until_waiting(1)
        call.cancel()
        calls.until(lambda: cancelled() == before + 1, "it is cancelled")
    calls.until_nothing_is_in_flight(server.http_address)


def test_a_deadline_that_passes_in_the_queue(server: Server, channel: grpc.Channel) -> None:
    with Occupied(server), pytest.raises(grpc.RpcError) as caught:
        attend(channel, messages.random_attend(0), timeout=0.02)
    error: Any = caught.value
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    calls.until_nothing_is_in_flight(server.http_address)


def assert_tells_when_to_retry(status: Any) -> float:
    """Asserts that the status says that the server is full; returns the retry delay in seconds."""
    assert status.code == code_pb2.RESOURCE_EXHAUSTED
    assert calls.detail(status, error_details_pb2.ErrorInfo).metadata["bound"] == "requests"
    delay: float = calls.detail(status, error_details_pb2.RetryInfo).retry_delay.ToNanoseconds() / 1e9
    assert 0.001 <= delay <= 10.0
    return delay


def test_a_full_server_says_when_to_come_back(start_server: Callable[..., Server]) -> None:
    server = start_server("--max-requests", "2")
    with grpc.insecure_channel(server.address, calls.ANY_LENGTH) as channel:
        unread, large = calls.Stream(channel), calls.large_reply()
        unread.send(calls.call(1, large), calls.call(2, large))
        calls.until(lambda: calls.metric(server.http_address, "attnserve_in_flight_requests") == 2, "it is full")
        stream, request = calls.Stream(channel), messages.random_attend(0)
        stream.send(calls.call(3, request))
        (refused,) = stream.replies(1)
        assert_tells_when_to_retry(refused.error)

        with pytest.raises(grpc.RpcError) as caught:
            attend(channel, request)
        error: Any = caught.value
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        delay = assert_tells_when_to_retry(calls.status_of(error))
        pushback = int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"])
        assert pushback == pytest.approx(delay * 1000, abs=1)

        assert calls.metric(server.http_address, "attnserve_rejected_requests_total", reason="requests") == 2
        unread.half_close()
        assert {reply.id: reply.error.code for reply in unread.rest()} == {1: 0, 2: 0}
        calls.until_nothing_is_in_flight(server.http_address)
        stream.send(calls.call(3, request))
        calls.assert_answers(stream.replies(1)[0].attend, request)
        stream.half_close()
        calls.until_nothing_is_in_flight(server.http_address)


def test_messages_above_the_limits(start_server: Callable[..., Server]) -> None:
    """GRPC refuses messages that are too long unread; too many calls end their stream. The server lives on."""
    server = start_server("--max-message-bytes", "64KiB", "--max-message-calls", "1024")
    request = messages.random_attend(0)
    too_long = messages.random_attend(0, 1000, heads=4)
    with grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            attend(channel, too_long)
        error: Any = caught.value
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        stream = calls.Stream(channel)
        stream.send(calls.call(1, too_long))
        assert stream.error()[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
        stream = calls.Stream(channel)
        stream.send(*(calls.call(number, request) for number in range(3)))
        assert [reply.error.code for reply in stream.replies(3)] == [0, 0, 0]
        stream.send(*(pb.AttendStreamCall(id=number) for number in range(1025)))  # they ask for nothing, but they count
        assert stream.error()[0] == grpc.StatusCode.INVALID_ARGUMENT
        calls.assert_answers(attend(channel, request), request)
    calls.until_nothing_is_in_flight(server.http_address)
    assert server.stop() == 0
    assert " error " not in server.stderr(), "it is no fault of the server"
    assert "Traceback" not in server.stderr()
