"""Where a cache is made if a client knows several servers: where one is, and has room; and where it is found again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import grpc
import numpy as np
import pytest
from askers import Transport, arrays, transport
from cache_keeper import Keeper, Refusal
from calls import until
from conftest import POOL, served
from dam import Dam

from attnserve import (
    AsyncClient,
    AttnServeError,
    Client,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    UnavailableError,
)
from attnserve._servers import replicas, room

if TYPE_CHECKING:
    from tests.conftest import Server


__all__ = ["transport"]

OK: Final = grpc.StatusCode.OK
INVALID: Final = grpc.StatusCode.INVALID_ARGUMENT
DENIED: Final = grpc.StatusCode.PERMISSION_DENIED
LATE: Final = grpc.StatusCode.DEADLINE_EXCEEDED
UNAVAILABLE: Final = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where no server listens, and none can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(scope="module")
def of_few_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A server that may have one cache, and another that may have eight."""
    flags = ("--device", "cpu", *POOL, "--max-caches")
    full, roomy = (tmp_path_factory.mktemp(name) for name in ("full", "roomy"))
    with served((*flags, "1"), full) as one, served((*flags, "8"), roomy) as eight:
        yield one, eight


@pytest.fixture(scope="module")
def of_few_pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A server whose pool has four pages, and another that has many."""
    flags = ("--device", "cpu", "--cache-page-bytes", "4KiB", "--cache-bytes")
    full, roomy = (tmp_path_factory.mktemp(name) for name in ("full", "roomy"))
    with served((*flags, "16KiB"), full) as four, served((*flags, "64MiB"), roomy) as many:
        yield four, many


@contextmanager
def empty_again(servers: tuple[Server, Server]) -> Iterator[tuple[Server, Server]]:
    """Servers whose caches are deleted at the end."""
    yield servers
    for each in servers:
        with Client(each.address) as alone:
            alone.caches.delete([info.name for info in alone.caches.list()])


@pytest.fixture
def by_caches(of_few_caches: tuple[Server, Server]) -> Iterator[tuple[Server, Server]]:
    """`of_few_caches`, without any."""
    with empty_again(of_few_caches) as servers:
        yield servers


@pytest.fixture
def by_pages(of_few_pages: tuple[Server, Server]) -> Iterator[tuple[Server, Server]]:
    """`of_few_pages`, without caches."""
    with empty_again(of_few_pages) as servers:
        yield servers


async def test_a_cache_is_made_where_there_is_a_server(server: Server, nobody: str) -> None:
    """At once: nobody waits for retries at one that is out of reach, here hundreds of seconds of them."""
    with Client([nobody, server.address], retries=100) as client:
        made = [client.create_cache(2, 8) for _ in range(3)]
        assert {cache.address for cache in made} == {server.address}
        for cache in made:
            cache.delete()
    async with AsyncClient([nobody, server.address], retries=100) as in_tasks_too:
        for _ in range(3):
            async with await in_tasks_too.create_cache(2, 8) as cache:
                assert cache.address == server.address
    with Client([nobody], retries=0) as alone, pytest.raises(UnavailableError):
        alone.create_cache(2, 8)


async def test_a_cache_is_made_where_there_is_room(by_caches: tuple[Server, Server], nobody: str) -> None:
    """A server that has as many caches as it may is passed over, in any order of asking; if all have, that is said."""
    full, roomy = by_caches
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


async def test_a_cache_is_made_where_there_is_room_without_waiting(by_caches: tuple[Server, Server]) -> None:
    """Even if a lease on the full server ends so soon that a call would be sent again."""
    full, roomy = by_caches
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


async def test_of_full_servers_the_one_with_room_soonest_is_waited_for(
    by_caches: tuple[Server, Server], start_server: Callable[..., Server]
) -> None:
    """Even if it is not the one that was asked last."""
    servers = [by_caches[0], *(start_server("--device", "cpu", "--max-caches", "1") for _ in range(2))]
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


async def test_caches_are_made_where_the_pool_has_room(
    by_pages: tuple[Server, Server], transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a server has said that its own is full; what is asked of its caches still goes there."""
    monkeypatch.setattr(room, "LONGEST", 60.0)  # then what the server says decides
    full, roomy = by_pages
    addresses = [full.address, roomy.address]
    query, key, value = arrays()
    with Client(full.address) as alone, Client(addresses, transport=transport) as client:
        for _ in range(4):  # each takes a page, of which there are four
            alone.create_cache(2, 8).append(key, value)
        empty = alone.create_cache(2, 8)
        kept = client.open_cache(empty.name, address=full.address)
        with pytest.raises(OverloadedError, match="the pool of the caches has no room"):
            kept.attend(query, key, value)
        made = [client.create_cache(2, 8) for _ in range(6)]
        assert {cache.append(key, value) for cache in made} == {4}
        assert kept.info().lengths == (0,)
        async with AsyncClient(addresses, transport=transport) as in_tasks_too:
            kept_too = await in_tasks_too.open_cache(empty.name, address=full.address)
            with pytest.raises(OverloadedError, match="the pool of the caches has no room"):
                await kept_too.append(key, value)
            made_too = [await in_tasks_too.create_cache(2, 8) for _ in range(6)]
            assert {await cache.append(key, value) for cache in made_too} == {4}
            assert (await kept_too.info()).lengths == (0,)
    assert {cache.address for cache in (*made, *made_too)} == {roomy.address}


