"""What is to run later runs in one thread, in the order in which it is due."""

from __future__ import annotations

import heapq
import threading
import time
from functools import partial
from queue import SimpleQueue

import grpc
import pytest
from askers import array
from calls import PATIENCE_S
from peers import good, good_unary, peer

from attnserve import Client
from attnserve._transports.timers import Timer, Timers

NAME = "attnserve-timers"


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == NAME}


def until_ended(others: set[threading.Thread]) -> None:
    for thread in threads() - others:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_functions_run_in_the_order_in_which_they_are_due() -> None:
    """The thread ends with the last of them; a later one has another."""
    before, timers, ran = threads(), Timers(), SimpleQueue[tuple[float, float, threading.Thread]]()

    def run(delay: float, begin: float) -> None:
        ran.put((delay, time.monotonic() - begin, threading.current_thread()))

    for _ in range(2):
        with timers._changed:  # so that none is due before all are there
            for delay in (0.2, 0.05, 0.1, 0.01):
                timers.later(delay, partial(run, delay, time.monotonic()))
        found = [ran.get(timeout=PATIENCE_S) for _ in range(4)]
        assert [delay for delay, *_ in found] == [0.01, 0.05, 0.1, 0.2]
        assert all(after >= delay for delay, after, _ in found)
        assert len({thread for *_, thread in found}) == 1
        until_ended(before)


def test_what_is_cancelled_does_not_run() -> None:
    before, timers, ran = threads(), Timers(), SimpleQueue[str]()
    with timers._changed:
        cancelled = timers.later(0.0, lambda: ran.put("cancelled"))
        timers.later(0.05, lambda: ran.put("kept"))
        cancelled.cancel()
    until_ended(before)
    assert ran.get_nowait() == "kept"
    assert ran.empty()


def test_without_a_thread_nothing_is_left_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    timers, ran = Timers(), SimpleQueue[int]()

    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        with pytest.raises(RuntimeError, match="new thread"):
            timers.later(0.0, lambda: ran.put(1))
    timers.later(0.0, lambda: ran.put(2))
    assert ran.get(timeout=PATIENCE_S) == 2
    assert ran.empty()


def test_what_is_cancelled_as_it_is_due_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer may cancel at any moment, without a lock."""
    before, timers, ran = threads(), Timers(), SimpleQueue[str]()
    pop = heapq.heappop

    def cancelling(due: list[tuple[float, int, Timer]]) -> tuple[float, int, Timer]:
        entry = pop(due)
        if entry[2] is doomed:
            doomed.cancel()
        return entry

    monkeypatch.setattr(heapq, "heappop", cancelling)
    with timers._changed:
        doomed = timers.later(0.0, lambda: ran.put("doomed"))
        timers.later(0.01, lambda: ran.put("next"))
    assert ran.get(timeout=PATIENCE_S) == "next"
    until_ended(before)
    timers.later(0.0, lambda: ran.put("later"))
    assert ran.get(timeout=PATIENCE_S) == "later"


def test_closed_timers_run_nothing_and_wait_for_nothing() -> None:
    before, timers, ran = threads(), Timers(), SimpleQueue[int]()
    timers.later(PATIENCE_S * 10, lambda: ran.put(1))
    timers.close()
    until_ended(before)
    assert ran.empty()


def test_calls_that_wait_for_another_attempt_share_a_thread() -> None:
    """A server that is away for a moment has all calls in flight sent again."""
    before, seen, came_back, away = threads(), set[threading.Thread](), threading.Event(), threading.Event()

    def unary(message: bytes, context: grpc.ServicerContext) -> bytes:
        if now := threads() - before:
            seen.update(now)
            came_back.set()
        if not away.is_set():
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        return good_unary(message, context)

    with peer(good, unary) as address, Client(address, transport="unary", retries=20) as client:
        futures = [client.submit(*[array(number)] * 3) for number in range(200)]
        assert came_back.wait(PATIENCE_S)
        assert len(threads() - before) <= 1
        away.set()
        assert [future.result(PATIENCE_S).output[0, 0] for future in futures] == list(range(200))
    assert seen
