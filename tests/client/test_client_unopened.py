"""Streams that cannot be opened: no thread can be started, or the channel is closed. Each call gets its outcome,
whether the stream was to be opened for a new call, or for a retry, which no caller sees.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest
from askers import Transport, array, transport
from calls import PATIENCE_S
from peers import good, good_unary, peer, replies

from attnserve import AsyncClient, Client, DeadlineExceededError, UnavailableError

__all__ = ["transport"]

Refusals: TypeAlias = Callable[[int], object]
"""Sets how often opening fails from now on."""

READER, WATCHER, LOOKER = "attnserve-replies", "attnserve-deadlines", "attnserve-resolve"


class Threads:
    """How often threads of a name cannot be started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused = {READER: 0, WATCHER: 0, LOOKER: 0}
        start = threading.Thread.start

        def scarce(thread: threading.Thread) -> None:
            if self.refused.get(thread.name):
                self.refused[thread.name] -= 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", scarce)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


def ending(broken: Callable[[], object]) -> Callable[..., Iterator[bytes]]:
    """The stream of a peer that ends the first call unanswered, having called `broken`."""
    first = iter([True])

    def stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            if next(first, False):
                broken()
                context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            yield from replies(message)

    return stream


def test_a_thread_that_is_not_to_be_had_for_a_moment(threads: Threads) -> None:
    threads.refused[READER] = 1
    with peer(good) as address, Client(address, timeout=PATIENCE_S) as client:
        assert client.attend(*[array(2)] * 3).output[0, 0] == 2
    assert not threads.refused[READER]


def test_a_thread_that_is_never_to_be_had(threads: Threads) -> None:
    threads.refused[READER] = 2
    with peer(good) as address, Client(address, timeout=None, retries=1) as client:
        future = client.submit(*[array(2)] * 3)
        with pytest.raises(UnavailableError, match="can't start new thread"):
            future.result(PATIENCE_S)
        assert client.attend(*[array(3)] * 3).output[0, 0] == 3


def test_a_thread_that_is_not_to_be_had_for_a_retry(threads: Threads) -> None:
    """The retry is due in the thread that watches deadlines, which must go on."""
    stream = ending(lambda: threads.refused.update({READER: 1}))
    with peer(stream) as address, Client(address, timeout=None) as client:
        future = client.submit(*[array(2)] * 3)
        assert future.result(PATIENCE_S).output[0, 0] == 2
    assert not threads.refused[READER]


