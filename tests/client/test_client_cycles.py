"""What a failed call holds is freed when its caller lets go of it, not when the garbage collector comes by: arrays may
be large, and processes that serve often run with the collector off or frozen.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from calls import PATIENCE_S, until
from conftest import Server

from attnserve import AsyncClient, AttnServeError, Client

NOBODY = "127.0.0.1:1"
"""An address on which nobody listens."""

Send = Callable[[Any, np.ndarray[Any, Any]], Any]

FAILING: dict[str, Send] = {
    "refused": lambda client, array: client.attend(array, array[:2], array),
    "late": lambda client, array: client.attend(array, array, array, timeout=0),
    "unknown layer": lambda client, array: client.apply("no such layer", array),
    "invalid": lambda client, array: client.attend(array, array, array, causal=7),
}


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def array_and_watch() -> tuple[np.ndarray[Any, Any], weakref.ref[Any]]:
    array = np.ones((3, 4, 8), np.float32)
    return array, weakref.ref(array)


def wait_until_freed(watch: weakref.ref[Any]) -> None:
    """A thread of gRPC's may still be about to let go of the call."""
    until(lambda: watch() is None, "the array is freed")


async def until_freed(watch: weakref.ref[Any]) -> None:
    """As above, with turns for the loop."""
    async with asyncio.timeout(PATIENCE_S):
        while watch() is not None:  # noqa: ASYNC110 - a weak reference tells no event
            await asyncio.sleep(0.01)


def no_address() -> list[str]:
    raise OSError("there is no directory of servers")


@pytest.mark.parametrize("transport", ["stream", "unary"])
@pytest.mark.parametrize("send", FAILING.values(), ids=FAILING)
def test_a_failed_call(server: Server, transport: Any, send: Send) -> None:
    with Client(server.address, transport=transport) as client:
        array, watch = array_and_watch()
        with pytest.raises(AttnServeError):
            send(client, array)
        del array
        wait_until_freed(watch)


@pytest.mark.parametrize("transport", ["stream", "unary"])
@pytest.mark.parametrize("send", FAILING.values(), ids=FAILING)
async def test_a_failed_call_of_a_task(server: Server, transport: Any, send: Send) -> None:
    async with AsyncClient(server.address, transport=transport) as client:
        array, watch = array_and_watch()
        with pytest.raises(AttnServeError):
            await send(client, array)
        del array
        await until_freed(watch)


def test_a_failed_operation_on_a_cache(server: Server) -> None:
    with Client(server.address) as client, client.create_cache(3, 8) as cache:
        sending: tuple[Callable[[np.ndarray[Any, Any]], Any], ...] = (
            lambda array: cache.append(array, array[:, :1]),
            lambda array: cache.attend(array, array, array[:2]),
            lambda array: cache.attend(array, array, array, timeout=0),
            lambda array: client.submit(array, array[:2], array, caches=[cache]).result(PATIENCE_S),
        )
        for send in sending:
            array, watch = array_and_watch()
            with pytest.raises(AttnServeError):
                send(array)
            del array
            wait_until_freed(watch)


@pytest.mark.parametrize("transport", ["stream", "unary"])
@pytest.mark.parametrize("address", [NOBODY, no_address], ids=["nobody listens", "not looked up"])
def test_a_call_that_no_server_gets(address: Any, transport: Any) -> None:
    with Client(address, transport=transport, retries=0, timeout=PATIENCE_S) as client:
        array, watch = array_and_watch()
        with pytest.raises(AttnServeError):
            client.attend(array, array, array)
        del array
        wait_until_freed(watch)


@pytest.mark.parametrize("transport", ["stream", "unary"])
@pytest.mark.parametrize("address", [NOBODY, no_address], ids=["nobody listens", "not looked up"])
async def test_a_call_of_a_task_that_no_server_gets(address: Any, transport: Any) -> None:
    async with AsyncClient(address, transport=transport, retries=0, timeout=PATIENCE_S) as client:
        array, watch = array_and_watch()
        with pytest.raises(AttnServeError):
            await client.attend(array, array, array)
        del array
        await until_freed(watch)


@pytest.mark.parametrize("transport", ["stream", "unary"])
async def test_a_call_of_a_client_that_is_closed(transport: Any) -> None:
    client, in_tasks = Client(NOBODY, transport=transport), AsyncClient(NOBODY, transport=transport)
    client.close()
    await in_tasks.close()
    array, watch = array_and_watch()
    with pytest.raises(AttnServeError):
        client.attend(array, array, array)
    with pytest.raises(AttnServeError):
        await in_tasks.attend(array, array, array)
    del array
    await until_freed(watch)
