"""What a signal's handler raises while the main thread has a future: nobody else waits for ever because of that."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from calls import PATIENCE_S
from interrupting import Interrupt, handled, interrupted_at

from attnserve import Client
from attnserve._transports.thread_future import CallFuture

__all__ = ["handled"]

pytestmark = pytest.mark.usefixtures("handled")

Operation = Callable[[CallFuture[bytes, bytes]], object]

OPERATIONS: dict[str, Operation] = {
    "done": lambda future: future.done(),
    "cancelled": lambda future: future.cancelled(),
    "running": lambda future: future.running(),
    "repr": repr,
    "settle": lambda future: future.settle(b"reply"),
    "result": lambda future: future.result(1e-6),
    "exception": lambda future: future.exception(1e-6),
    "add_done_callback": lambda future: future.add_done_callback([].append),
    "cancel": lambda future: future.cancel(),
}


def settle(future: CallFuture[bytes, bytes]) -> None:
    """Does what is done when a reply comes, unless the call was withdrawn."""
    with future._condition:
        withdrawn = future._state == "CANCELLED_AND_NOTIFIED"
    if not withdrawn:
        future.settle(b"reply")


@pytest.mark.parametrize("calls_back", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_wherever_it_comes_in_a_method_another_thread_can_settle_the_future(name: str, calls_back: bool) -> None:
    for place in itertools.count():
        future: CallFuture[bytes, bytes] = CallFuture(bytes)
        future.withdraw = lambda *, waits: True
        if calls_back:
            future.add_done_callback([].append)
        is_there = interrupted_at(place, lambda future=future: OPERATIONS[name](future))
        cancelled = future.cancelled()
        other = threading.Thread(target=settle, args=(future,), daemon=True)
        other.start()
        other.join(PATIENCE_S)
        assert not other.is_alive(), f"interrupted in place {place}"
        assert not future._latch.locked(), "whoever waits may go on"
        assert cancelled or future.result(0) == b"reply"
        if not is_there:
            break
    assert place > 1


def test_wherever_it_comes_in_a_wait_that_ends_others_that_wait_go_on() -> None:
    class Latch:
        """Is opened while one waits for it."""

        def __init__(self, future: CallFuture[bytes, bytes]) -> None:
            self.future, self.own = future, future._latch
            self.release = self.own.release
            future._latch = self  # type: ignore[assignment]

        def acquire(self, timeout: float) -> bool:
            hook = sys.getprofile()
            sys.setprofile(None)
            self.future.settle(b"reply")  # as another thread would
            sys.setprofile(hook)
            return self.own.acquire(timeout=timeout)

    for place in itertools.count():
        future: CallFuture[bytes, bytes] = CallFuture(bytes)
        latch = Latch(future)
        is_there = interrupted_at(place, lambda future=future: future.result(PATIENCE_S))
        assert not (future.done() and latch.own.locked()), f"interrupted in place {place}"
        if not is_there:
            break
    assert place > 1


def test_one_that_comes_as_a_future_is_cancelled_reaches_the_caller_and_callbacks_are_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if it is an Exception, which `concurrent.futures` would log if it came in a callback: in that of our own."""
    open_latch = CallFuture._invoke_callbacks

    def interrupted(future: CallFuture[bytes, bytes]) -> None:
        signal.raise_signal(signal.SIGALRM)
        open_latch(future)

    def bark(*arguments: Any) -> None:
        raise ValueError("a handler's")

    monkeypatch.setattr(CallFuture, "_invoke_callbacks", interrupted)
    future: CallFuture[bytes, bytes] = CallFuture(bytes)
    called: list[Future[bytes]] = []
    future.add_done_callback(called.append)
    before = signal.signal(signal.SIGALRM, bark)
    try:
        with pytest.raises(ValueError, match="a handler's"):
            future.cancel()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert future.cancelled()
    assert called == [future]
    assert not future._latch.locked()


@pytest.mark.parametrize("method", ["cancel", "settle", "add_done_callback"])
def test_what_a_future_calls_back_can_be_interrupted(method: str) -> None:
    """It may take its time."""
    so_far: list[str] = []

    def call_back(_: object) -> None:
        so_far.append("begun")
        signal.raise_signal(signal.SIGINT)
        so_far.append("over")

    future: CallFuture[bytes, bytes] = CallFuture(bytes)
    operation: dict[str, Callable[[], object]] = {
        "cancel": future.cancel,
        "settle": lambda: future.settle(b"reply"),
        "add_done_callback": lambda: future.add_done_callback(call_back),
    }
    if method == "add_done_callback":
        future.settle(b"reply")
    else:
        future.add_done_callback(call_back)
    with pytest.raises(Interrupt):
        operation[method]()
    assert so_far == ["begun"]


def test_what_two_threads_cancel_calls_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    future: CallFuture[bytes, bytes] = CallFuture(bytes)
    called: list[Future[bytes]] = []
    future.add_done_callback(called.append)
    other = threading.Thread(target=future.cancel)
    cancel = Future.cancel

    def beside_another(this: Future[bytes]) -> bool:
        """Gives another thread the time to cancel it first, if it can."""
        monkeypatch.setattr(Future, "cancel", cancel)
        other.start()
        other.join(0.2)
        return cancel(this)

    monkeypatch.setattr(Future, "cancel", beside_another)
    assert future.cancel()
    other.join(PATIENCE_S)
    assert called == [future]


def test_a_callback_that_fails_at_once_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: object) -> None:
        raise ValueError("a callback's")

    future: CallFuture[bytes, bytes] = CallFuture(bytes)
    future.settle(b"reply")
    future.add_done_callback(fail)
    (logged,) = [record.exc_info for record in caplog.records if record.exc_info]
    assert str(logged[1]) == "a callback's"


def test_closing_a_client_needs_no_lock_of_a_future() -> None:
    """It waits for calls whose answers nobody waits for."""
    client = Client("127.0.0.1:1")
    told: CallFuture[Any, Any] = CallFuture(bytes)
    told.settle(b"reply")
    client._calls._telling.add(told)
    held, closed = threading.Event(), threading.Event()

    def hold() -> None:
        with told._condition:
            held.set()
            assert closed.wait(PATIENCE_S)

    def close() -> None:
        client.close()
        closed.set()

    holding, closing = threading.Thread(target=hold, daemon=True), threading.Thread(target=close, daemon=True)
    holding.start()
    assert held.wait(PATIENCE_S)
    closing.start()
    for each in (closing, holding):
        each.join(PATIENCE_S / 2)
        assert not each.is_alive()
