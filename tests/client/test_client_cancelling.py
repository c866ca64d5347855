"""Cancellation in every iteration of the event loop: nothing hangs, nothing is left behind, and what follows is right.

The server is a real one. The loop counts its iterations (turns), and cancels the operation in one of them, from the
first to the one in which it would have been done.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from askers import array
from calls import PATIENCE_S
from conftest import Server
from peers import peer, replies

from attnserve import AsyncClient, AttentionResult, CacheInfo, Client, ClientClosedError
from attnserve.v1 import attention_pb2 as pb

T = TypeVar("T")


class Turns(selectors.DefaultSelector):
    """The selector, which a loop calls once per turn: it cancels a task in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0
        self.last = False
        """Whether the task is cancelled after everything else that is due in that turn, rather than before."""
        self.task: asyncio.Task[Any] | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        if self.task is not None:
            self.left -= 1
            if not self.left and self.last:
                self.task.get_loop().call_soon(self.task.cancel)
            elif not self.left:
                self.task.cancel()
        return ready

    async def cancelled_in(self, turn: int, operation: Callable[[], Awaitable[T]]) -> T | None:
        """The result of an operation that is to be cancelled in a turn; None if it was cancelled."""

        async def run() -> T:
            return await operation()

        self.left, self.task = turn, asyncio.create_task(run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.task
        except asyncio.CancelledError:
            return None
        finally:
            self.task = None

    async def each(self, operation: Callable[[], Awaitable[T]]) -> list[T | None]:
        """The same for every turn, up to the first one that the operation does not need."""
        outcomes: list[T | None] = []
        for turn in itertools.count(1):
            outcomes.append(await self.cancelled_in(turn, operation))
            if self.left > 0:
                return outcomes
        raise AssertionError


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def runner(turns: Turns) -> Iterator[asyncio.Runner]:
    """A loop whose tasks all end by themselves after a test: gRPC's own do once the status of their call arrives."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(turns)) as runner:
        yield runner
        if left := asyncio.all_tasks(runner.get_loop()):
            _, pending = runner.run(asyncio.wait(left, timeout=PATIENCE_S))
            assert not pending


@pytest.fixture
def observer(paged_server: Server) -> Iterator[Client]:
    """A separate client, which sees which caches there are."""
    with Client(paged_server.address) as client:
        yield client


def _names(infos: tuple[CacheInfo, ...]) -> set[str]:
    return {info.name for info in infos}


def tokens(seed: int, count: int) -> tuple[Any, Any]:
    normal = np.random.default_rng(seed).standard_normal((2, 2, count, 8)).astype(np.float32)
    return normal[0], normal[1]


def test_the_creation_of_a_cache(paged_server: Server, observer: Client, turns: Turns, runner: asyncio.Runner) -> None:
    """A caller that did not get a cache has none on the server once the client is closed."""
    before = _names(observer.caches.list())

    async def make(turn: int) -> bool:
        """Whether a new client's operation ended before that turn."""
        async with AsyncClient(paged_server.address) as client:
            cache = await turns.cancelled_in(turn, lambda: client.create_cache(2, 8))
        made = _names(observer.caches.list()) - before
        assert made == (set() if cache is None else {cache.name})
        observer.caches.delete(made)
        return turns.left > 0

    turn = next(turn for turn in itertools.count(1) if runner.run(make(turn)))
    assert turn > 3


def test_creations_and_forks_of_one_client(
    paged_server: Server, observer: Client, turns: Turns, runner: asyncio.Runner
) -> None:
    before = _names(observer.caches.list())

    async def run() -> set[str]:
        async with AsyncClient(paged_server.address) as client:
            first = await client.create_cache(2, 8)
            await first.append(*tokens(0, 40))
            caches = [first, *await turns.each(lambda: client.create_cache(2, 8)), *await turns.each(first.fork)]
            assert await first.append(*tokens(1, 1)) == 41, "nobody is in line before it"
            return {cache.name for cache in caches if cache is not None}

    made = runner.run(run())
    assert len(made) >= 3
    assert _names(observer.caches.list()) - before == made
    observer.caches.delete(made)


def test_a_cache_for_a_block(paged_server: Server, observer: Client, turns: Turns, runner: asyncio.Runner) -> None:
    """It is gone after the block, whenever that is cancelled: while it is made, used or deleted."""
    before = _names(observer.caches.list())

    async def run() -> None:
        async with AsyncClient(paged_server.address) as client:

            async def use() -> int:
                async with client.create_cache(2, 8) as cache, cache.fork() as fork:
                    return await fork.append(*tokens(0, 3))

            outcomes = await turns.each(use)
            assert outcomes[-1] == 3
            assert len(outcomes) > 10

    runner.run(run())
    assert _names(observer.caches.list()) == before


def test_appends(paged_server: Server, turns: Turns, runner: asyncio.Runner) -> None:
    """Each is done at most once; the SDK can find out whether it was, and goes on."""

    async def run() -> None:
        async with AsyncClient(paged_server.address) as client, await client.create_cache(2, 8) as cache:
            key, value = tokens(0, 100)
            query = tokens(1, 1)[0]

            async def append() -> int:
                at = cache.length
                return await cache.append(key[:, at : at + 1], value[:, at : at + 1])

            async def appended(operation: Callable[[], Awaitable[Any]]) -> None:
                for turn in itertools.count(1):
                    length = cache.length
                    outcome = await turns.cancelled_in(turn, operation)
                    info = await cache.refresh()
                    assert info.lengths[0] in ((length, length + 1) if outcome is None else (length + 1,))
                    if turns.left > 0:
                        break

            async def attend() -> Any:
                at = cache.length
                return await cache.attend(query, key[:, at : at + 1], value[:, at : at + 1])

            await appended(append)
            await appended(attend)
            length = cache.length
            expected = await client.attend(query, key[:, :length], value[:, :length])
            np.testing.assert_allclose((await cache.attend(query)).output, expected.output, atol=1e-5)

    runner.run(run())


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_calls(layer_server: Server, turns: Turns, runner: asyncio.Runner, transport: Any) -> None:
    layer, width = _a_layer(layer_server)

    async def run() -> None:
        query = tokens(0, 3)[0]
        rows = np.random.default_rng(1).standard_normal((4, width)).astype(np.float32)
        async with AsyncClient(layer_server.address, transport=transport) as client:
            expected = (await client.attend(query, query, query)).output, (await client.apply(layer, rows)).output
            operations = (lambda: client.attend(query, query, query), lambda: client.apply(layer, rows))
            for operation, output in zip(operations, expected, strict=True):
                outcomes = await turns.each(operation)
                assert outcomes[0] is None
                assert outcomes[-1] is not None
                for outcome in outcomes:
                    if outcome is not None:
                        np.testing.assert_array_equal(outcome.output, output)
                np.testing.assert_array_equal((await operation()).output, output)

    runner.run(run())


@pytest.mark.parametrize("last", [False, True])
def test_a_call_that_waits_for_its_servers(turns: Turns, runner: asyncio.Runner, last: bool) -> None:
    """A call given up in any turn up to its sending is no longer in flight; given up earlier, it is never sent."""
    arrived = threading.Event()
    turns.last = last

    def stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answers only calls whose query is 2."""
        for message in messages:
            for call in pb.AttendStreamRequest.FromString(message).calls:
                if call.attend.query.data == array(2).tobytes():
                    yield from replies(pb.AttendStreamRequest(calls=[call]).SerializeToString())
                else:
                    arrived.set()

    async def give_up(turn: int) -> None:
        with peer(stream) as address:
            client = AsyncClient(lambda: [address], timeout=None)  # not with `async with`, which looks up servers
            try:
                assert await turns.cancelled_in(turn, lambda: client.attend(*[array(1)] * 3)) is None
                async with asyncio.timeout(PATIENCE_S):
                    assert (await client.attend(*[array(2)] * 3)).output[0, 0] == 2
                assert client._calls.servers.connection().in_flight == 0
            finally:
                await client.close()

    for turn in itertools.count(1):
        runner.run(give_up(turn))
        if arrived.is_set():
            break
    assert turn > 3


def _a_layer(server: Server) -> tuple[str, int]:
    """The name of a layer that takes activations and no context, and how wide they are."""
    with Client(server.address) as client:
        return next(
            (each.name, each.input_width)
            for each in client.layers.list()
            if not each.vocabulary and not each.context_width
        )


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_closing(paged_server: Server, turns: Turns, runner: asyncio.Runner, transport: Any) -> None:
    """A close that has begun runs to its end."""
    query = tokens(0, 3)[0]

    async def run() -> int:
        for turn in itertools.count(1):
            client = AsyncClient(paged_server.address, transport=transport)
            await client.attend(query, query, query)
            channel = client._calls.servers.connection()._channel
            in_flight = client.submit(query, query, query)
            await turns.cancelled_in(turn, client.close)
            if turn == 1:  # it had not begun
                await client.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:
                await asyncio.wait(others, timeout=PATIENCE_S)
            assert all(task.done() for task in others)
            assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
            (outcome,) = await asyncio.gather(in_flight, return_exceptions=True)
            assert isinstance(outcome, ClientClosedError | AttentionResult), "the server may have been faster"
            await client.close()
            if turns.left > 0:
                return turn
        raise AssertionError

    assert runner.run(run()) > 2
