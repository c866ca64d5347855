"""Several real servers behind one client: even spread, a server added, removed or killed, and caches that stay put."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import TYPE_CHECKING, Any, Literal

import calls
import numpy as np
import pytest

from attnserve import (
    AsyncClient,
    Client,
    ClientClosedError,
    DeadlineExceededError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)

if TYPE_CHECKING:
    from tests.conftest import Server

Arrays = tuple[Any, Any, Any]


def answered(server: Server, operation: str = "attend_stream") -> float:
    """How many calls a server has answered."""
    return calls.metric(server.http_address, "attnserve_requests_total", operation=operation, code="OK")


def arrays(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    query, key, value = (rng.standard_normal((2, 4, 8)).astype(np.float32) for _ in range(3))
    return query, key, value


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


async def test_a_name_with_an_address_where_nobody_is(server: Server) -> None:
    """Localhost often names ::1 too: the unused address is tried now and then, and no call fails."""
    target = server.address.replace("127.0.0.1", "dns:///localhost")
    with Client(target) as client:
        for _ in range(20):
            client.attend(*arrays())
    async with AsyncClient(target) as in_tasks_too:
        await asyncio.gather(*(in_tasks_too.attend(*arrays()) for _ in range(20)))


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where no server listens, and none can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("transport", ["stream", "unary"])
async def test_a_name_that_is_not_looked_up_in_time(server: Server, transport: Literal["stream", "unary"]) -> None:
    """Calls end at their timeouts, however long the lookup takes; those made once it is done are answered."""
    known = threading.Event()

    def slow() -> list[str]:
        assert known.wait(calls.PATIENCE_S)
        return [server.address]

    with Client(slow, transport=transport) as client:
        asks: list[Callable[[], object]] = [
            lambda: client.attend(*arrays(), timeout=0.05),
            lambda: client.server_info(timeout=0.05),
            lambda: client.create_cache(2, 8, timeout=0.05),
            lambda: client.caches.list(timeout=0.05),
        ]
        for ask in asks:
            with pytest.raises(DeadlineExceededError):
                ask()
        known.set()
        client.attend(*arrays())
    known.clear()
    async with AsyncClient(slow, transport=transport, timeout=0.05) as in_tasks_too:
        with pytest.raises(DeadlineExceededError):
            await in_tasks_too.attend(*arrays())
        with pytest.raises(DeadlineExceededError):
            await in_tasks_too.create_cache(2, 8, timeout=0.05)
        known.set()
        await in_tasks_too.attend(*arrays(), timeout=calls.PATIENCE_S)


class Resolver:
    """Looks up the address of a server; the first look-ups fail as those of a name that is not known yet do."""

    def __init__(self, address: str, failures: float) -> None:
        self.looks = 0
        self._address = address
        self._failures = failures

    def __call__(self) -> list[str]:
        self.looks += 1
        if self.looks <= self._failures:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [self._address]


@pytest.mark.parametrize("transport", ["stream", "unary"])
async def test_a_name_that_is_not_known_yet(server: Server, transport: Literal["stream", "unary"]) -> None:
    """It is looked up as often as a call is sent to a server that is unavailable, whatever the call."""
    asks: list[Callable[[Any], Any]] = [
        lambda client: client.attend(*arrays()),
        lambda client: client.server_info(),
        lambda client: client.create_cache(2, 8),
        lambda client: client.caches.list(),
        lambda client: asyncio.gather(*(client.submit(*arrays()) for _ in range(3))),
    ]
    for ask in asks[:-1]:
        with Client(Resolver(server.address, 3), transport=transport) as client:
            ask(client)
    for ask in asks:
        client_in_loop = AsyncClient(Resolver(server.address, 3), transport=transport)
        try:
            await ask(client_in_loop)
        finally:
            await client_in_loop.close()


async def test_a_name_that_nobody_knows() -> None:
    for retries in (0, 1):
        unknown = Resolver("", inf)
        with Client(unknown, retries=retries) as client, pytest.raises(UnavailableError, match="service not known"):
            client.attend(*arrays())
        assert unknown.looks == 1 + retries
    # Calls that have no time for all of the retries say what has failed so far, and why.
    with Client(Resolver("", inf), retries=100) as client:
        for _ in range(2):
            with pytest.raises(UnavailableError, match="service not known") as raised:
                client.server_info(timeout=0.5)
            assert isinstance(raised.value.__cause__, socket.gaierror)
    async with AsyncClient(Resolver("", inf), retries=100, timeout=0.5) as in_tasks_too:
        with pytest.raises(UnavailableError, match="service not known") as raised:
            await in_tasks_too.attend(*arrays())
        assert isinstance(raised.value.__cause__, socket.gaierror)


@pytest.mark.parametrize("transport", ["stream", "unary"])
async def test_the_loop_goes_on_while_a_name_is_looked_up(
    server: Server, transport: Literal["stream", "unary"]
) -> None:
    """Also for a client used without `async with`: whatever its first call, the lookup only ends if the loop runs."""
    looking, known = threading.Event(), threading.Event()

    def slow() -> list[str]:
        looking.set()
        assert known.wait(2 * calls.PATIENCE_S)
        return [server.address]

    asks: list[Callable[[AsyncClient], Awaitable[object]]] = [
        lambda client: client.attend(*arrays()),
        lambda client: client.server_info(),
        lambda client: client.create_cache(2, 8),
        lambda client: client.caches.list(),
        lambda client: asyncio.gather(*(client.submit(*arrays()) for _ in range(3))),
    ]
    for ask in asks:
        looking.clear()
        known.clear()
        client = AsyncClient(slow, transport=transport, timeout=calls.PATIENCE_S)
        asked = asyncio.ensure_future(ask(client))
        try:
            assert await asyncio.to_thread(looking.wait, calls.PATIENCE_S)
            given_up = client.submit(*arrays())
            assert given_up.cancel()
            known.set()
            await asked
            assert given_up.cancelled()
        finally:
            known.set()
            await client.close()


async def test_closing_ends_the_wait_of_tasks_for_a_name() -> None:
    over = threading.Event()

    def endless() -> list[str]:
        over.wait()
        return []

    client = AsyncClient(endless)
    try:
        waiting = [client.submit(*arrays(), timeout=None), asyncio.ensure_future(client.server_info(timeout=None))]
        await asyncio.sleep(0)
        await client.close()
        for each in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(each, ClientClosedError)
    finally:
        over.set()


def test_closing_ends_the_wait_for_a_name() -> None:
    """Calls without a timeout that wait for the lookup fail at once, however long it takes."""
    looking, over = threading.Event(), threading.Event()

    def endless() -> list[str]:
        looking.set()
        over.wait()
        return []

    client = Client(endless)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.attend, *arrays(), timeout=None)
        try:
            assert looking.wait(calls.PATIENCE_S)
            client.close()
            assert isinstance(waiting.exception(calls.PATIENCE_S), ClientClosedError)
        finally:
            over.set()


async def test_a_cache_is_made_where_there_is_a_server(server: Server, nobody: str) -> None:
    with Client([nobody, server.address], retries=0) as client:
        made = [client.create_cache(2, 8) for _ in range(3)]
        assert {cache.address for cache in made} == {server.address}
        for cache in made:
            cache.delete()
    async with AsyncClient([nobody, server.address], retries=0) as in_tasks_too:
        for _ in range(3):
            async with await in_tasks_too.create_cache(2, 8) as cache:
                assert cache.address == server.address
    with Client([nobody], retries=0) as alone, pytest.raises(UnavailableError):
        alone.create_cache(2, 8)


async def test_a_cache_is_made_where_there_is_room(start_server: Callable[..., Server], nobody: str) -> None:
    """A server that has as many caches as it may is passed over, in any order of asking; if all have, that is said."""
    full, roomy = (start_server("--device", "cpu", "--max-caches", str(most)) for most in (1, 8))
    addresses = [nobody, full.address, roomy.address]
    with Client(addresses, retries=0) as client:
        made = [client.create_cache(2, 8) for _ in range(5)]
        async with AsyncClient(addresses, retries=0) as in_tasks_too:
            tasks = [await in_tasks_too.create_cache(2, 8) for _ in range(4)]
            with pytest.raises(OverloadedError, match=r"its bound on caches is [18]; ") as refused:
                await in_tasks_too.create_cache(2, 8)
        assert refused.value.retry_delay == 10
        with pytest.raises(OverloadedError, match=r"its bound on caches is [18]; "):
            client.create_cache(2, 8)
        homes = [cache.address for cache in (*made, *tasks)]
        assert (homes.count(full.address), homes.count(roomy.address)) == (1, 8)
    for each, count in ((full, 1), (roomy, 8)):
        with Client(each.address) as alone:
            assert len(alone.caches.list()) == count


async def test_a_cache_is_made_where_there_is_room_without_waiting(start_server: Callable[..., Server]) -> None:
    """Even if a lease on the full server ends so soon that a call would be sent again."""
    full, roomy = (start_server("--device", "cpu", "--max-caches", str(most)) for most in (1, 8))
    addresses = [full.address, roomy.address]
    with Client(full.address) as alone, Client(addresses) as client:
        leased = alone.create_cache(2, 8, ttl=4)
        made = []
        for _ in range(4):
            leased.append(*arrays()[1:])  # the lease begins again
            made.append(client.create_cache(2, 8))
        async with AsyncClient(addresses) as in_tasks_too:
            for _ in range(4):
                leased.append(*arrays()[1:])
                made.append(await in_tasks_too.create_cache(2, 8))
        leased.append(*arrays()[1:])  # it is there: nobody has waited for its end
    assert {cache.address for cache in made} == {roomy.address}


async def test_of_full_servers_the_one_with_room_soonest_is_waited_for(start_server: Callable[..., Server]) -> None:
    """Even if it is not the one that was asked last."""
    servers = [start_server("--device", "cpu", "--max-caches", "1") for _ in range(3)]
    soonest, addresses = servers[1].address, [server.address for server in servers]

    def fill() -> None:
        for address in addresses:
            with Client(address) as alone:
                alone.caches.delete([info.name for info in alone.caches.list()])
                alone.create_cache(2, 8, ttl=0.5 if address == soonest else 60)

    fill()
    with Client(addresses) as client:
        assert client.create_cache(2, 8).address == soonest
    fill()
    async with AsyncClient(addresses) as in_tasks_too:
        assert (await in_tasks_too.create_cache(2, 8)).address == soonest
        with pytest.raises(OverloadedError, match="bound on caches"):
            await in_tasks_too.create_cache(2, 8)


async def test_a_server_that_is_out_of_reach_hides_no_cache_of_another(server: Server, nobody: str) -> None:
    """In no order of asking them; and a cache that is not found may be on the server that does not answer."""
    with Client(server.address) as alone, Client([nobody, server.address], retries=0) as client:
        made = [alone.create_cache(2, 8) for _ in range(2)]
        assert client.caches.get(made[0].name).name == made[0].name
        assert client.open_cache(made[0].name).append(*arrays()[1:]) == 4
        with pytest.raises(UnavailableError):
            client.caches.get("none of that name")
        with pytest.raises(UnavailableError):
            client.caches.delete(made[0].name)
        with pytest.raises(NotFoundError):
            alone.caches.get(made[0].name)
        async with AsyncClient([nobody, server.address], retries=0) as in_tasks_too:
            opened = await in_tasks_too.open_cache(made[1].name)
            assert (await in_tasks_too.caches.get(opened.name)).name == opened.name
            with pytest.raises(UnavailableError):
                await in_tasks_too.caches.get("none of that name")
            with pytest.raises(UnavailableError):
                await in_tasks_too.caches.delete(opened.name)
        with pytest.raises(NotFoundError):
            alone.caches.get(made[1].name)
