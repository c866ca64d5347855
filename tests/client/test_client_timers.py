"""What is to run later runs in one thread, in the order in which it is due."""

from __future__ import annotations

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
from attnserve._transports.timers import Timers

NAME = "attnserve-timers"


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def until_ended(others: list[threading.Thread]) -> None:
    for thread in threads():
        if thread not in others:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_functions_run_in_the_order_in_which_they_are_due() -> None:
    """The thread ends with the last of them; a later one has another."""
    before, timers, ran = threads(), Timers(), SimpleQueue[tuple[float, float]]()

    def run(delay: float, begin: float) -> None:
        ran.put((delay, time.monotonic() - begin))

    for _ in range(2):
        for delay in (0.2, 0.05, 0.1, 0.01):
            timers.later(delay, partial(run, delay, time.monotonic()))
        assert len(threads()) == len(before) + 1
        found = [ran.get(timeout=PATIENCE_S) for _ in range(4)]
        assert [delay for delay, _ in found] == [0.01, 0.05, 0.1, 0.2]
        assert all(after >= delay for delay, after in found)
        until_ended(before)


def test_what_is_cancelled_does_not_run() -> None:
    before, timers, ran = threads(), Timers(), SimpleQueue[str]()
    cancelled = timers.later(0.02, lambda: ran.put("cancelled"))
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


def test_calls_that_wait_for_another_attempt_share_a_thread() -> None:
    """A server that is away for a moment has all calls in flight sent again."""
    before, away, most = threads(), threading.Event(), [0]

    def unary(message: bytes, context: grpc.ServicerContext) -> bytes:
        most[0] = max(most[0], len(threads()))
        if not away.is_set():
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        return good_unary(message, context)

    with peer(good, unary) as address, Client(address, transport="unary", retries=20) as client:
        futures = [client.submit(*[array(number)] * 3) for number in range(200)]
        while most[0] == len(before):
            time.sleep(0.01)
        away.set()
        assert [future.result(PATIENCE_S).output[0, 0] for future in futures] == list(range(200))
    assert most[0] == len(before) + 1
