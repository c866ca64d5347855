"""The order in which operations use caches, without any cache: which may begin when, and that none waits for ever."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnserve._caching.plans import Plan, Steps
from attnserve._caching.state import CacheState
from attnserve._caching.transaction import Transaction
from attnserve._caching.turns import CacheLine, Turn, Turns
from attnserve._requests import cache_requests
from attnserve._requests.cache_requests import CacheInfo


class Bell:
    """A timer that rings when a test says so."""

    def __init__(self, clock: Clock, call: Callable[[], object]) -> None:
        self._clock, self.call = clock, call

    def cancel(self) -> None:
        self._clock.cancelled += 1
        if self in self._clock.bells:
            self._clock.bells.remove(self)


class Clock:
    """Makes timers: one is to be left at a time."""

    def __init__(self) -> None:
        self.bells: list[Bell] = []
        self.delays: list[float] = []
        self.cancelled = 0

    def later(self, delay: float, call: Callable[[], object]) -> Bell:
        self.delays.append(delay)
        self.bells.append(Bell(self, call))
        return self.bells[-1]

    @property
    def call(self) -> Callable[[], object] | None:
        assert len(self.bells) <= 1
        return self.bells[0].call if self.bells else None

    def ring(self) -> None:
        (bell,) = self.bells
        self.bells.clear()
        bell.call()


class Asked(Turn):
    """A turn that reports when it begins, or is too late."""

    def __init__(
        self,
        lines: list[CacheLine],
        alone: bool,
        deadline: float,
        begin: Callable[[], object],
        end: Callable[[], object],
    ) -> None:
        super().__init__(lines, alone, deadline)
        self._begin, self._end = begin, end

    def start(self) -> None:
        self._begin()

    def expire(self) -> None:
        self._end()


def turn(lines: list[CacheLine], alone: bool, begin: Callable[[], object], deadline: float = inf) -> Turn:
    return Asked(lines, alone, deadline, begin, bool)


operations = st.lists(st.tuples(st.sets(st.integers(0, 3), min_size=1), st.booleans()), max_size=12)


@given(operations, st.data())
def test_what_changes_a_cache_has_it_alone_and_all_begin_in_their_order(
    asked: list[tuple[set[int], bool]], data: st.DataObject
) -> None:
    turns, lines = Turns(Clock().later), [CacheLine() for _ in range(4)]
    running: list[int] = []
    begun: list[int] = []

    def begin(number: int) -> None:
        running.append(number)
        begun.append(number)

    all_turns = [
        turn([lines[cache] for cache in caches], alone, partial(begin, number))
        for number, (caches, alone) in enumerate(asked)
    ]
    left: set[int] = set()
    for number, each in enumerate(all_turns):
        turns.take(each)
        while running and bool(data.draw(st.booleans())):
            left.add(leaving := data.draw(st.sampled_from(running)))
            running.remove(leaving)
            turns.leave(all_turns[leaving])
        for other in range(number + 1):
            caches, alone = asked[other]
            conflicts = [
                earlier for earlier in range(other) if asked[earlier][0] & caches and (alone or asked[earlier][1])
            ]
            if other in running:  # no earlier operation that conflicts is unfinished
                assert left.issuperset(conflicts)
            elif other not in left:  # whatever waits has one of those to wait for: readers run side by side
                assert not left.issuperset(conflicts)
    while running:
        turns.leave(all_turns[running.pop(0)])
    assert sorted(begun) == list(range(len(asked)))


def test_readers_that_come_behind_a_writer_do_not_pass_it_and_then_read_side_by_side() -> None:
    begun: list[str] = []
    turns, line = Turns(Clock().later), CacheLine()
    reader, writer, late, later = (
        turn([line], alone, partial(begun.append, name))
        for name, alone in (("reader", False), ("writer", True), ("late reader", False), ("later reader", False))
    )
    for each in (reader, writer, late, later):
        turns.take(each)
    assert begun == ["reader"]
    turns.leave(reader)
    assert begun == ["reader", "writer"]
    turns.leave(writer)
    assert begun == ["reader", "writer", "late reader", "later reader"]


def test_one_that_gives_up_waiting_lets_others_pass() -> None:
    begun: list[Any] = []
    turns, lines = Turns(Clock().later), [CacheLine(), CacheLine()]
    first = turn(lines[:1], True, partial(begun.append, 1))
    second = turn(lines, True, partial(begun.append, 2))
    third = turn(lines[1:], True, partial(begun.append, 3))
    for each in (first, second, third):
        turns.take(each)
    assert begun == [1]
    turns.leave(second)
    assert begun == [1, 3]
    turns.leave(first)
    assert begun == [1, 3]


def test_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """One timer watches them all, and is gone when nothing waits: it would keep the client alive."""
    now = 0.0
    monkeypatch.setattr("attnserve._caching.turns.time.monotonic", lambda: now)
    clock, line = Clock(), CacheLine()
    turns = Turns(clock.later)
    expired: list[float] = []
    first = turn([line], True, bool, deadline=5.0)
    turns.take(first)
    assert clock.call is None
    patient = turn([line], True, bool)
    turns.take(patient)
    assert clock.call is None
    now = 1.0
    deadlines = (3.0, 2.0, 4.0, 2.5, 6.0)
    waiting = [Asked([line], True, deadline, bool, partial(expired.append, deadline)) for deadline in deadlines]
    for each in waiting:
        turns.take(each)
    assert (clock.delays, clock.cancelled) == ([2.0, 1.0], 1)
    turns.leave(waiting[3])  # it waits no longer
    now = 3.5
    clock.ring()
    assert sorted(expired) == [2.0, 3.0]
    assert clock.delays == [2.0, 1.0, 0.5]
    for each in waiting[:2]:
        turns.leave(each)
    assert clock.call is not None
    for each in (first, patient, waiting[2]):
        turns.leave(each)
    assert clock.call is None
    assert sorted(expired) == [2.0, 3.0]


def test_the_last_one_that_waits_expires_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("attnserve._caching.turns.time.monotonic", lambda: now)
    clock, line = Clock(), CacheLine()
    turns = Turns(clock.later)
    turns.take(turn([line], True, bool))
    expired: list[bool] = []
    turns.take(Asked([line], True, 2.0, bool, lambda: expired.append(True)))
    now = 2.0
    clock.ring()
    assert expired == [True]
    assert clock.call is None


def test_a_timer_that_was_too_late_to_be_cancelled_is_no_reason_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be a thread, for as long as its call may take."""
    now = 0.0
    monkeypatch.setattr("attnserve._caching.turns.time.monotonic", lambda: now)
    clock, line = Clock(), CacheLine()
    turns = Turns(clock.later)
    patient = turn([line], True, bool)
    turns.take(patient)
    turns.take(first := turn([line], True, bool, deadline=1.0))
    late, now = clock.call, 1.0
    assert late is not None
    turns.leave(first)
    turns.take(second := turn([line], True, bool, deadline=60.0))
    late()
    turns.leave(second)
    assert clock.call is None
    assert (clock.delays, clock.cancelled) == ([1.0, 59.0, 59.0], 3)
    turns.leave(patient)


