"""Connections to the HTTP port: there are so many at most, and a new one is served whoever holds the others."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import pytest
from rpcs import ANYBODY, new_metrics

from attnserve_server.observability import http, pages
from attnserve_server.observability.health import Health
from attnserve_server.observability.http import HttpServer
from attnserve_server.observability.refusals import Refusals
from attnserve_server.settings.units import parse_address

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the loopback has one address")
PATIENCE_S = 60.0
FINE = b"HTTP/1.1 200 OK"


class Callers:
    """Callers of an HTTP port, of several addresses."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def hold(self, caller: int = 1) -> asyncio.StreamReader:
        """A connection that never says all."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(f"127.0.0.{caller}", 0))
        self._writers.append(writer)
        writer.write(b"GET ")
        return reader

    async def ask(self, caller: int = 1, path: str = "/healthz") -> bytes:
        """The first line of an answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(f"127.0.0.{caller}", 0))
        self._writers.append(writer)
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        return answer.partition(b"\r\n")[0]

    async def go(self) -> None:
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@pytest.fixture
async def callers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callers]:
    """Of a server that has three connections of an address, and five of all."""
    monkeypatch.setattr(http, "MOST_OF_AN_ADDRESS", 3)
    monkeypatch.setattr(http, "MOST_CONNECTIONS", 5)
    server = HttpServer("127.0.0.1:0", new_metrics().registry, Health(), ANYBODY, None, Refusals(), patience_s=60)
    callers = Callers(parse_address(await server.start()).port)
    yield callers
    await callers.go()
    await server.stop()


async def ended(*connections: asyncio.StreamReader) -> None:
    """Waits until the server has ended connections."""
    for reader in connections:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""


def are_open(*connections: asyncio.StreamReader) -> bool:
    return not any(reader.at_eof() or reader.exception() for reader in connections)


async def test_an_address_that_has_all_its_connections_loses_its_oldest_for_each_new_one(callers: Callers) -> None:
    others = await callers.hold(2)
    first, second, third = [await callers.hold() for _ in range(3)]
    fourth = await callers.hold()
    await ended(first)
    fifth = await callers.hold()
    await ended(second)
    assert are_open(third, fourth, fifth, others)
    assert await callers.ask() == FINE
    await ended(third)
    assert are_open(fourth, fifth, others)


async def test_where_all_are_taken_whoever_has_most_loses_one(callers: Callers) -> None:
    others = [await callers.hold(2) for _ in range(2)]
    first, *rest = [await callers.hold() for _ in range(3)]
    assert await callers.ask(3) == FINE
    await ended(first)
    assert are_open(*others, *rest)


async def test_however_many_come_and_stay_another_is_served(callers: Callers) -> None:
    held = [await callers.hold(number % 50 + 1) for number in range(300)]
    assert await callers.ask(1) == FINE
    assert await callers.ask(60) == FINE
    await ended(*held[:-5])


async def test_who_waits_for_a_page_gets_it(callers: Callers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although others of its address come that wait for none."""
    monkeypatch.setattr(pages, "SAVED", 1)
    monkeypatch.setattr(pages, "EVERY_S", 1.0)
    assert await callers.ask(path="/metrics") == FINE
    waits = asyncio.create_task(callers.ask(path="/metrics"))
    await asyncio.sleep(0.1)
    first, *_ = [await callers.hold() for _ in range(6)]
    assert not waits.done()
    assert await waits == FINE
    await ended(first)


async def test_where_all_of_an_address_wait_for_a_page_the_oldest_gets_none(
    callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "SAVED", 1)
    monkeypatch.setattr(pages, "EVERY_S", 1e6)
    assert await callers.ask(path="/metrics") == FINE
    waits = []
    for _ in range(3):
        waits.append(asyncio.create_task(callers.ask(path="/metrics")))
        assert await callers.ask(2) == FINE  # by now, the server has read the other request
    assert await callers.ask() == FINE
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(waits[0], PATIENCE_S) == b""
    assert not waits[1].done()
    assert not waits[2].done()
