"""Operations on caches in threads that wait for them: each runs its own steps in its turn, and always leaves."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from types import FrameType
from typing import Any

import pytest
from calls import PATIENCE_S

from attnserve import DeadlineExceededError, FailedPreconditionError, UnavailableError
from attnserve._caching import plans, transaction
from attnserve._caching.plans import Plan, Request, Steps
from attnserve._caching.state import CacheState
from attnserve._caching.transaction import Transaction, perform
from attnserve._caching.turns import Turns
from attnserve._requests import cache_requests
from attnserve._requests.cache_requests import CacheInfo
from attnserve._transports.thread_future import later

OURS = ("attnserve._caching.transaction", "attnserve._caching.turns")
GET = cache_requests.get("cache")


@pytest.fixture
def cache() -> CacheState:
    info = CacheInfo("cache", 1, 1, 1, 1, "float32", (0,), 0, 0, None, None)
    return CacheState(info, Turns(later), None)


def plan(cache: CacheState, steps: Steps[Any], timeout: float | None = PATIENCE_S) -> Plan[Any]:
    return Plan(steps, (cache,), True, timeout)


def once() -> Steps[Any]:
    found: Any = yield GET
    return found


def is_free(cache: CacheState) -> bool:
    """Whether no operation holds the cache."""
    return perform(cache.turns, plan(cache, once()), lambda request, timeout: True) is True


def test_each_step_is_sent_what_the_one_before_was_answered(cache: CacheState) -> None:
    def steps() -> Steps[list[Any]]:
        first = yield GET
        second = yield GET
        return [first, second, (yield GET)]

    answers = iter("abc")
    asked: list[float | None] = []

    def ask(request: Request, timeout: float | None) -> str:
        assert request is GET
        asked.append(timeout)
        return next(answers)

    assert perform(cache.turns, plan(cache, steps()), ask) == ["a", "b", "c"]
    assert all(timeout is not None and 0 < timeout <= PATIENCE_S for timeout in asked)
    assert perform(cache.turns, plan(cache, once(), None), lambda request, timeout: timeout) is None
    assert is_free(cache)


def test_who_changes_a_cache_or_looks_at_its_lengths_has_it_alone(cache: CacheState) -> None:
    alone = [plans.truncate(cache, 0, None), plans.delete([cache], None), plans.refresh(cache, None)]
    assert [each.alone for each in alone] == [True] * 3
    assert not plans.fork([cache], GET, None).alone


def test_errors_are_thrown_into_the_steps(cache: CacheState) -> None:
    def steps() -> Steps[str]:
        try:
            yield GET
        except FailedPreconditionError as error:
            return f"met {error}"
        return "nothing"

    def ask(error: Exception) -> Callable[[Request, float | None], Any]:
        def fail(request: Request, timeout: float | None) -> Any:
            raise error

        return fail

    assert perform(cache.turns, plan(cache, steps()), ask(FailedPreconditionError("it"))) == "met it"
    with pytest.raises(UnavailableError, match="gone"):
        perform(cache.turns, plan(cache, steps()), ask(UnavailableError("gone")))
    assert is_free(cache)


def test_an_interrupt_leaves_the_cache_to_others(cache: CacheState) -> None:
    def interrupted(request: Request, timeout: float | None) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perform(cache.turns, plan(cache, once()), interrupted)
    assert is_free(cache)


def test_one_thread_after_the_other(cache: CacheState) -> None:
    """And a thread that does not get its turn in time sends no request."""
    asked, free = threading.Event(), threading.Event()
    begun: list[str] = []

    def first(request: Request, timeout: float | None) -> None:
        begun.append("first")
        asked.set()
        assert free.wait(PATIENCE_S)

    def second(request: Request, timeout: float | None) -> None:
        begun.append("second")

    threads = [
        threading.Thread(target=perform, args=(cache.turns, plan(cache, once()), ask)) for ask in (first, second)
    ]
    threads[0].start()
    assert asked.wait(PATIENCE_S)
    threads[1].start()
    with pytest.raises(DeadlineExceededError):
        perform(cache.turns, plan(cache, once(), 0.01), lambda request, timeout: begun.append("late"))
    assert begun == ["first"]
    free.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert begun == ["first", "second"]
    assert is_free(cache)


def test_steps_that_come_too_late_are_not_taken(cache: CacheState, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("attnserve._caching.transaction.time.monotonic", lambda: now)

    def steps() -> Steps[None]:
        yield GET
        yield GET

    asked: list[float | None] = []

    def ask(request: Request, timeout: float | None) -> None:
        nonlocal now
        asked.append(timeout)
        now += 2.0

    with pytest.raises(DeadlineExceededError):
        perform(cache.turns, plan(cache, steps(), 2.0), ask)
    assert asked == [2.0]


def test_a_turn_that_nothing_makes_expire_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the thread that was to do that waited for ever."""
    monkeypatch.setattr(transaction, "GRACE_SECONDS", 0.01)
    info = CacheInfo("cache", 1, 1, 1, 1, "float32", (0,), 0, 0, None, None)
    cache = CacheState(info, Turns(lambda delay, function: Future()), None)
    cache.turns.take(first := transaction._Place(plan(cache, once(), None)))
    with pytest.raises(DeadlineExceededError):
        perform(cache.turns, plan(cache, once(), 0.01), lambda request, timeout: None)
    cache.turns.leave(first)
    assert is_free(cache)