def test_without_a_thread_for_one_deadline_others_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("attnserve._caching.turns.time.monotonic", lambda: now)
    clock, line = Clock(), CacheLine()
    unlucky_deadlines = [10.0, 20.0]

    def later(delay: float, call: Callable[[], object]) -> Bell:
        if now + delay in unlucky_deadlines:
            raise RuntimeError("can't start new thread")
        return clock.later(delay, call)

    turns = Turns(later)
    turns.take(turn([line], True, bool))
    expired: list[float] = []
    for deadline in (15.0, 10.0, 20.0):
        asked = Asked([line], True, deadline, bool, partial(expired.append, deadline))
        if deadline == 10.0:
            with pytest.raises(RuntimeError):
                turns.take(asked)
            turns.leave(asked)
        else:
            turns.take(asked)
    assert clock.delays == [15.0], "which the one without a thread has not ended"
    now = 15.0
    clock.ring()
    assert expired == [15.0], "although there is no thread for the next"
    turns.take(Asked([line], True, 18.0, bool, partial(expired.append, 18.0)))
    assert clock.delays == [15.0, 3.0]


def test_what_an_interrupt_kept_from_beginning_begins_in_another_thread() -> None:
    clock, line = Clock(), CacheLine()
    turns = Turns(clock.later)
    begun: list[str] = []

    def begin() -> None:
        begun.append("second")
        if len(begun) == 1:
            raise KeyboardInterrupt

    first, second, third = (turn([line], True, start) for start in (bool, begin, partial(begun.append, "third")))
    for each in (first, second, third):
        turns.take(each)
    with pytest.raises(KeyboardInterrupt):
        turns.leave(first)
    clock.ring()
    assert begun == ["second", "second"]
    turns.leave(second)
    assert begun == ["second", "second", "third"]


