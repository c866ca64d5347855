"""The fast path of a real server, seen from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import calls
import grpc
import messages
import numpy as np
import oracle
import pytest
from google.rpc import code_pb2

from attnserve import Client
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.native import library

if TYPE_CHECKING:
    from conftest import Server

pytestmark = pytest.mark.skipif(not library.available(), reason="no native kernel is here")


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    options = (*calls.ANY_LENGTH, ("grpc.use_local_subchannel_pool", 1))
    with grpc.insecure_channel(server.address, options=options) as channel:
        yield channel


def ask(stream: calls.Stream, request: pb.AttendRequest, call_id: int) -> pb.AttendStreamReply:
    stream.send(calls.call(call_id, request))
    (reply,) = stream.replies(1)
    assert reply.id == call_id
    return reply


def test_a_stream_is_answered_at_once_from_the_third_time_on(server: Server, channel: grpc.Channel) -> None:
    """A queue time of exactly 0 shows that a request took the fast path."""
    calls.until_nothing_is_in_flight(server.http_address)
    counted = {"operation": "attend_stream", "code": "OK"}
    before = calls.metric(server.http_address, "attnserve_requests_total", **counted)
    stream = calls.Stream(channel)
    replies = [ask(stream, messages.random_attend(seed, 7, scale=0.731), seed + 1) for seed in range(20)]
    for seed, reply in enumerate(replies):
        calls_of = messages.random_attend(seed, 7, scale=0.731)
        expected = _attended(calls_of)
        np.testing.assert_allclose(messages.array(reply.attend.output), expected, rtol=0, atol=2e-6)
    assert replies[0].attend.timings.queue_ns > 0
    assert any(reply.attend.timings.queue_ns == 0 for reply in replies[2:])
    assert calls.metric(server.http_address, "attnserve_requests_total", **counted) == before + 20
    calls.until_nothing_is_in_flight(server.http_address)


@pytest.mark.parametrize("flags", [(), ("--inline-flops", "0")], ids=["fast", "ordinary"])
def test_all_is_counted_as_elsewhere(start_server: Callable[..., Server], flags: tuple[str, ...]) -> None:
    server = start_server("--device", "cpu", *flags)
    with grpc.insecure_channel(server.address) as channel:
        stream = calls.Stream(channel)
        for first in (1, 101, 201, 301):
            requests = [messages.random_attend(seed, 5) for seed in range(3)]
            stream.send(*(calls.call(first + number, request) for number, request in enumerate(requests)))
            stream.replies(3)
        for seed in range(4):
            calls.unary(channel, "Attend", messages.random_attend(seed, 6).SerializeToString())
        calls.until_nothing_is_in_flight(server.http_address)
        ran = {"requests_total": 16, "query_tokens_total": 4 * 3 * 5 + 4 * 6}
        for name, count in ran.items():
            assert calls.metric(server.http_address, f"attnserve_caller_{name}", caller="anonymous") == count
        assert calls.metric(server.http_address, "attnserve_query_tokens_total") == ran["query_tokens_total"]
        for operation, count in (("attend_stream", 12), ("attend", 4)):
            labels = {"operation": operation, "code": "OK"}
            assert calls.metric(server.http_address, "attnserve_requests_total", **labels) == count
            name = "attnserve_request_duration_seconds_count"
            assert calls.metric(server.http_address, name, operation=operation) == count
        assert calls.metric(server.http_address, "attnserve_device_busy_seconds_total") > 0
        stream.half_close()


def _attended(request: pb.AttendRequest) -> messages.Array:
    arrays = (messages.array(getattr(request, name)) for name in ("query", "key", "value"))
    return oracle.attend(*arrays, scale=request.scale).output


def test_unary_calls_are_answered_at_once_from_the_third_time_on(server: Server, channel: grpc.Channel) -> None:
    calls.until_nothing_is_in_flight(server.http_address)
    counted = {"operation": "attend", "code": "OK"}
    before = calls.metric(server.http_address, "attnserve_requests_total", **counted)
    waited = set()
    for seed in range(20):
        request = messages.random_attend(seed, 11)
        reply = pb.AttendResponse.FromString(calls.unary(channel, "Attend", request.SerializeToString()))
        calls.assert_answers(reply, request)
        waited.add(reply.timings.queue_ns > 0)
    assert waited == {True, False}
    assert calls.metric(server.http_address, "attnserve_requests_total", **counted) == before + 20


def spoil(request: pb.AttendRequest) -> None:
    array = messages.array(request.key).copy()
    array[0, 0, 0, 0] = np.nan
    request.key.data = array.tobytes()


@pytest.mark.parametrize("times", [1, 6])
def test_nan_and_duplicate_ids_are_what_they_are_elsewhere(server: Server, channel: grpc.Channel, times: int) -> None:
    """However often requests of this layout came before."""
    calls.until_nothing_is_in_flight(server.http_address)
    stream = calls.Stream(channel)
    request = messages.random_attend(0, 9, causal=True)
    for number in range(times):
        ask(stream, request, number + 1)
    stream.send(calls.call(50, request), calls.call(50, request))
    twice = stream.replies(2)
    assert sorted(reply.error.code for reply in twice) == [0, code_pb2.INVALID_ARGUMENT]
    spoil(request)
    reply = ask(stream, request, 60)
    found = messages.array(reply.attend.output)
    assert np.isnan(found[0, 0]).all()  # every query of the first head attends to the first key
    assert np.isfinite(found[0, 1]).all()


def test_the_steps_of_a_decoder_are_answered_at_once_too(server: Server) -> None:
    rng = np.random.default_rng(3)
    query, key, value = (rng.standard_normal((2, 30, 8)).astype(np.float32) for _ in range(3))
    with Client(server.address) as client, client.create_cache(2, 8) as cache, cache.fork() as twin:
        waited = []
        for number in range(30):
            token = slice(number, number + 1)
            results = [
                each.attend(query[:, token], key=key[:, token], value=value[:, token], causal=True)
                for each in (cache, twin)
            ]
            for result in results:
                expected = oracle.attend(
                    *(part[None] for part in (query[:, token], key[:, : number + 1], value[:, : number + 1]))
                )
                np.testing.assert_allclose(result.output, expected.output[0], rtol=0, atol=2e-6)
                waited.append(result.timings.queue)
        assert cache.length == twin.length == 30
        assert waited.count(0.0) > 40
