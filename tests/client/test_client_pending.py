"""Caches of an AsyncClient before they are there: awaited, or entered at once, and gone after the block."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import pytest
from cache_keeper import Keeper, Refusal
from cached import QUERY, D, H, address, keeper, part
from calls import PATIENCE_S
from grpc import StatusCode

from attnserve import (
    AsyncCache,
    AsyncClient,
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)

__all__ = ["address", "keeper"]

WAYS: Final[dict[str, Callable[[AsyncClient, AsyncCache], Any]]] = {
    "create_cache": lambda client, cache: client.create_cache(H, D),
    "fork": lambda client, cache: cache.fork(),
    "open_cache": lambda client, cache: client.open_cache(cache.name),
}


@pytest.fixture
async def client(address: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(address, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
async def first(client: AsyncClient) -> AsyncCache:
    return await client.create_cache(H, D)


@pytest.fixture(params=WAYS)
def make(request: pytest.FixtureRequest, client: AsyncClient, first: AsyncCache) -> Callable[[], Any]:
    """Makes, forks or opens a cache."""
    return lambda: WAYS[request.param](client, first)


async def test_entered_or_awaited(make: Callable[[], Any], keeper: Keeper) -> None:
    async with make() as cache:
        assert isinstance(cache, AsyncCache)
        assert cache.name in keeper.caches
        assert await cache.append(*part(0, 2)) == 2
    assert cache.name not in keeper.caches


async def test_what_is_used_without_being_awaited_says_so(client: AsyncClient) -> None:
    made = client.create_cache(H, D)
    with pytest.raises(AttributeError, match=r"^AsyncClient\.create_cache\(\.\.\.\)\.append: await it first"):
        made.append(*part(0, 2))  # type: ignore[attr-defined]
    assert not hasattr(made, "__len__")
    made.close()


async def test_awaited_and_then_entered(make: Callable[[], Any], keeper: Keeper) -> None:
    cache = await make()
    assert isinstance(cache, AsyncCache)
    async with cache as entered:
        assert entered is cache
    assert cache.name not in keeper.caches


async def test_tasks_take_it_for_a_coroutine(make: Callable[[], Any], keeper: Keeper) -> None:
    task = asyncio.create_task(make())
    assert isinstance(await task, AsyncCache)
    (gathered,) = await asyncio.gather(make())
    limited = await asyncio.wait_for(make(), PATIENCE_S)
    async with asyncio.TaskGroup() as group:
        grouped = group.create_task(make())
    assert {each.name for each in (gathered, limited, grouped.result())} <= set(keeper.caches)


async def test_tasks_print_what_they_make(client: AsyncClient) -> None:
    task = asyncio.create_task(client.create_cache(H, D))
    assert "AsyncClient.create_cache" in repr(task)
    await task


async def test_the_cache_is_gone_when_the_body_raises(
    client: AsyncClient, make: Callable[[], Any], keeper: Keeper
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with make() as cache:
            raise ZeroDivisionError
    assert cache.name not in keeper.caches
    keeper.lose = ["Delete"] * 10
    with pytest.raises(ZeroDivisionError):  # which matters more than what cannot be deleted
        async with client.create_cache(H, D):
            raise ZeroDivisionError


async def test_the_cache_is_gone_when_the_body_is_cancelled(make: Callable[[], Any], keeper: Keeper) -> None:
    entered: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def stay() -> None:
        async with make() as cache:
            entered.set_result(cache.name)
            await asyncio.Event().wait()

    task = asyncio.create_task(stay())
    name = await entered
    assert name in keeper.caches
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert name not in keeper.caches


async def test_a_deletion_that_is_cancelled_is_asked_for_all_the_same(client: AsyncClient, keeper: Keeper) -> None:
    """Here it waits for another operation on the cache."""
    loop = asyncio.get_running_loop()
    begun, deleted, over = asyncio.Event(), asyncio.Event(), threading.Event()
    attending: list[asyncio.Future[Any]] = []

    def attend(request: Any) -> None:
        loop.call_soon_threadsafe(begun.set)
        assert over.wait(PATIENCE_S)

    keeper.before["Attend"] = attend
    keeper.after["Delete"] = lambda answer, context: loop.call_soon_threadsafe(deleted.set)

    async def leave() -> None:
        async with client.create_cache(H, D) as cache:
            attending.append(client.submit(QUERY, caches=cache))

    task = asyncio.create_task(leave())
    await begun.wait()
    assert keeper.methods() == ["Create"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await deleted.wait()
    assert keeper.caches == {}
    over.set()
    with pytest.raises(NotFoundError):
        await attending[0]


async def test_the_body_is_not_entered_without_a_cache(client: AsyncClient, keeper: Keeper) -> None:
    with pytest.raises(InvalidRequestError, match="head_dim"):
        async with client.create_cache(H, 0):
            pytest.fail("there is no cache")

    def refuse(request: Any) -> None:
        raise Refusal(StatusCode.FAILED_PRECONDITION)

    keeper.before["Create"] = refuse
    with pytest.raises(FailedPreconditionError):
        async with client.create_cache(H, D):
            pytest.fail("there is no cache")
    with pytest.raises(UnavailableError):
        async with client.open_cache("a", address="127.0.0.1:1"):
            pytest.fail("there is no cache")


async def test_it_can_be_awaited_once(make: Callable[[], Any]) -> None:
    pending = make()
    await pending
    with pytest.raises(RuntimeError, match="already awaited"):
        await pending


@pytest.mark.parametrize(("way", "name"), [("create_cache", "AsyncClient.create_cache"), ("fork", "AsyncCache.fork")])
async def test_forgetting_to_await_it(client: AsyncClient, first: AsyncCache, way: str, name: str) -> None:
    def forget() -> None:
        WAYS[way](client, first)
        gc.collect()

    with pytest.warns(RuntimeWarning, match=rf"^coroutine '{name}' was never awaited$"):
        forget()
    unused = WAYS[way](client, first)
    unused.close()