def test_an_interrupt_as_one_begins_keeps_nobody_else_from_it() -> None:
    turns, line = Turns(Clock().later), CacheLine()
    begun: list[int] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    first, second, third = (turn([line], True, begin) for begin in (bool, interrupted, partial(begun.append, 3)))
    for each in (first, second, third):
        turns.take(each)
    with pytest.raises(KeyboardInterrupt):
        turns.leave(first)
    turns.leave(second)
    assert begun == [3]


@pytest.mark.parametrize("cancelled", [False, True])
def test_what_an_operation_held_is_free_when_it_is_over(cancelled: bool) -> None:
    """Without the garbage collector: it may hold arrays."""
    answer: Future[int] = Future()
    info = CacheInfo("cache", 1, 1, 1, 1, "float32", (0,), 0, 0, None, None)
    cache = CacheState(info, Turns(Clock().later), None)

    def steps() -> Steps[int]:
        found: int = yield cache_requests.get("cache")
        return found

    outcomes: list[Any] = []
    answers = [answer]
    transaction = Transaction(
        cache.turns, Plan(steps(), (cache,), True, 60.0), lambda request, timeout: answers.pop(), outcomes.append
    )
    held = weakref.ref(transaction)
    gc.disable()
    try:
        transaction.begin()
        if cancelled:
            assert transaction.cancel()
            assert answer.cancelled()
        else:
            answer.set_result(1)
        assert outcomes == ([] if cancelled else [1])
        del transaction, answer
        assert held() is None
    finally:
        gc.enable()


def test_what_comes_after_an_operation_is_given_up_changes_nothing() -> None:
    """Neither a reply that was on its way, nor a deadline that had passed already."""
    info = CacheInfo("cache", 1, 1, 1, 1, "float32", (0,), 0, 0, None, None)
    cache = CacheState(info, Turns(Clock().later), None)
    sent: list[Future[None]] = []
    outcomes: list[Any] = []

    def send(request: object, timeout: float | None) -> Future[None]:
        sent.append(future := Future[None]())
        future.set_running_or_notify_cancel()  # its reply has arrived, so that it can no longer be cancelled
        return future

    def steps() -> Steps[None]:
        yield cache_requests.get("cache")
        yield cache_requests.get("cache")

    begun, waiting = (
        Transaction(cache.turns, Plan(steps(), (cache,), True, 60.0), send, outcomes.append) for _ in range(2)
    )
    for each in (begun, waiting):
        each.begin()
    assert waiting.cancel()
    assert begun.cancel()
    waiting.expire()
    sent[0].set_result(None)
    assert len(sent) == 1
    assert not outcomes
    assert not begun.cancel()
    assert not waiting.cancel()


def test_turns_that_end_as_they_begin_may_be_many() -> None:
    turns, line = Turns(Clock().later), CacheLine()
    ended: list[int] = []
    first = turn([line], True, bool)
    turns.take(first)

    def end(number: int) -> None:
        ended.append(number)
        turns.leave(followers[number])

    followers = [turn([line], True, partial(end, number)) for number in range(5000)]
    for each in followers:
        turns.take(each)
    turns.leave(first)
    assert ended == list(range(5000))
