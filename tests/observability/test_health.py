"""Liveness and readiness, over a real gRPC server."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rpcs import due_messages, new_metrics, rpcs_of

from attnserve_server.no_room import too_many_unsent
from attnserve_server.observability.health import Health
from attnserve_server.rpc import messages_due
from attnserve_server.rpc.health_service import HealthService
from attnserve_server.rpc.open_rpcs import OpenRpcs

SERVICES = ("attnserve.v1.AttentionService", "attnserve.v1.CacheService", "attnserve.v1.LayerService")
READINESS = ("", "readiness", *SERVICES)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
OF_ONE, OF_ALL = 20, 30
"""The most watches."""
UNSENT = OF_ALL + 5
"""The most calls of a connection whose messages have not come."""


@pytest.fixture
async def health() -> Health:
    return Health()


@pytest.fixture
async def server(health: Health) -> AsyncIterator[tuple[grpc.aio.Server, int]]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    rpcs = rpcs_of(new_metrics())
    HealthService(health, rpcs, OpenRpcs(OF_ONE, OF_ALL), due_messages(UNSENT)).register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield server, port
    await server.stop(None)


@pytest.fixture
async def stub(server: tuple[grpc.aio.Server, int]) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server[1]}") as channel:
        yield health_pb2_grpc.HealthStub(channel)


async def check(stub: Any, service: str) -> Any:
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def read(watch: Any) -> Any:
    return (await asyncio.wait_for(watch.read(), 60)).status


async def test_a_call_whose_message_does_not_come_is_refused_once_there_are_enough(
    server: tuple[grpc.aio.Server, int], stub: Any
) -> None:
    """Of one connection; others are answered."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server[1]}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        checks = [channel.stream_unary("/grpc.health.v1.Health/Check")() for _ in range(UNSENT)]
        watches = [channel.stream_stream("/grpc.health.v1.Health/Watch")() for _ in range(2)]
        ended = [asyncio.ensure_future(each.code()) for each in (*checks, *watches)]
        done, _ = await asyncio.wait(ended, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 2:
            done |= (await asyncio.wait({*ended} - done, timeout=60, return_when=asyncio.FIRST_COMPLETED))[0]
        assert [each.result() for each in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
        assert await check(stub, "") == NOT_SERVING
        for each in (*checks, *watches):
            each.cancel()


async def test_a_message_may_not_take_long(health: Health) -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    rpcs = rpcs_of(new_metrics())
    HealthService(health, rpcs, OpenRpcs(OF_ONE), due_messages(max_time=0.05)).register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for call in (
            channel.stream_unary("/grpc.health.v1.Health/Check")(),
            channel.stream_stream("/grpc.health.v1.Health/Watch")(),
        ):
            assert await asyncio.wait_for(call.code(), 60) is grpc.StatusCode.INVALID_ARGUMENT
    await server.stop(None)


async def test_where_many_messages_are_due_few_may_take_long(health: Health, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a connection may here; and nobody is refused whose message comes with its call."""
    monkeypatch.setattr(messages_due, "CROWDED_S", 2.0)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    rpcs = rpcs_of(new_metrics())
    due = due_messages(max_time=600, unhurried=OpenRpcs(1, 2, too_many_unsent))
    HealthService(health, rpcs, OpenRpcs(OF_ONE), due).register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            calls = [channel.stream_unary("/grpc.health.v1.Health/Check")() for _ in range(4)]
            ends = [asyncio.create_task(call.code()) for call in calls]
            for end in itertools.islice(asyncio.as_completed(ends, timeout=60), 3):
                assert await end is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await check(health_pb2_grpc.HealthStub(channel), "") == NOT_SERVING
            (patient,) = (call for call in calls if not call.done())
            patient.cancel()
            await asyncio.wait(ends)
    finally:
        await server.stop(None)


async def test_liveness_stays_while_draining(stub: Any, health: Health) -> None:
    for state, ready, live in (
        ("starting", NOT_SERVING, SERVING),
        ("serving", SERVING, SERVING),
        ("draining", NOT_SERVING, SERVING),
        ("failed", NOT_SERVING, NOT_SERVING),
    ):
        health.set(state)  # type: ignore[arg-type]
        assert [await check(stub, service) for service in READINESS] == [ready] * len(READINESS)
        assert await check(stub, "liveness") == live
        assert (health.ready, health.live) == (ready == SERVING, live == SERVING)


async def test_a_state_that_lies_behind_is_ignored(health: Health) -> None:
    health.set("draining")
    health.set("serving")  # by a warm-up that was still running when the server was told to stop
    assert health.state == "draining"
    health.set("failed")
    health.set("draining")
    assert not health.live


async def test_a_draining_server_accepts_until_it_refuses(stub: Any, health: Health) -> None:
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="acceptance"))
    assert await read(watch) == NOT_SERVING
    health.set("serving")
    assert await read(watch) == SERVING
    health.set("draining")
    assert await check(stub, "acceptance") == SERVING
    health.refuse()
    assert await read(watch) == NOT_SERVING
    assert await check(stub, "liveness") == SERVING
    watch.cancel()


async def test_what_changes_as_the_watches_end_is_told(stub: Any, health: Health) -> None:
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="liveness"))
    assert await read(watch) == SERVING
    health.set("failed")
    health.close()
    assert await read(watch) == NOT_SERVING


async def test_an_unknown_service(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(stub, "no.such.Service")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="no.such.Service"))
    assert await read(watch) == UNKNOWN
    watch.cancel()


async def test_watchers_see_each_change_and_only_changes(stub: Any, health: Health) -> None:
    watches = {
        service: stub.Watch(health_pb2.HealthCheckRequest(service=service)) for service in (*READINESS, "liveness")
    }
    assert [await read(watches[service]) for service in READINESS] == [NOT_SERVING] * len(READINESS)
    assert await read(watches["liveness"]) == SERVING
    health.set("serving")
    assert [await read(watches[service]) for service in READINESS] == [SERVING] * len(READINESS)
    health.set("draining")
    assert [await read(watches[service]) for service in READINESS] == [NOT_SERVING] * len(READINESS)
    health.set("failed")
    # Readiness changes did not touch liveness: its next update is the failure.
    assert await read(watches["liveness"]) == NOT_SERVING
    for watch in watches.values():
        watch.cancel()


async def test_a_watcher_that_leaves_takes_no_other_along(stub: Any, health: Health) -> None:
    leaving, staying = (stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2))
    assert await read(leaving) == await read(staying) == NOT_SERVING
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving.read()
    await check(stub, "")  # by now, the server has seen the cancellation
    health.set("serving")
    assert await read(staying) == SERVING
    staying.cancel()


def watches(stub: Any, count: int) -> list[Any]:
    return [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(count)]


async def refused(watch: Any) -> str:
    """The message with which a watch is refused for lack of room."""
    assert await asyncio.wait_for(watch.code(), 60) == grpc.StatusCode.RESOURCE_EXHAUSTED
    message: str = await watch.details()
    return message


async def test_a_connection_has_so_many_watches_and_all_together_have(
    server: tuple[grpc.aio.Server, int], stub: Any
) -> None:
    """And each that leaves makes room."""
    first = watches(stub, OF_ONE)
    assert {await read(watch) for watch in first} == {NOT_SERVING}
    assert await refused(*watches(stub, 1)) == f"the caller has as many streams as one may have: {OF_ONE}"
    assert await check(stub, "") == NOT_SERVING, "it is no stream"
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server[1]}", own) as channel:
        other = health_pb2_grpc.HealthStub(channel)
        others = watches(other, OF_ALL - OF_ONE)
        assert {await read(watch) for watch in others} == {NOT_SERVING}
        assert await refused(*watches(other, 1)) == (
            f"all callers together have as many streams as they may have: {OF_ALL}"
        )
        first[0].cancel()
        await check(stub, "")  # by now, the server has seen the cancellation
        assert await read(*watches(other, 1)) == NOT_SERVING


async def test_of_connections_to_a_unix_socket_all_together_have_so_many(health: Health, tmp_path: Path) -> None:
    """They look alike: one caller must not keep others from watching."""
    server = grpc.aio.server()
    HealthService(health, rpcs_of(new_metrics()), OpenRpcs(OF_ONE, OF_ALL), due_messages()).register(server)
    server.add_insecure_port(address := f"unix:{tmp_path / 'socket'}")
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        first = watches(stub, OF_ALL)
        assert {await read(watch) for watch in first} == {NOT_SERVING}
        assert (
            await refused(*watches(stub, 1)) == f"all callers together have as many streams as they may have: {OF_ALL}"
        )
    await server.stop(None)


async def test_a_watch_keeps_no_long_name(stub: Any) -> None:
    for name, code in (("x" * 1000, None), ("x" * 1024, grpc.StatusCode.INVALID_ARGUMENT)):
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=name))
        if code is None:
            assert await read(watch) == UNKNOWN
            watch.cancel()
        else:
            assert await asyncio.wait_for(watch.code(), 60) == code


async def test_watchers_do_not_hold_up_the_end(server: tuple[grpc.aio.Server, int], stub: Any, health: Health) -> None:
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    assert await read(watch) == NOT_SERVING
    health.set("draining")
    health.close()
    await asyncio.wait_for(server[0].stop(grace=60), 60)
    assert await watch.code() == grpc.StatusCode.UNAVAILABLE