def test_what_a_signal_handler_raises_as_an_operation_begins_reaches_its_caller(cache: CacheState) -> None:
    """And leaves the cache to others. Later, nobody but the future could tell the caller."""

    class WatchdogError(Exception):
        pass

    def send(request: Request, timeout: float | None) -> Future[Any]:
        if sent:
            raise WatchdogError
        sent.append(future := Future[Any]())
        return future

    def twice() -> Steps[Any]:
        yield GET
        yield GET

    sent: list[Future[Any]] = [Future()]
    outcomes: list[Any] = []
    with pytest.raises(WatchdogError):
        Transaction(cache.turns, plan(cache, once()), send, outcomes.append).begin()
    assert outcomes == []
    assert is_free(cache)
    sent.clear()
    Transaction(cache.turns, plan(cache, twice()), send, outcomes.append).begin()
    sent[0].set_result(None)
    (outcome,) = outcomes
    assert isinstance(outcome, WatchdogError)
    assert is_free(cache)


def test_an_operation_that_fails_as_it_begins_has_its_outcome(cache: CacheState) -> None:
    def refuse(request: Request, timeout: float | None) -> Any:
        raise UnavailableError("gone")

    outcomes: list[Any] = []
    Transaction(cache.turns, plan(cache, once()), refuse, outcomes.append).begin()
    (outcome,) = outcomes
    assert isinstance(outcome, UnavailableError)
    assert is_free(cache)


def test_an_interrupt_anywhere_leaves_the_cache_to_others() -> None:
    """Also while it joins or leaves the queue, with another operation queued behind it."""
    functions = 0
    while _interrupted_after(functions):
        functions += 1
    assert functions > 10


def _interrupted_after(functions: int) -> bool:
    """Whether an operation calls more than `functions` functions of the modules that handle turns. It is interrupted as
    it enters the next.
    """
    left = functions
    interrupted = False

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left, interrupted
        if (
            frame.f_globals["__name__"] in ("attnserve._caching.transaction", "attnserve._caching.turns")
            and not interrupted
        ):
            left -= 1
            if left < 0:
                interrupted = True
                raise KeyboardInterrupt

    info = CacheInfo("cache", 1, 1, 1, 1, "float32", (0,), 0, 0, None, None)
    cache = CacheState(info, Turns(later), None)
    followers: list[Future[bool]] = []
    answer: Future[bool] = Future()

    def ask(request: Request, timeout: float | None) -> None:
        sys.settrace(None)
        follower: Future[bool] = Future()
        followers.append(follower)
        behind = plan(cache, once(), None)
        Transaction(cache.turns, behind, lambda request, timeout: answer, partial(settle, follower)).begin()
        sys.settrace(trace)

    work = plan(cache, once())
    sys.settrace(trace)
    try:
        perform(cache.turns, work, ask)
    except KeyboardInterrupt:
        assert interrupted
    finally:
        sys.settrace(None)
    answer.set_result(True)
    for follower in followers:
        wait([follower], PATIENCE_S)
        assert follower.done()
    assert is_free(cache)
    return interrupted


def settle(future: Future[bool], outcome: Any) -> None:
    if not future.done():
        future.set_result(outcome is True)


def test_what_a_failed_operation_held_is_free_when_it_is_over(cache: CacheState) -> None:
    """Without the garbage collector: it may hold arrays."""

    def steps(held: Future[None]) -> Steps[Any]:
        yield GET
        held.cancel()

    def fail(request: Request, timeout: float | None) -> Any:
        raise UnavailableError("gone")

    gc.disable()
    try:
        held: Future[None] = Future()
        watched = weakref.ref(held)
        with contextlib.suppress(UnavailableError):
            perform(cache.turns, plan(cache, steps(held)), fail)
        del held
        assert watched() is None
    finally:
        gc.enable()
