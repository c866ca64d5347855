"""Several real servers behind one client: even spread, a server added, removed or killed, and caches that stay put."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import calls
import pytest
from askers import arrays

from attnserve import AsyncClient, Client, NotFoundError
from attnserve._servers import replicas

if TYPE_CHECKING:
    from tests.conftest import Server


def answered(server: Server, operation: str = "attend_stream") -> float:
    """How many calls a server has answered."""
    return calls.metric(server.http_address, "attnserve_requests_total", operation=operation, code="OK")


class Load:
    """Callers in threads and tasks that keep calling until told to stop; none of their calls may fail."""

    def __init__(self, addresses: Callable[[], list[str]]) -> None:
        self.made = 0
        self.failed: list[BaseException] = []
        self._addresses = addresses
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._call), threading.Thread(target=self._run_tasks)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def goes_on(self) -> None:
        """Waits until many more calls have been made."""
        wanted = self.made + 200
        calls.until(lambda: self.made > wanted or bool(self.failed), "the load goes on")
        assert self.failed == []

    def _call(self) -> None:
        try:
            with Client(self._addresses, refresh=0.2) as client:
                while not self._over.is_set():
                    for future in [client.submit(*arrays()) for _ in range(4)]:
                        future.result()
                        self.made += 1
        except BaseException as error:
            self.failed.append(error)

    def _run_tasks(self) -> None:
        async def run() -> None:
            async with AsyncClient(self._addresses, refresh=0.2) as client:
                while not self._over.is_set():
                    await asyncio.gather(*(client.attend(*arrays()) for _ in range(4)))
                    self.made += 4

        try:
            asyncio.run(run())
        except BaseException as error:
            self.failed.append(error)


def is_free(port: int) -> bool:
    with socket.socket() as place:
        try:
            place.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@pytest.fixture
def servers(start_server: Callable[..., Server]) -> Iterator[list[Server]]:
    """Four servers that advertise their addresses."""
    with ThreadPoolExecutor(4) as pool:
        # No ephemeral ports: a connection might take one of those before a server does.
        ports = filter(is_free, random.sample(range(20_000, 32_000), 1000))
        addresses = [f"127.0.0.1:{port}" for port in itertools.islice(ports, 4)]
        flags = ("--drain-delay=500ms", "--max-connection-age=2s")
        started = pool.map(lambda at: start_server("--listen", at, "--advertise-address", at, *flags), addresses)
        yield list(started)


def test_several_servers(servers: list[Server]) -> None:
    *three, fourth = servers
    addresses = [server.address for server in three]

    # Calls are spread evenly, on streams and as unary calls.
    with Client(lambda: addresses) as client, Client(addresses, transport="unary") as unary:
        for _ in range(30):
            client.attend(*arrays())
            unary.attend(*arrays())
        assert [answered(server) for server in three] == [10, 10, 10]
        assert [answered(server, "attend") for server in three] == [10, 10, 10]
        check_caches(client, three)
        assert {client.server_info().address for _ in range(12)} <= set(addresses)
    for address in addresses:
        with Client(address) as client:
            assert client.server_info().address == address

    with Load(lambda: list(addresses)) as load:
        load.goes_on()
        assert all(answered(server) > 20 for server in three)

        addresses.append(fourth.address)
        calls.until(lambda: answered(fourth) > 20, "the fourth is found")
        load.goes_on()

        leaving = three[0]
        addresses.remove(leaving.address)
        assert leaving.stop() == 0
        load.goes_on()

        # One dies unannounced.
        three[1].process.kill()
        three[1].process.wait()
        load.goes_on()
    assert load.failed == []


def check_caches(client: Client, three: list[Server]) -> None:
    """Caches are spread, and operations on each go to the server that has it."""
    query, key, value = arrays(1)
    caches = [client.create_cache(2, 8) for _ in three]
    assert {cache.address for cache in caches} == {server.address for server in three}
    for cache in caches:
        cache.append(key, value)
        cache.attend(query, key, value, causal=True)
        with cache.fork() as fork:
            assert fork.address == cache.address
            assert fork.info().lengths == (8,)
        assert cache.info().address == cache.address
    assert {cache.name for cache in client.caches.list()} == {cache.name for cache in caches}

    # Any client finds it, by asking all servers or going straight there.
    cache = caches[1]
    elsewhere = next(server for server in three if server.address != cache.address)
    with Client([server.address for server in three]) as another:
        assert another.open_cache(cache.name).address == cache.address
    with Client(elsewhere.address) as another:
        with pytest.raises(NotFoundError):
            another.open_cache(cache.name)
        found = another.open_cache(cache.name, address=cache.address)
        assert found.attend(query).output.shape == query.shape
        asyncio.run(in_tasks(elsewhere.address, cache.name, cache.address, query))
    client.caches.delete([cache.name for cache in caches])
    assert client.caches.list() == ()


async def in_tasks(elsewhere: str, name: str, address: str | None, query: Any) -> None:
    async with AsyncClient(elsewhere) as client:
        cache = await client.open_cache(name, address=address)
        assert (await cache.attend(query)).output.shape == query.shape
        async with await client.create_cache(2, 8) as made:
            assert made.address == elsewhere
    async with AsyncClient([elsewhere, str(address)]) as client:
        assert (await client.open_cache(name)).address == address
        assert [info.name for info in await client.caches.list() if info.name == name] == [name]


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_one_of_two_that_was_away_is_used_as_soon_as_the_other_goes(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, transport: Literal["stream", "unary"]
) -> None:
    """As in a rolling restart, though it should rest for minutes, because it did not answer when it was away."""
    monkeypatch.setattr(replicas, "FIRST_REST", 300.0)
    monkeypatch.setattr(replicas, "LONGEST_REST", 300.0)
    first, second = start_server(), start_server("--drain-delay=3s")  # gRPC connects again every second
    with Client([first.address, second.address], transport=transport) as client, ThreadPoolExecutor(9) as pool:
        assert first.stop() == 0
        for _ in range(2):  # of which one goes there
            client.attend(*arrays())
        start_server("--listen", first.address)
        ending = pool.submit(second.stop)

        def call_often() -> None:
            while not ending.done():
                client.attend(*arrays())
            for _ in range(50):
                client.attend(*arrays())

        for calling in [pool.submit(call_often) for _ in range(8)]:
            calling.result()
        assert ending.result() == 0


async def test_a_name_with_an_address_where_nobody_is(server: Server) -> None:
    """Localhost often names ::1 too: the unused address is tried now and then, and no call fails."""
    target = server.address.replace("127.0.0.1", "dns:///localhost")
    with Client(target) as client:
        for _ in range(20):
            client.attend(*arrays())
    async with AsyncClient(target) as in_tasks_too:
        await asyncio.gather(*(in_tasks_too.attend(*arrays()) for _ in range(20)))
