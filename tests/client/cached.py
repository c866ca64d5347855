"""Both clients against a peer that keeps caches (`cache_keeper`): tokens, and what attention to them must give."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import pytest
from cache_keeper import Keeper, attention
from calls import PATIENCE_S

from attnserve import AsyncCache, AsyncClient, Client
from attnserve._caching.caches import AsyncCaches
from attnserve._settings.retry import RetryPolicy

Transport: TypeAlias = Literal["stream", "unary"]
Array: TypeAlias = np.ndarray[Any, Any]

H, D = 2, 3


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


KEYS, VALUES = normal(0, 1, H, 20, D), normal(1, 1, H, 20, D)
QUERY = normal(2, 1, H, 1, D)


def part(begin: int, end: int) -> tuple[Array, Array]:
    return KEYS[:, :, begin:end], VALUES[:, :, begin:end]


def reference(length: int, query: Array = QUERY, causal: bool = False) -> Array:
    """The attention to the first tokens of KEYS and VALUES."""
    return attention(query[0], KEYS[0, :, :length], VALUES[0, :, :length], causal)[None]


class Blocking:
    """An AsyncClient, or an object that it returned, as a blocking one: one event loop runs each call to its end."""

    def __init__(self, target: Any, runner: asyncio.Runner) -> None:
        self.target = target
        self.runner = runner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.target, name)
        return self._call(value) if inspect.ismethod(value) else self._wrapped(value)

    def _call(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            async def run() -> Any:
                plain = {name: self._bare(value) for name, value in options.items()}
                result = method(*map(self._bare, arguments), **plain)
                return await result if inspect.isawaitable(result) else result

            return self._wrapped(self.runner.run(run()))

        return call

    def _bare(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._bare(item) for item in value]
        return value.target if isinstance(value, Blocking) else value

    def _wrapped(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._wrapped, value))
        return Blocking(value, self.runner) if isinstance(value, AsyncCache | AsyncCaches) else value


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


@pytest.fixture
def address(keeper: Keeper) -> Iterator[str]:
    with keeper.serve() as address:
        yield address


@pytest.fixture(params=["stream", "unary"])
def transport(request: pytest.FixtureRequest) -> Transport:
    name: Transport = request.param
    return name


@pytest.fixture(params=[Client, AsyncClient], ids=["Client", "AsyncClient"])
def client(
    request: pytest.FixtureRequest, address: str, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Either client. Retries wait a tenth of the usual time, which makes no difference to caches."""
    monkeypatch.setattr("attnserve._settings.config.RetryPolicy", partial(RetryPolicy, first_delay=0.01))
    if request.param is Client:
        with Client(address, transport=transport, timeout=PATIENCE_S) as client:
            yield client
        return
    with asyncio.Runner() as runner:
        async_client = AsyncClient(address, transport=transport, timeout=PATIENCE_S)
        yield Blocking(async_client, runner)
        runner.run(async_client.close())