@pytest.fixture
def scarcity(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often nobody, gRPC included, can start a thread from now on: one number."""
    refused = [0]
    start = threading.Thread.start

    def scarce(thread: threading.Thread) -> None:
        if refused[0] and not thread.name.startswith("ThreadPoolExecutor"):  # the peer's own threads
            refused[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    return refused


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    """Where no other peer will ever be: a channel that gRPC has lost goes on connecting until the process ends."""
    return tmp_path / "socket"


def test_a_thread_that_nobody_gets_for_a_moment(scarcity: list[int]) -> None:
    """The first to fail is not gRPC, which would never again read from the channel."""
    stream = ending(lambda: scarcity.append(scarcity.pop() + 1))
    with peer(stream) as address, Client(address, timeout=None) as client:
        future = client.submit(*[array(2)] * 3)
        assert future.result(PATIENCE_S).output[0, 0] == 2
    assert scarcity == [0]


def test_a_thread_that_grpc_does_not_get_for_a_moment(scarcity: list[int], transport: Transport, socket: Path) -> None:
    """From then on gRPC reads from another channel."""
    with peer(good, good_unary, socket=socket) as address:
        client = Client(address, timeout=None, transport=transport)
        scarcity[0] = 1
        with pytest.raises(UnavailableError, match="thread"):
            client.is_ready()
        assert scarcity == [0]
        assert client.submit(*[array(2)] * 3).result(PATIENCE_S).output[0, 0] == 2
        closing = threading.Thread(target=client.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()


@pytest.mark.parametrize("those_before", [1, 2])
def test_a_thread_that_grpc_does_not_get_for_a_stream(
    monkeypatch: pytest.MonkeyPatch, socket: Path, those_before: int
) -> None:
    """The SDK got its own; then gRPC got none to read with, or none to write with."""
    start, started = threading.Thread.start, iter(range(those_before + 1))

    def scarce(thread: threading.Thread) -> None:
        counts = thread.name != WATCHER and not thread.name.startswith("ThreadPoolExecutor")
        if counts and next(started, None) == those_before:
            raise RuntimeError("can't start new thread")
        start(thread)

    with peer(good, socket=socket) as address:
        client = Client(address, timeout=None)
        monkeypatch.setattr(threading.Thread, "start", scarce)
        assert client.submit(*[array(2)] * 3).result(PATIENCE_S).output[0, 0] == 2
        assert next(started, None) is None
        closing = threading.Thread(target=client.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()


def test_while_there_is_no_thread_no_channel_more_is_lost(
    scarcity: list[int], transport: Transport, socket: Path
) -> None:
    """Each lost channel would keep a file descriptor."""
    with peer(good, good_unary, socket=socket) as address:
        client = Client(address, timeout=None, transport=transport)
        connection = client._calls.servers.connection()
        scarcity[0] = 100
        while scarcity[0]:
            with pytest.raises(UnavailableError, match="thread"):
                client.layers.list()
        assert client.submit(*[array(2)] * 3).result(PATIENCE_S).output[0, 0] == 2
        assert len(connection._lost) == 1
        closing = threading.Thread(target=client.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()


def test_a_thread_that_is_not_to_be_had_to_give_up_a_call(scarcity: list[int]) -> None:
    """The cancellation does not fail, and whoever waits for the call is notified when its reply arrives."""
    ask, answer = threading.Event(), threading.Event()

    def stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            ask.set()
            assert answer.wait(PATIENCE_S)
            yield from replies(message)

    with peer(stream) as address, Client(address, timeout=None) as client:
        future = client.submit(*[array(2)] * 3)
        assert ask.wait(PATIENCE_S)
        scarcity[0] = 1
        with client._calls.servers.connection().stream()._lock:
            assert future.cancel()
        assert scarcity == [0]
        answer.set()
        assert not wait([future], PATIENCE_S).not_done


def test_a_thread_that_looks_is_not_to_be_had_for_a_moment(threads: Threads) -> None:
    """The caller gets an error, and the next call gets the thread."""
    threads.refused[LOOKER] = 1
    with peer(good) as address, Client(lambda: [address], timeout=PATIENCE_S) as client:
        with pytest.raises(RuntimeError, match="thread"):
            client.submit(*[array(2)] * 3)
        assert client.attend(*[array(3)] * 3).output[0, 0] == 3


def test_a_thread_that_watches_is_not_to_be_had_for_a_moment(threads: Threads) -> None:
    """The same: the deadline of the next call is watched."""

    def silent(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for _ in messages:
            yield from ()

    threads.refused[WATCHER] = 1
    with peer(silent) as address, Client(address, timeout=0.05) as client:
        with pytest.raises(RuntimeError, match="thread"):
            client.submit(*[array(2)] * 3)
        late = client.submit(*[array(3)] * 3)
        assert wait([late], PATIENCE_S).done
        assert isinstance(late.exception(), DeadlineExceededError)


def test_a_thread_that_watches_is_there_before_a_retry(threads: Threads) -> None:
    """It is not first needed at a point where no caller could get the error."""
    with (
        peer(ending(lambda: threads.refused.update({WATCHER: 1}))) as address,
        Client(address, timeout=None) as client,
    ):
        assert client.submit(*[array(2)] * 3).result(PATIENCE_S).output[0, 0] == 2


async def attended(client: AsyncClient, number: float) -> Any:
    """The output of a call without a deadline; the test fails if it hangs."""
    async with asyncio.timeout(PATIENCE_S):
        return (await client.attend(*[array(number)] * 3)).output[0, 0]


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Refusals:
    """Sets how often gRPC's asyncio channel fails to open a stream."""
    left = [0]
    channel = grpc.aio.insecure_channel

    def scarce(*arguments: Any, **options: Any) -> Any:
        made = channel(*arguments, **options)
        stream_stream = made.stream_stream

        def method(*arguments: Any) -> Any:
            open_stream = stream_stream(*arguments)

            def call(**options: Any) -> Any:
                if left[0]:
                    left[0] -= 1
                    raise MemoryError("not now")
                return open_stream(**options)

            return call

        made.stream_stream = method  # type: ignore[method-assign]
        return made

    monkeypatch.setattr(grpc.aio, "insecure_channel", scarce)

    def refuse(times: int) -> None:
        left[0] = times

    return refuse


async def test_a_stream_that_a_task_cannot_open_for_a_moment(refusals: Refusals) -> None:
    with peer(good) as address:
        async with AsyncClient(address, timeout=None) as client:
            refusals(1)
            assert await asyncio.gather(attended(client, 2), attended(client, 3)) == [2, 3]


async def test_a_stream_that_a_task_can_never_open(refusals: Refusals) -> None:
    with peer(good) as address:
        async with AsyncClient(address, timeout=None, retries=1) as client:
            refusals(2)
            with pytest.raises(UnavailableError, match="not now"):
                await attended(client, 2)
            assert await attended(client, 3) == 3


async def test_a_stream_that_cannot_be_opened_for_a_retry(refusals: Refusals) -> None:
    """The retry is due in a timer of the loop."""
    with peer(ending(lambda: refusals(1))) as address:
        async with AsyncClient(address, timeout=None) as client:
            assert await attended(client, 2) == 2


async def test_a_channel_that_is_closed_under_a_client() -> None:
    with peer(good) as address:
        async with AsyncClient(address, timeout=None, retries=1) as client:
            assert await attended(client, 2) == 2
            await client._calls.servers.connection()._channel.close()
            for _ in range(2):
                with pytest.raises(UnavailableError, match="closed"):
                    await attended(client, 3)
