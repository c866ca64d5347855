"""Calls that a finalizer cancels. Python's garbage collector runs it in any thread that allocates, at any moment: the
thread may hold any lock of the client's, or be about to settle that very call.

The server is a real one. The garbage is collected at the n-th allocation, for each n in turn.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from calls import PATIENCE_S, until
from conftest import Server
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from peers import good, peer

from attnserve import AsyncClient, Client
from attnserve._settings.retry import RetryPolicy
from attnserve._transports.tasks import CallFuture

MOMENTS = range(1, 400)
"""How many objects are allocated before the garbage is collected: a call allocates fewer."""

ARRAY = np.ones((1, 1, 1, 2), np.float32)


class Owner:
    """An object that cancels a call when it is collected."""

    def __init__(self, future: Any) -> None:
        self.itself = self  # so that only the collector finds it
        self.future = future

    def __del__(self) -> None:
        self.future.cancel()


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Runs Python's garbage collector only when a test says so; restores it afterwards."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.disable()
    yield
    gc.set_threshold(*thresholds)
    gc.enable()


@contextmanager
def collecting_after(objects: int) -> Iterator[None]:
    """Has the collector run once `objects` objects have been allocated."""
    gc.set_threshold(objects)
    gc.enable()
    try:
        yield
    finally:
        gc.disable()


def ends(run: Callable[[], object]) -> bool:
    """Whether a function ends; it runs in a thread, which is left behind if it does not."""
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return not thread.is_alive()


@pytest.mark.parametrize("way", ["stream", "unary", "cache"])
def test_while_a_thread_makes_another_call(server: Server, way: Any) -> None:
    client = Client(server.address, transport="unary" if way == "unary" else "stream", timeout=None)
    given_up: list[Any] = []
    answered: list[float] = []

    def call() -> None:
        caches = client.create_cache(1, 2) if way == "cache" else None
        client.attend(ARRAY, ARRAY, ARRAY, caches=caches)
        inputs = (ARRAY, ARRAY, ARRAY) if caches is None else (ARRAY,)
        for objects in MOMENTS:
            given_up.append(client.submit(*inputs, caches=caches))
            Owner(given_up[-1])
            with collecting_after(objects):
                answered.append(client.submit(*inputs, caches=caches).result().output[0, 0, 0, 0])
        if caches is not None:
            caches.delete()

    assert ends(call)
    assert answered == [1.0] * len(MOMENTS)
    assert any(future.cancelled() for future in given_up)
    assert not wait(given_up, PATIENCE_S).not_done
    client.close()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_while_spans_are_taken(server: Server, kind: Any) -> None:
    """The thread that takes them may hold a lock of theirs."""
    taking, ended = threading.Lock(), threading.Event()

    class Spans(SpanProcessor):
        def on_end(self, span: object) -> None:
            with taking:
                ended.set()

    provider = TracerProvider()
    provider.add_span_processor(Spans())
    client = kind(server.address, timeout=None, tracing=provider)
    long = np.ones((1, 1, 3000, 2), np.float32)

    def give_up() -> None:
        future = client.submit(long, long, long)
        with taking:
            Owner(future)
            del future
            gc.collect()

    async def run() -> None:
        give_up()
        assert await asyncio.to_thread(ended.wait, PATIENCE_S)
        await client.close()

    assert ends(give_up if kind is Client else lambda: asyncio.run(run()))
    assert ended.wait(PATIENCE_S)
    if kind is Client:
        client.close()


def test_while_a_thread_begins_to_wait_for_a_retry() -> None:
    """It holds the lock of the timers, of which a cancellation stops one."""

    def gone(message: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        raise AssertionError("aborted")

    with peer(good, gone) as address, Client(address, timeout=None, transport="unary") as client:
        unary = client._calls._unary
        unary._policy = RetryPolicy(9, first_delay=PATIENCE_S, longest_delay=PATIENCE_S)
        future = client.submit(ARRAY, ARRAY, ARRAY)
        (call,) = unary._calls
        until(lambda: call.timer is not None, "it waits for a retry")

        def give_up() -> None:
            with unary._timers._changed:
                future.cancel()

        assert ends(give_up)
        assert not wait([future], PATIENCE_S).not_done


@pytest.mark.parametrize("way", ["stream", "cache"])
def test_while_a_task_makes_another_call(server: Server, way: Any) -> None:
    given_up: list[Any] = []
    answered: list[float] = []

    async def call() -> None:
        async with AsyncClient(server.address, timeout=None) as client:
            caches = await client.create_cache(1, 2) if way == "cache" else None
            await client.attend(ARRAY, ARRAY, ARRAY, caches=caches)
            inputs = (ARRAY, ARRAY, ARRAY) if caches is None else (ARRAY,)
            for objects in MOMENTS:
                given_up.append(client.submit(*inputs, caches=caches))
                Owner(given_up[-1])
                with collecting_after(objects):
                    answered.append((await client.submit(*inputs, caches=caches)).output[0, 0, 0, 0])
            if caches is not None:
                await caches.delete()

    assert ends(lambda: asyncio.run(call()))
    assert answered == [1.0] * len(MOMENTS)
    assert any(future.cancelled() for future in given_up)


async def test_while_another_thread_does_anything() -> None:
    """The loop is woken."""
    withdrawn = asyncio.Event()
    future: CallFuture[int, int] = CallFuture(lambda outcome: outcome)
    future.withdraw = withdrawn.set
    loop = asyncio.get_running_loop()
    loop.set_debug(True)  # refuses calls that are not thread-safe
    timer = threading.Timer(0.05, future.cancel)  # the loop sleeps by then, until something is due
    timer.start()
    began = loop.time()
    loop.call_later(PATIENCE_S, withdrawn.set)
    await withdrawn.wait()
    assert loop.time() - began < PATIENCE_S / 2
    assert future.cancelled()


async def test_while_a_task_gets_the_result() -> None:
    """Nobody is notified, least of all the thread that settles other calls next."""

    def finish(outcome: int) -> int:
        assert future.cancel()
        return outcome

    future: CallFuture[int, int] = CallFuture(finish)
    future.settle(1)
    assert future.cancelled()
