"""The tasks of an asyncio client, cancelled by code that cancels all tasks of a loop: every call still gets an outcome.
So does one made from another loop.
"""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from askers import Transport, array, transport
from calls import PATIENCE_S
from peers import good, good_unary, peer

from attnserve import AsyncClient, UnavailableError

if TYPE_CHECKING:
    from conftest import Server

__all__ = ["transport"]


async def output(future: asyncio.Future[Any]) -> Any:
    """The output of a call without a deadline; the test fails if it hangs."""
    async with asyncio.timeout(PATIENCE_S):
        return (await future).output[0, 0]


def cancel_all() -> None:
    """Cancels all tasks but this one."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def test_the_tasks_of_a_stream_that_is_used() -> None:
    """Its calls are retried on another stream."""
    with peer(good) as address:
        async with AsyncClient(address, timeout=None) as client:
            assert await output(client.submit(*[array(1)] * 3)) == 1
            future = client.submit(*[array(2)] * 3)
            cancel_all()
            assert await output(future) == 2


async def test_the_tasks_of_a_stream_before_they_begin() -> None:
    with peer(good) as address:
        async with AsyncClient(address, timeout=None) as client:
            future = client.submit(*[array(2)] * 3)
            cancel_all()
            assert await output(future) == 2


@pytest.mark.parametrize("which", ["_write", "_read"])
async def test_one_of_the_tasks_of_an_idle_stream(which: str) -> None:
    """Without the writer nothing would be sent, and without the reader no reply would be read."""
    with peer(good) as address:
        async with AsyncClient(address, timeout=None) as client:
            assert await output(client.submit(*[array(1)] * 3)) == 1
            (task,) = [task for task in asyncio.all_tasks() if f"StreamTransport.{which}" in repr(task.get_coro())]
            task.cancel()
            await asyncio.wait([task])
            assert await output(client.submit(*[array(2)] * 3)) == 2


async def test_the_task_of_a_unary_call() -> None:
    with peer(good, good_unary) as address:
        async with AsyncClient(address, timeout=None, transport="unary") as client:
            future = client.submit(*[array(2)] * 3)
            cancel_all()
            with pytest.raises(UnavailableError, match="task"):
                await output(future)


async def test_the_task_that_waits_for_a_name(transport: Transport) -> None:
    with peer(good, good_unary) as address:
        client = AsyncClient(lambda: [address], timeout=None, transport=transport)
        future = client.submit(*[array(2)] * 3)
        cancel_all()
        with pytest.raises(UnavailableError, match="task"):
            await output(future)
        assert await output(client.submit(*[array(3)] * 3)) == 3
        await client.close()


async def test_the_task_that_closes(transport: Transport) -> None:
    """A second close completes the first."""
    with peer(good, good_unary) as address:
        client = AsyncClient(address, timeout=None, transport=transport)
        assert await output(client.submit(*[array(2)] * 3)) == 2
        channel = client._calls.servers.connection()._channel
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        cancel_all()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN
        await client.close()
        assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


def test_another_loop(transport: Transport) -> None:
    """Every call fails, not only the first."""

    async def attend(client: AsyncClient) -> Any:
        return await output(client.submit(*[array(2)] * 3))

    with peer(good, good_unary) as address:
        client = AsyncClient(address, timeout=None, transport=transport)
        assert asyncio.run(attend(client)) == 2
        for _ in range(3):
            with pytest.raises(RuntimeError, match="another event loop"):
                asyncio.run(attend(client))


async def test_closing_in_another_loop(server: Server, transport: Transport) -> None:
    """It ends nothing, and the client's own loop can still close it."""
    client = AsyncClient(server.address, transport=transport)
    await output(client.submit(*[array(2)] * 3))
    with pytest.raises(RuntimeError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, client.close())
    await output(client.submit(*[array(2)] * 3))
    await client.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_client_that_nobody_closes_says_so(server: Server, transport: Transport) -> None:
    client = AsyncClient(server.address, transport=transport)
    await output(client.submit(*[array(2)] * 3))
    calls = client._calls
    with pytest.warns(ResourceWarning, match=r"^AsyncClient\('127.*'\) was not closed"):
        del client  # the only reference
    await calls.close()
    del calls
    closed = AsyncClient(server.address, transport=transport)
    await output(closed.submit(*[array(2)] * 3))
    await closed.close()
    unused = AsyncClient(server.address, transport=transport)
    del closed, unused  # no word of these
    gc.collect()


async def test_an_operation_on_a_cache_in_another_loop(server: Server, transport: Transport) -> None:
    """It fails also if it would wait for another's: it would be carried out, and nobody told."""
    async with AsyncClient(server.address, transport=transport) as client, await client.create_cache(1, 2) as cache:
        tokens = np.ones((1, 3, 2), np.float32)
        first = asyncio.ensure_future(cache.append(tokens, tokens))
        await asyncio.sleep(0)

        async def append() -> None:
            await cache.append(tokens, tokens)

        with pytest.raises(RuntimeError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, append())
        await first
        assert (await cache.refresh()).lengths == (3,)
