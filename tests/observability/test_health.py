"""Liveness and readiness, over a real gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attnserve_server.observability.health import Health

SERVICES = ("attnserve.v1.AttentionService", "attnserve.v1.CacheService", "attnserve.v1.LayerService")
READINESS = ("", "readiness", *SERVICES)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.fixture
async def health() -> Health:
    return Health()


@pytest.fixture
async def server(health: Health) -> AsyncIterator[tuple[grpc.aio.Server, int]]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    health.register(server)
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


async def test_watchers_do_not_hold_up_the_end(server: tuple[grpc.aio.Server, int], stub: Any, health: Health) -> None:
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    assert await read(watch) == NOT_SERVING
    health.set("draining")
    health.close()
    await asyncio.wait_for(server[0].stop(grace=60), 60)
    assert await watch.code() == grpc.StatusCode.UNAVAILABLE
