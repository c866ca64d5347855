"""The timeout of a client: that of everything it asks, unless a call has its own."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
from cache_keeper import Keeper
from cached import address, client, keeper, transport
from calls import PATIENCE_S
from conftest import Server
from dam import Dam

from attnserve import (
    AsyncCache,
    AsyncCaches,
    AsyncClient,
    AsyncLayers,
    Cache,
    CacheInfo,
    Caches,
    Client,
    DeadlineExceededError,
    InvalidRequestError,
    Layers,
)

__all__ = ["address", "client", "keeper", "transport"]

INFO: Final = CacheInfo("cache", 2, 3, 3, 1, "float32", (5,), 0, 0, None, None)
X: Final = np.ones((2, 4, 3), np.float32)

ASKS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "Client.attend": lambda client, cache: client.attend(X, X, X),
    "Client.submit": lambda client, cache: client.submit(X, X, X).result(),
    "Client.apply": lambda client, cache: client.apply("layer", X),
    "Client.submit_apply": lambda client, cache: client.submit_apply("layer", X, cache=cache).result(),
    "Client.create_cache": lambda client, cache: client.create_cache(2, 3),
    "Client.open_cache": lambda client, cache: client.open_cache("cache"),
    "Client.server_info": lambda client, cache: client.server_info(),
    "Client.is_ready": lambda client, cache: client.is_ready(),
    "Client.is_alive": lambda client, cache: client.is_alive(),
    "Client.wait_until_ready": lambda client, cache: client.wait_until_ready(),
    "Cache.append": lambda client, cache: cache.append(X, X),
    "Cache.attend": lambda client, cache: cache.attend(X),
    "Cache.bytes": lambda client, cache: cache.bytes,
    "Cache.fork": lambda client, cache: cache.fork(),
    "Cache.truncate": lambda client, cache: cache.truncate(1),
    "Cache.info": lambda client, cache: cache.info(),
    "Cache.refresh": lambda client, cache: cache.refresh(),
    "Cache.delete": lambda client, cache: cache.delete(),
    "Caches.list": lambda client, cache: client.caches.list(),
    "Caches.pool": lambda client, cache: client.caches.pool(),
    "Caches.get": lambda client, cache: client.caches.get("cache"),
    "Caches.fork": lambda client, cache: client.caches.fork([cache]),
    "Caches.truncate": lambda client, cache: client.caches.truncate([cache], 1),
    "Caches.delete": lambda client, cache: client.caches.delete("cache"),
    "Layers.list": lambda client, cache: client.layers.list(),
    "Layers.get": lambda client, cache: client.layers.get("layer"),
    "Layers.unload": lambda client, cache: client.layers.unload("layer"),
    "Layers.load": lambda client, cache: client.layers.load("layers.toml", timeout=...),
}
"""Every method that waits for an answer."""


WITHIN: Final = r"\b0\.05 s"
"""What the errors say of 0.05 s, also where some of it has gone before the call is sent."""


CONNECTING: Final = (("grpc.min_reconnect_backoff_ms", 600_000),)
"""Has gRPC wait for whoever does not say anything, which otherwise is an UnavailableError after some seconds."""


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of what accepts connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_it_bounds_whatever_is_asked(silent: str) -> None:
    with Client(silent, timeout=0.05, options=CONNECTING) as client:
        for ask in ASKS.values():
            with pytest.raises(DeadlineExceededError, match=WITHIN):
                ask(client, Cache(client, INFO, None))


async def test_it_bounds_whatever_is_asked_in_tasks(silent: str) -> None:
    async with AsyncClient(silent, timeout=0.05, options=CONNECTING) as client:
        for name, ask in ASKS.items():
            if name.startswith("Client.submit") or name == "Cache.bytes":
                continue  # a future is what `attend` and `apply` wait for; there are no `bytes`
            with pytest.raises(DeadlineExceededError, match=WITHIN):
                await asyncio.wait_for(ask(client, AsyncCache(client, INFO, None)), PATIENCE_S)


@pytest.mark.parametrize(
    ("lost", "answered", "silent_at"),
    [("Attend", 2, "Attend"), ("Apply", 0, "Truncate"), ("Apply", 2, "Apply"), ("Create", 1, "Create")],
)
def test_the_error_of_a_later_step_tells_of_the_whole(
    client: Any, keeper: Keeper, lost: str, answered: int, silent_at: str
) -> None:
    """Not of what was left for that step. A reply is lost, and after some more answers there are none."""
    cache, released = client.create_cache(1, 3), threading.Event()
    numbers = itertools.count()
    asks: dict[str, Callable[[], object]] = {
        "Attend": lambda: cache.attend(X[None, :1], X[None, :1], X[None, :1], timeout=0.5),
        "Apply": lambda: client.apply("decoder", X[:1], cache=cache, timeout=0.5),
        "Create": lambda: client.create_cache(1, 3, timeout=0.5),
    }

    def be_silent(request: Any) -> None:
        if next(numbers) >= answered:
            released.wait(PATIENCE_S)

    keeper.before[silent_at] = be_silent
    keeper.lose = [lost]
    try:
        with pytest.raises(DeadlineExceededError, match=r"^no reply from 127\.0\.0\.1:\d+ within 0\.5 s$"):
            asks[lost]()
    finally:
        released.set()


@pytest.mark.parametrize("prefix", ["", "Async"])
def test_it_is_the_default_of_every_timeout_but_that_of_loading(prefix: str) -> None:
    sync: list[type] = [Client, Cache, Caches, Layers]
    kinds = dict(zip(sync, [AsyncClient, AsyncCache, AsyncCaches, AsyncLayers] if prefix else sync, strict=True))
    defaults = {
        f"{plain.__name__}.{name}": inspect.signature(method).parameters["timeout"].default
        for plain, kind in kinds.items()
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and "timeout" in inspect.signature(method).parameters
    }
    assert defaults.pop("Layers.load") == 600.0
    assert set(defaults.values()) == {...}
    assert set(defaults) == set(ASKS) - {"Layers.load", "Cache.bytes"}


def test_a_call_that_has_its_own_waits_for_that(silent: str) -> None:
    with Client(silent, timeout=PATIENCE_S, options=CONNECTING) as client:
        cache = Cache(client, INFO, None)
        for ask in (client.server_info, client.caches.list, client.layers.list, cache.info, cache.fork, cache.delete):
            with pytest.raises(DeadlineExceededError, match=WITHIN):
                ask(timeout=0.05)


def test_the_only_server_may_be_too_busy_to_greet_for_seconds(server: Server) -> None:
    with Dam(server.address) as dam, Client(dam.address, timeout=PATIENCE_S) as client:
        dam.shut()
        asked = client.submit(X, X, X)
        with pytest.raises(TimeoutError):
            asked.result(2.0)  # twice as long as one of several servers may take
        dam.open()
        assert asked.result(PATIENCE_S).output.shape == X.shape


@pytest.mark.parametrize("timeout", [-1, "3", True, np.nan])
def test_one_that_makes_no_sense(silent: str, timeout: Any) -> None:
    with Client(silent) as client:
        cache = Cache(client, INFO, None)
        asks: list[Callable[..., object]] = [client.server_info, client.caches.list, cache.fork, cache.delete]
        asks += [lambda timeout: client.attend(X, X, X, timeout=timeout)]
        for ask in asks:
            with pytest.raises(InvalidRequestError, match="timeout: expected") as caught:
                ask(timeout=timeout)
            assert caught.value.field == "timeout"
