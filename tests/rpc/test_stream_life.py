"""Connections and streams that grow old: callers are asked to leave, and lose nothing."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import calls
import grpc
import messages
import numpy as np
import pytest
from grpc import aio

from attnserve import Client
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import caches_pb2, tensor_pb2
from attnserve_server.rpc.stream import CallStream
from attnserve_server.rpc.stream_life import StreamLife
from attnserve_server.server import Server as InProcess
from attnserve_server.server import configured_device
from attnserve_server.settings.config import MOST_CONNECTION_AGE, Config

if TYPE_CHECKING:
    from tests.conftest import Server

ADDRESS = "replica-0.attnserve:8001"


def test_old_streams_are_asked_to_leave_and_end_in_good_order(start_server: Callable[..., Server]) -> None:
    server = start_server("--max-connection-age=200ms", "--drain-grace=3s", "--advertise-address", ADDRESS)
    request = messages.random_attend(1)
    with grpc.insecure_channel(server.address) as channel:
        polite, stubborn = calls.Stream(channel), calls.Stream(channel)
        stubborn.send(calls.call(1, request))
        sent = 0
        while not polite.closing:
            sent += 1
            polite.send(calls.call(sent, request))
            (reply,) = polite.replies(1)
            calls.assert_answers(reply.attend, request)
        # A stream asked to close still answers until it is closed.
        polite.send(calls.call(sent + 1, request))
        polite.half_close()
        assert [reply.id for reply in polite.rest()] == [sent + 1]
        # One that its caller does not close ends by itself, and loses no answered call.
        assert [reply.id for reply in stubborn.rest()] == [1]
        assert stubborn.closing

        # And callers learn the address of this very server.
        info = pb.ServerInfoResponse.FromString(calls.unary(channel, "ServerInfo", b""))
        create = channel.unary_unary("/attnserve.v1.CacheService/Create")
        shape = caches_pb2.CacheServiceCreateRequest(num_kv_heads=1, head_dim=8, dtype=tensor_pb2.DATA_TYPE_FLOAT32)
        created = create(shape.SerializeToString(), timeout=calls.PATIENCE_S)
        cache = caches_pb2.CacheServiceCreateResponse.FromString(created).cache
        assert (info.address, cache.address) == (ADDRESS, ADDRESS)


def test_a_caller_may_leave_though_the_server_has_no_grace(start_server: Callable[..., Server]) -> None:
    """What was sent before the stream was closed is answered; on a busy machine maybe not every time."""
    server = start_server("--max-connection-age=200ms", "--drain-grace=0")
    request = messages.random_attend(1)

    def is_answered() -> bool:
        with grpc.insecure_channel(server.address, (("grpc.use_local_subchannel_pool", 1),)) as channel:
            stream = calls.Stream(channel)
            while not stream.closing:
                stream.send(calls.call(1, request))
                try:
                    stream.replies(1)
                except StopIteration:  # the stream has ended: it took too long to close it
                    return False
            stream.send(calls.call(2, request))
            stream.half_close()
            return [reply.id for reply in stream.rest()] == [2]

    calls.until(is_answered, "a call is answered on a stream that its caller was asked to close")


def test_the_sdk_goes_from_stream_to_stream_and_sends_nothing_twice(start_server: Callable[..., Server]) -> None:
    server = start_server("--max-connection-age=200ms")
    query = np.ones((2, 4, 8), np.float32)
    with Client(server.address, retries=0) as client:  # so that a call that was not read would fail
        streams = client._calls.servers.connection().stream()._multiplexer
        while streams._last_stream < 4:
            for future in [client.submit(query, query, query) for _ in range(8)]:
                assert future.result(timeout=calls.PATIENCE_S).output.shape == query.shape


def kept() -> int:
    """How many streams there are in memory. Only types are looked at: some objects in memory warn of any other look."""
    gc.collect()
    return sum(issubclass(type(each), CallStream) for each in gc.get_objects())


@pytest.mark.parametrize("age", [0.1, 3600.0])
async def test_nothing_is_kept_of_a_stream_that_has_ended(age: float) -> None:
    """Whether or not it had been asked to leave, however long it could have stayed."""
    where = {"listen": "127.0.0.1:0", "http_listen": "127.0.0.1:0"}
    config = Config(**where, device="cpu", cache_bytes=1 << 20, max_connection_age=age, drain_grace=3600.0)
    server = InProcess(config, configured_device)
    address, _ = await server.start()
    try:
        async with aio.insecure_channel(address) as channel:
            stream = channel.stream_stream("/attnserve.v1.AttentionService/AttendStream")(timeout=calls.PATIENCE_S)
            await stream.write(pb.AttendStreamRequest(calls=[calls.call(1, None)]).SerializeToString())
            response = pb.AttendStreamResponse.FromString(await stream.read())
            assert kept() == 1
            while age < 1 and not response.closing:
                response = pb.AttendStreamResponse.FromString(await stream.read())
            await stream.done_writing()
            while await stream.read() is not aio.EOF:
                pass
            deadline = time.monotonic() + calls.PATIENCE_S
            while kept():
                assert time.monotonic() < deadline, "it is still there"
                await asyncio.sleep(0.02)
    finally:
        await server.drain()
        await server.stop()


def test_grpc_cuts_no_stream_off_before_it_has_left() -> None:
    life = StreamLife(age=100.0, grace=30.0)
    options = dict(life.channel_options)
    tenth = 1.1  # gRPC varies the age by up to a tenth either way
    assert options["grpc.max_connection_age_ms"] * tenth < 100_000, "a stream that retires meets a new connection"
    # The youngest stream began as the connection's age ran out, retires a tenth late, and uses its whole grace.
    assert options["grpc.max_connection_age_grace_ms"] > 110_000 + 30_000


def test_ages_and_graces_that_grpc_cannot_count_are_as_long_as_they_can_be(start_server: Callable[..., Server]) -> None:
    """GRPC takes 32-bit integers, the greatest of which means no limit."""
    options = dict(StreamLife(MOST_CONNECTION_AGE, 1e308).channel_options)
    assert 0.7 * MOST_CONNECTION_AGE * 1000 < options["grpc.max_connection_age_ms"] < 2**31 - 1
    assert options["grpc.max_connection_age_grace_ms"] == 2**31 - 1
    server = start_server(
        "--max-connection-age", f"{MOST_CONNECTION_AGE}s", "--drain-grace=1e300", "--cache-bytes=1MiB"
    )
    with Client(server.address) as client:
        assert client.server_info().version