async def test_caches_of_one_call_are_on_one_server(start_server: Callable[..., Server]) -> None:
    """If they are not, the error says where they are; a fork is where its cache is."""
    one, other = (start_server("--device", "cpu", "--max-caches", "2") for _ in range(2))
    addresses = [one.address, other.address]
    tensors = [np.stack([array, array]) for array in arrays()]
    with Client(addresses) as client:
        apart = [client.create_cache(2, 8) for _ in range(3)]  # one server has no room for all
        first, second = ([cache for cache in apart if cache.address == address] for address in addresses)
        with pytest.raises(InvalidRequestError) as refused:
            client.attend(*tensors, caches=[first[0], second[0]])
        assert refused.value.field == "caches"
        found = "caches: expected caches of one server, found some at {} and {}; a fork is where its cache is"
        assert str(refused.value).startswith(found.format(*addresses))
        alone = min(first, second, key=len)[0]
        client.attend(*tensors, caches=[alone, alone.fork()])
        together = max(first, second, key=len)
        client.attend(*tensors, caches=together)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_cache_that_was_made_behind_a_balancer_is_asked_for_at_its_own_server(kind: Any) -> None:
    """Whose address the server itself says; the balancer might lead to another."""
    keeper = Keeper()
    query, key, value = arrays()

    def done(result: Any) -> Any:
        return result if isinstance(client, AsyncClient) else asyncio.sleep(0, result)

    with keeper.serve() as server, ExitStack() as balanced:
        client = kind(balanced.enter_context(keeper.serve()), retries=0)
        keeper.after["Create"] = lambda reply, context: setattr(reply.cache, "address", server)
        cache = await done(client.create_cache(2, 8))
        assert cache.address == server
        balanced.close()
        assert await done(cache.append(key, value)) == key.shape[1]
        assert (await done(cache.attend(query[None]))).output.shape == (1, *query.shape)
        await done(client.close())


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


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((INVALID, OK, OK), InvalidRequestError),
        ((OK, INVALID, DENIED), PermissionDeniedError),
        ((INVALID, UNAVAILABLE, DENIED), UnavailableError),
        ((LATE, OK, UNAVAILABLE), DeadlineExceededError),
    ],
)
async def test_every_server_is_asked_to_delete_whatever_others_answer(
    codes: Sequence[grpc.StatusCode], expected: type[AttnServeError]
) -> None:
    """In portions, the further ones of which are not sent to a server that refuses one."""
    portions: list[list[int]] = [[] for _ in codes]

    def answering(index: int) -> Callable[[Any], object]:
        def answer(request: Any) -> None:
            portions[index].append(len(request.names))
            if codes[index] is not OK:
                raise Refusal(codes[index])

        return answer

    names = [f"name-{number}" for number in range(1001)]
    with ExitStack() as stack:
        addresses = []
        for index in range(len(codes)):
            keeper = Keeper()
            keeper.before["Delete"] = answering(index)
            addresses.append(stack.enter_context(keeper.serve()))
        with Client(addresses, retries=0) as client, pytest.raises(expected):
            client.caches.delete(names)
        async with AsyncClient(addresses, retries=0) as in_tasks_too:
            with pytest.raises(expected):
                await in_tasks_too.caches.delete(names)
    assert portions == [[500, 500, 1] * 2 if code is OK else [500] * 2 for code in codes]


