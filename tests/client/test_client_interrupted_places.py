"""What a signal's handler raises in narrow places of the SDK: it ends the call that the main thread is in, no other."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
from calls import PATIENCE_S, until
from peers import peer, replies

from attnserve import Client, ClientClosedError, DeadlineExceededError, UnavailableError
from attnserve._caching.plans import Plan, Steps
from attnserve._caching.state import CacheState
from attnserve._caching.transaction import Transaction
from attnserve._caching.turns import Turns
from attnserve._requests import cache_requests
from attnserve._requests.cache_requests import CacheInfo
from attnserve._transports.thread_future import CallFuture, later

ARRAY = np.ones((1, 2, 3), np.float32)


class AlarmError(Exception):
    """What the handler raises."""


@pytest.fixture
def alarm() -> Iterator[Callable[[], None]]:
    """Has the signal arrive."""

    def handler(*arguments: Any) -> None:
        raise AlarmError

    before = signal.signal(signal.SIGALRM, handler)
    yield lambda: signal.raise_signal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


def test_as_the_deadlines_thread_is_woken(alarm: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is woken for the next deadline, although that of the call that was interrupted would have come first."""
    released = threading.Event()

    def answers_the_first(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from replies(next(messages))
        released.wait(PATIENCE_S)

    with peer(answers_the_first) as address, Client(address, timeout=None) as client:
        client.attend(ARRAY, ARRAY, ARRAY)
        timer = client._calls.servers.connection().stream()._timer
        until(lambda: bool(timer._waiters), "the thread waits, without a limit")  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            patch.setattr(timer, "notify", alarm)
            with pytest.raises(AlarmError):
                client.attend(ARRAY, ARRAY, ARRAY, timeout=0.01)
        late = client.submit(ARRAY, ARRAY, ARRAY, timeout=0.02)
        assert isinstance(late.exception(PATIENCE_S), DeadlineExceededError)
        released.set()


@pytest.mark.parametrize("place", ["before it is sent", "once it is sent", "as its answer is awaited", "as it fails"])
def test_as_another_threads_operation_on_a_cache_begins(alarm: Callable[[], None], place: str) -> None:
    """One that waited for the operation that the main thread ends: it begins, and ends, nevertheless."""

    class Answer(Future[int]):
        def add_done_callback(self, fn: Callable[[Future[int]], object]) -> None:
            if place == "as its answer is awaited":
                alarm()
            super().add_done_callback(fn)

    answer = Answer()
    failure = UnavailableError("as it begins")
    outcomes: SimpleQueue[Any] = SimpleQueue()
    info = CacheInfo("cache", 1, 1, 1, 1, "float32", (0,), 0, 0, None, None)
    cache = CacheState(info, Turns(later), None)

    def steps() -> Steps[int]:
        found: int = yield cache_requests.get("cache")
        return found

    def send(request: object, timeout: float | None) -> Answer:
        if place == "as it fails":
            raise failure
        if place == "before it is sent":
            alarm()
        sent.append(request)
        if place == "once it is sent":
            alarm()
        return answer

    def settle(outcome: object) -> None:
        if place == "as it fails" and not settled:
            settled.append(outcome)
            alarm()
            settled.append("the signal waited for this, which may take its time")
        outcomes.put(outcome)

    sent: list[object] = []
    settled: list[object] = []
    mine = Transaction(cache.turns, Plan(steps(), (cache,), True, None), lambda request, timeout: Future(), bool)
    others = Transaction(cache.turns, Plan(steps(), (cache,), True, None), send, settle)
    mine.begin()
    others.begin()
    with pytest.raises(AlarmError):
        mine.cancel()
    answer.set_result(1)
    assert outcomes.get(timeout=PATIENCE_S) == (failure if place == "as it fails" else 1)
    assert len(sent) == (0 if place == "as it fails" else 1)
    assert outcomes.empty()
    assert len(settled) == (1 if place == "as it fails" else 0)


def test_as_a_thread_for_later_begins(alarm: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever begins it waits for it under a lock of `threading`, whose own error would be raised instead."""
    start = threading.Timer.start

    def start_and_bark(timer: threading.Timer) -> None:
        alarm()
        start(timer)

    monkeypatch.setattr(threading.Timer, "start", start_and_bark)
    called = threading.Event()
    with pytest.raises(AlarmError):
        later(0.0, called.set)
    assert called.wait(PATIENCE_S)


def test_as_a_client_is_closed(alarm: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits in another thread is told, also behind the one at whom it comes."""
    settle, released = CallFuture.settle, threading.Event()
    interrupted: list[object] = []

    def interrupted_once(future: CallFuture[Any, Any], outcome: Any) -> None:
        if not interrupted:
            interrupted.append(future)
            alarm()
        settle(future, outcome)

    def silent(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        released.wait(PATIENCE_S)
        yield from ()

    with peer(silent) as address, Client(address, timeout=None) as client:
        calls = [client.submit(ARRAY, ARRAY, ARRAY) for _ in range(3)]
        with monkeypatch.context() as patch:
            patch.setattr(CallFuture, "settle", interrupted_once)
            with pytest.raises(AlarmError):
                client.close()
            for call in calls:
                assert isinstance(call.exception(PATIENCE_S), ClientClosedError)
        released.set()
    assert interrupted == [calls[0]]
