"""Replies of calls that nothing else counts, to callers that take none of them: how many a server keeps, over real
sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import calls
import grpc
import pytest
from frames import HEADERS, Connection
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rpcs import due_messages, new_metrics, rpcs_of

from attnserve_server.errors import Overloaded
from attnserve_server.observability.health import Health
from attnserve_server.rpc.health_service import HealthService
from attnserve_server.rpc.open_rpcs import OpenRpcs
from attnserve_server.rpc.replies_due import OF_CONNECTION, RepliesDue

if TYPE_CHECKING:
    from conftest import Server

CHECK = "/grpc.health.v1.Health/Check"
METHODS = (
    CHECK,
    "/attnserve.v1.AttentionService/ServerInfo",
    "/attnserve.v1.LayerService/List",
)
OF_ONE, OF_ALL = 3, 8


def test_a_connection_keeps_so_many_waiting(start_server: Callable[..., Server]) -> None:
    """Of any more, it is told so without a message; others are answered."""
    server = start_server()
    for place, path in enumerate(METHODS, 1):
        with Connection(server.address, window=0) as deaf, grpc.insecure_channel(server.address) as other:
            deaf.begin(path, OF_CONNECTION + 5)
            assert deaf.until(HEADERS, True, 5), path
            refused = calls.metric(server.http_address, "attnserve_rejected_requests_total", reason="unread_replies")
            assert refused == 5 * place, path
            assert calls.unary(other, "ServerInfo", b"")
            assert health_pb2_grpc.HealthStub(other).Check(health_pb2.HealthCheckRequest(), timeout=calls.PATIENCE_S)
        with Connection(server.address, window=0) as deaf:
            deaf.begin(path)
            assert deaf.until(HEADERS, False, 1), f"there is room again: {path}"
    assert server.stop() == 0
    assert "Traceback" not in server.stderr()


def test_replies_that_are_not_read_end_with_their_connection(start_server: Callable[..., Server]) -> None:
    server = start_server("--max-unread-time", "100ms")
    late = 0.0
    for path in METHODS:
        with Connection(server.address, window=0) as deaf:
            deaf.begin(path, 3)
            assert deaf.is_closed_in_time(), path
        before, late = late, calls.metric(server.http_address, "attnserve_rejected_requests_total", reason="unread")
        assert late > before, path
    assert server.stop() == 0
    assert "Traceback" not in server.stderr()


class Small(NamedTuple):
    """A server of health that keeps few replies waiting."""

    address: str
    due: RepliesDue


@pytest.fixture
async def small() -> AsyncIterator[Small]:
    server = aio.server(options=[("grpc.so_reuseport", 0)])
    rpcs = rpcs_of(new_metrics())
    rpcs.replies_due = RepliesDue(OF_ONE, OF_ALL)
    HealthService(Health(), rpcs, OpenRpcs(1), due_messages()).register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield Small(f"127.0.0.1:{port}", rpcs.replies_due)
    await server.stop(None)


async def test_of_too_many_in_all_the_oldest_are_ended_and_nobody_else_is_refused(small: Small) -> None:
    with ExitStack() as stack:
        deaf = [stack.enter_context(Connection(small.address, window=0)) for _ in range(4)]
        for number, connection in enumerate(deaf[:2], 1):
            await asyncio.to_thread(connection.begin, CHECK, OF_ONE)
            assert await asyncio.to_thread(connection.until, HEADERS, False, OF_ONE)
            assert len(small.due) == number * OF_ONE
        async with aio.insecure_channel(small.address) as channel:
            prober = health_pb2_grpc.HealthStub(channel)
            for connection in deaf[2:]:
                await asyncio.to_thread(connection.begin, CHECK, 2)
                assert await asyncio.to_thread(connection.until, HEADERS, False, 2)
                for _ in range(10):
                    assert await prober.Check(health_pb2.HealthCheckRequest(), timeout=calls.PATIENCE_S)
        assert await asyncio.to_thread(deaf[0].is_closed_in_time)
        assert all(connection.seen[HEADERS, True] == 0 for connection in deaf), "none was refused"
        assert 2 + 2 <= len(small.due) <= OF_ALL, "those of the last two connections are kept"


async def test_on_a_connection_there_is_room_again_once_a_reply_is_sent() -> None:
    due, peer = RepliesDue(OF_ONE, OF_ALL), "ipv4:192.0.2.1:50000"

    async def call(sent: asyncio.Event) -> None:
        due.require_room(peer)
        due.begin(peer)
        await sent.wait()

    def begin() -> tuple[asyncio.Event, asyncio.Task[None]]:
        return (sent := asyncio.Event()), asyncio.create_task(call(sent))

    running = [begin() for _ in range(OF_ONE)]
    for _ in range(2 * OF_ONE):
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=f"as one may have: {OF_ONE}"):
            due.require_room(peer)
        due.require_room("ipv4:192.0.2.1:50001")
        sent, oldest = running.pop(0)
        sent.set()
        await oldest
        running.append(begin())
    for sent, last in running:
        sent.set()
        await last
    assert not len(due)


async def test_those_on_a_unix_socket_are_refused_when_all_are_too_many() -> None:
    """They look alike, and their connections cannot be closed."""
    due = RepliesDue(OF_ONE, OF_ALL)
    over = asyncio.Event()

    async def call() -> None:
        due.require_room("unix:")
        due.begin("unix:")
        await over.wait()

    running = [asyncio.create_task(call()) for _ in range(OF_ALL)]
    await asyncio.sleep(0)
    assert len(due) == OF_ALL
    with pytest.raises(Overloaded, match=f"all callers together have as many calls .* as they may have: {OF_ALL}"):
        due.require_room("unix:")
    over.set()
    await asyncio.gather(*running)
    due.require_room("unix:")
    assert not len(due)