async def test_as_many_caches_are_deleted_as_are_named(start_server: Callable[..., Server]) -> None:
    """By a server that takes no message with all their names."""
    server = start_server("--device", "cpu", "--max-message-bytes", "32KiB")
    names = [f"a-name-of-no-cache-{number:05}" for number in range(3000)]
    with Client(server.address) as client:
        made = [client.create_cache(2, 8) for _ in range(2)]
        client.caches.delete([*names, made[0].name])
        assert [info.name for info in client.caches.list()] == [made[1].name]
        async with AsyncClient(server.address) as in_tasks_too:
            await in_tasks_too.caches.delete([made[1].name, *names])
        assert not client.caches.list()


def test_a_home_is_left_when_its_caches_are_no_longer_used(
    server: Server, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not while a call is in flight there, and it is found again. The client's own address is fixed."""
    monkeypatch.setattr(replicas, "FORGET_AFTER", 1.0)
    query, key, value = arrays()
    with (
        Dam(server.address) as slow,
        Dam(server.address) as home,
        Client(server.address, transport=transport) as client,
    ):
        with client.create_cache(2, 8) as cache:
            cache.append(key, value)
            elsewhere, waited_for = (client.open_cache(cache.name, address=each.address) for each in (home, slow))
            slow.shut()
            in_use = slow.connections
            assert in_use
            in_flight = client.submit(query, caches=waited_for)
            result = client.attend(query, caches=elsewhere)
            until(lambda: not home.connections, "the unused one is closed, by itself")
            assert in_use <= slow.connections
            assert not in_flight.done()
            slow.open()
            assert (in_flight.result().output == result.output).all()
            assert (client.attend(query, caches=elsewhere).output == result.output).all()
            until(lambda: not (slow.connections or home.connections), "both are closed")
            assert (client.attend(query, caches=cache).output == result.output).all()
        assert client._calls.servers._retiring is None


async def test_so_is_it_in_tasks(server: Server, transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "FORGET_AFTER", 1.0)
    query, key, value = arrays()
    with Dam(server.address) as slow, Dam(server.address) as home:
        async with AsyncClient(server.address, transport=transport) as client, await client.create_cache(2, 8) as cache:
            await cache.append(key, value)
            elsewhere, waited_for = [await client.open_cache(cache.name, address=each.address) for each in (home, slow)]
            slow.shut()
            in_use = slow.connections
            assert in_use
            in_flight = asyncio.ensure_future(client.attend(query, caches=waited_for))
            result = await client.attend(query, caches=elsewhere)
            await asyncio.to_thread(until, lambda: not home.connections, "the unused one is closed, by itself")
            assert in_use <= slow.connections
            assert not in_flight.done()
            slow.open()
            assert ((await in_flight).output == result.output).all()
            assert ((await client.attend(query, caches=elsewhere)).output == result.output).all()
            await asyncio.to_thread(until, lambda: not (slow.connections or home.connections), "both are closed")
            assert ((await client.attend(query, caches=cache)).output == result.output).all()
