"""Both clients over both transports, for tests of what each must do: queries in, results and errors out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, Literal, TypeAlias

import numpy as np
import pytest
import uvloop
from calls import PATIENCE_S

from attnserve import AsyncClient, AttentionResult, Client

Attend: TypeAlias = Callable[..., list[AttentionResult[Any]]]
Arrays: TypeAlias = tuple[Any, Any, Any]
Transport: TypeAlias = Literal["stream", "unary"]


def array(number: float, *shape: int) -> np.ndarray[Any, Any]:
    return np.full(shape or (2, 3), number, np.float32)


def arrays(seed: int = 0) -> Arrays:
    """A query, keys and values of two heads, four tokens long and eight wide."""
    rng = np.random.default_rng(seed)
    query, key, value = (rng.standard_normal((2, 4, 8)).astype(np.float32) for _ in range(3))
    return query, key, value


def attend_in_threads(address: str, queries: list[Any], timeout: float | None = PATIENCE_S, **setup: Any) -> list[Any]:
    with Client(address, **setup) as client:
        futures = [client.submit(query, query, query, timeout=timeout) for query in queries]
        wait(futures)
        return [future.exception() or future.result() for future in futures]


def attend_in_tasks(
    address: str,
    queries: list[Any],
    timeout: float | None = PATIENCE_S,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    **setup: Any,
) -> list[Any]:
    async def run() -> list[Any]:
        async with AsyncClient(address, **setup) as client:
            calls = (client.attend(query, query, query, timeout=timeout) for query in queries)
            return await asyncio.gather(*calls, return_exceptions=True)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(run())


def attend_on_uvloop(address: str, queries: list[Any], timeout: float | None = PATIENCE_S, **setup: Any) -> list[Any]:
    """As many web servers would."""
    return attend_in_tasks(address, queries, timeout, uvloop.new_event_loop, **setup)


@pytest.fixture(
    params=[attend_in_threads, attend_in_tasks, attend_on_uvloop], ids=["Client", "AsyncClient", "AsyncClient-uvloop"]
)
def attend(request: pytest.FixtureRequest) -> Attend:
    """Attends to some queries at once and returns results and errors."""
    function: Attend = request.param
    return function


@pytest.fixture(params=["stream", "unary"])
def transport(request: pytest.FixtureRequest) -> Transport:
    name: Transport = request.param
    return name
