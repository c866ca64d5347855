"""The life of the process: a device that fails for good ends it, whatever it is about."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import calls
import grpc
import messages
import pytest

from attnserve_server import serving
from attnserve_server.caches import expiry
from attnserve_server.caches.cache import Origin
from attnserve_server.caches.shape import CacheShape
from attnserve_server.exit_statuses import DEVICE_FAILED
from attnserve_server.host.event_loop import EventLoop
from attnserve_server.server import Server, configured_device
from attnserve_server.settings.config import Config
from attnserve_server.stop_signals import STOP_SIGNALS


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A server that has ended ignores the signals that stop it; this process does not."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, action in before.items():
        signal.signal(number, action)


@pytest.mark.parametrize("drains", [False, True])
def test_a_device_that_fails_ends_it_even_while_it_drains(
    drains: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An hour's delay is not waited for."""
    started, draining = asyncio.Event(), asyncio.Event()
    made: list[Server] = []

    class Watched(Server):
        async def start(self) -> tuple[str, str]:
            made.append(self)
            addresses = await super().start()
            started.set()
            return addresses

        async def drain(self) -> None:
            draining.set()
            await super().drain()

    async def fail() -> tuple[int, bool]:
        async with asyncio.timeout(calls.PATIENCE_S):
            ending = asyncio.create_task(serving._serve(config, configured_device, loop))
            await started.wait()
            if drains:
                signal.raise_signal(signal.SIGTERM)
                await draining.wait()
            made[0].engine.fail("the device is lost")
            return await ending

    monkeypatch.setattr(serving, "Server", Watched)
    config = Config(
        listen="127.0.0.1:0", http_listen="127.0.0.1:0", device="cpu", cache_bytes=1 << 20, drain_delay=3600.0
    )
    loop = EventLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(fail()) == (DEVICE_FAILED, True)
    assert made[0].health.state == "failed"
    assert "the device is lost; ending, so that the server is started again" in caplog.text


async def test_caches_whose_leases_have_ended_go_though_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "EVERY_S", 0.01)
    config = Config(listen="127.0.0.1:0", http_listen="127.0.0.1:0", device="cpu", cache_bytes=1 << 20)
    server = Server(config, configured_device)
    await server.start()
    try:
        store = server.caches.store
        store.create(CacheShape(1, 8, 8, 1, "float32"), 0.001, time.monotonic(), Origin(None))
        async with asyncio.timeout(calls.PATIENCE_S):
            while len(store):  # noqa: ASYNC110 - a store tells no event
                await asyncio.sleep(0.01)
    finally:
        await server.stop()


async def test_a_server_that_is_given_up_ends_streams_in_good_order() -> None:
    config = Config(listen="127.0.0.1:0", http_listen="127.0.0.1:0", device="cpu", cache_bytes=1 << 20)
    server = Server(config, configured_device)
    address, _ = await server.start()
    try:
        with grpc.insecure_channel(address) as channel:
            stream = calls.Stream(channel)
            stream.send(calls.call(1, messages.random_attend(0)))
            assert [reply.id for reply in await asyncio.to_thread(stream.replies, 1)] == [1]
            server.engine.fail("the device is lost")
            await server.abandon()
            async with asyncio.timeout(calls.PATIENCE_S / 2):
                assert await asyncio.to_thread(stream.rest) == []
    finally:
        await server.stop()
