"""Operations on caches from threads and tasks: ordered per cache, no cache waits for another, and none for ever."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cache_keeper import Keeper
from cached import QUERY, D, H, Transport, address, keeper, normal, part, reference, transport
from calls import PATIENCE_S

from attnserve import (
    AsyncClient,
    AttnServeError,
    Client,
    ClientClosedError,
    DeadlineExceededError,
    FailedPreconditionError,
)

__all__ = ["address", "keeper", "transport"]


def test_threads_append_to_one_cache_in_some_order(address: str, keeper: Keeper, transport: Transport) -> None:
    with Client(address, transport=transport) as client, ThreadPoolExecutor(8) as threads:
        cache = client.create_cache(H, D)
        other = client.create_cache(H, D)

        def append(number: int) -> int:
            if number % 3:
                return cache.append(*part(0, number % 4 + 1))
            caches = [cache, other] if number % 2 else [other, cache]
            keys = [np.concatenate([tensor, tensor]) for tensor in part(0, 1)]
            result = client.attend(normal(9, 2, H, 1, D), *keys, caches=caches)
            return result.cache_lengths[caches.index(cache)]

        lengths = list(threads.map(append, range(60)))
    assert len(set(lengths)) == 60  # each saw a length of its own: none was refused, none was doubled
    assert max(lengths) == cache.length == sum(number % 4 + 1 if number % 3 else 1 for number in range(60))
    assert other.length == 20
    assert "FAILED_PRECONDITION" not in str(keeper.asked)


def test_threads_that_know_the_length_append_what_is_lacking_once(
    address: str, keeper: Keeper, transport: Transport
) -> None:
    """All have seen the same length of one handle: one of them appends."""
    with Client(address, transport=transport) as client, ThreadPoolExecutor(8) as threads:
        cache = client.create_cache(H, D)
        known = cache.length

        def fill(_: int) -> int | None:
            try:
                return cache.append(*part(known, 3), expected_length=known)
            except FailedPreconditionError as error:
                return -(error.actual_length or 0)

        assert sorted(threads.map(fill, range(8))) == [-3] * 7 + [3]
        other = client.open_cache(cache.name)
        assert cache.append(*part(3, 4)) == 4
        assert other.append(*part(4, 6), expected_length=np.int64(4)) == 6, "whatever this handle has seen so far"
        np.testing.assert_allclose(other.attend(QUERY).output, reference(6), atol=1e-6)
        layered = client.create_cache(H, D, layers=2)
        assert layered.append(*part(0, 2), layer=1, expected_length=0) == 2
        assert layered.lengths == (0, 2)


async def test_tasks_that_know_the_length_append_what_is_lacking_once(address: str, transport: Transport) -> None:
    async with AsyncClient(address, transport=transport) as client, client.create_cache(H, D) as cache:
        fills = (cache.append(*part(0, 3), expected_length=0) for _ in range(4))
        outcomes = await asyncio.gather(*fills, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [int, *[FailedPreconditionError] * 3]
        assert (outcomes[0], cache.length) == (3, 3)


def test_what_is_submitted_takes_effect_in_its_order(address: str, transport: Transport) -> None:
    with Client(address, transport=transport) as client:
        cache = client.create_cache(H, D)
        futures = [client.submit(QUERY, *part(step, step + 1), caches=cache) for step in range(20)]
        for step, future in enumerate(futures):
            assert future.result().cache_lengths == (step + 1,)
            np.testing.assert_allclose(future.result().output, reference(step + 1), atol=1e-6)


def test_a_callback_may_use_the_cache_and_wait(address: str) -> None:
    """The operation whose callback it is has let go of the cache."""
    with Client(address, transport="unary", timeout=PATIENCE_S) as client:
        cache = client.create_cache(H, D)
        appended: Future[int] = Future()

        def append(done: Future[Any]) -> None:
            try:
                appended.set_result(cache.append(*part(1, 3)))
            except AttnServeError as error:
                appended.set_exception(error)

        client.submit(QUERY, *part(0, 1), caches=cache).add_done_callback(append)
        assert appended.result() == 3


async def test_tasks_append_to_one_cache_in_their_order(address: str, transport: Transport) -> None:
    async with AsyncClient(address, transport=transport) as client, await client.create_cache(H, D) as cache:
        lengths = await asyncio.gather(*(cache.append(*part(step, step + 1)) for step in range(20)))
        assert lengths == list(range(1, 21))
        np.testing.assert_allclose((await cache.attend(QUERY)).output, reference(20), atol=1e-6)
        assert len(await client.caches.list()) == 1
    assert cache.length == 20


def test_queries_of_a_resident_memory_run_side_by_side(address: str, keeper: Keeper, transport: Transport) -> None:
    """The peer answers neither of two queries before both have arrived; over a stream it reads one after the other."""
    with Client(address, transport=transport, streams=2) as client, ThreadPoolExecutor(2) as threads:
        cache = client.create_cache(H, D)
        cache.append(*part(0, 5))
        both = threading.Barrier(2)
        keeper.before["Attend"] = lambda request: both.wait(PATIENCE_S)
        for result in threads.map(cache.attend, [QUERY] * 2):
            np.testing.assert_allclose(result.output, reference(5), atol=1e-6)


def test_different_caches_do_not_wait_for_each_other(address: str, keeper: Keeper) -> None:
    with Client(address) as client, ThreadPoolExecutor(2) as threads:
        caches = [client.create_cache(H, D) for _ in range(2)]
        both = threading.Barrier(2)
        keeper.before["Append"] = lambda request: both.wait(PATIENCE_S)
        assert list(threads.map(lambda cache: cache.append(*part(0, 5)), caches)) == [5, 5]


def test_what_waits_for_its_turn_does_not_wait_beyond_its_timeout(address: str, keeper: Keeper) -> None:
    arrived, released = threading.Event(), threading.Event()

    def hold(request: Any) -> None:
        arrived.set()
        released.wait(PATIENCE_S)

    keeper.before["Append"] = hold
    with Client(address) as client, ThreadPoolExecutor(1) as threads:
        cache = client.create_cache(H, D)
        slow = threads.submit(cache.append, *part(0, 4), timeout=None)
        assert arrived.wait(PATIENCE_S)
        waiting = [client.submit(QUERY, caches=cache, timeout=timeout) for timeout in (0.3, 0.1, PATIENCE_S, None)]
        for future in waiting[:2]:
            with pytest.raises(DeadlineExceededError):
                future.result(PATIENCE_S)
        assert waiting[3].cancel()
        assert not waiting[2].done()
        released.set()
        np.testing.assert_allclose(waiting[2].result().output, reference(4), atol=1e-6)
        assert slow.result() == cache.append(*part(0, 1)) - 1 == 4
    assert keeper.methods() == ["Create", "Append", "Attend", "Append"]


async def test_a_task_that_is_cancelled_lets_go_of_its_turn(address: str, keeper: Keeper) -> None:
    arrived, released = threading.Event(), threading.Event()

    def hold(request: Any) -> None:
        arrived.set()
        released.wait(PATIENCE_S)

    keeper.before["Attend"] = hold
    async with AsyncClient(address, transport="unary") as client:
        cache = await client.create_cache(H, D)
        stuck = asyncio.create_task(cache.attend(QUERY, *part(0, 3)))
        await asyncio.to_thread(arrived.wait, PATIENCE_S)
        waiting = asyncio.create_task(cache.append(*part(0, 3)))
        too_late = asyncio.create_task(cache.append(*part(0, 3), timeout=0.1))
        with pytest.raises(DeadlineExceededError):
            await too_late
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
        assert await waiting == 3
        released.set()


def test_a_client_that_is_closed_lets_go_of_all_that_waits(address: str, keeper: Keeper) -> None:
    """More operations than the recursion limit."""
    released = threading.Event()
    keeper.before["Attend"] = lambda request: released.wait(PATIENCE_S)
    client = Client(address)
    cache = client.create_cache(H, D)
    futures = [client.submit(QUERY, *part(0, 1), caches=cache) for _ in range(3000)]
    client.close()
    released.set()
    assert {type(future.exception(PATIENCE_S)) for future in futures} == {ClientClosedError}
    with pytest.raises(ClientClosedError):
        cache.append(*part(0, 1))
