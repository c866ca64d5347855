"""Requests refused because they would miss their deadline, and those tried anyway. 1000 FLOPs take a second here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ref

import pytest
from engines import OpenAdmission
from waiting import SECOND, Entry, queue_of, work

from attnserve_server.errors import DeadlineUnreachable
from attnserve_server.scheduling.batching import Batch
from attnserve_server.scheduling.deadlines import TRIAL_PAUSE, Deadlines
from attnserve_server.scheduling.pace import Pace


@dataclass(eq=False)
class Request(Entry):
    """A request to be queued."""

    decode: float = 0.0
    answered: bool = False


def check(
    deadlines: Deadlines,
    seconds: float,
    left: float,
    now: float = 0.0,
    free_at: float | None = None,
    *,
    decode: float = 0.0,
    priority: int = 0,
) -> Request:
    """Checks a request that takes `seconds` and whose caller waits `left` longer; raises its refusal. It was read until
    now, which took `decode` seconds. If it is a trial, it begins.
    """
    cost = round(seconds * SECOND)
    entry = Request(arrival=now - decode, cost=cost, deadline=now + left, decode=decode, priority=priority)
    checked: Any = entry
    if deadlines.check(checked, free_at):
        deadlines.begin_trial(checked)
    return entry


def computed(deadlines: Deadlines, now: float, seconds: float, *entries: Request) -> None:
    """A batch of those entries has been computed."""
    batch: Any = Batch(list(entries), sum(entry.cost for entry in entries))
    deadlines.computed(batch, now, seconds)


def deadlines(*waiting: Entry, running: str | None = None) -> Deadlines:
    """With requests that wait, and one of some kind that runs."""
    admission = OpenAdmission(100, 100, 10**9 * SECOND)
    admission.pace = Pace(1 / SECOND, 1e-12)
    admission.pace.learn(work(1, 10 * SECOND), 10.0)  # a request of this size has run, as fast as it should
    for kind in (*(entry.kind for entry in waiting), *(() if running is None else (running,))):
        admission.admit(None, 1, 1, kind=kind)
    queue: Any = queue_of(*waiting, max_cost=100 * SECOND, pace=admission.pace)
    return Deadlines(queue, admission)


def test_what_can_be_in_time_is_taken() -> None:
    check(deadlines(), 1.0, 1.1)
    check(deadlines(), 1.0, 3.1, free_at=2.0)
    check(deadlines(Entry(cost=2 * SECOND)), 1.0, 6.1, free_at=2.0)


def test_only_what_is_due_before_it_counts() -> None:
    waiting = [Entry(cost=10 * SECOND) for _ in range(5)]
    check(deadlines(*waiting), 1.0, 3.1, free_at=2.0, priority=200)
    with pytest.raises(DeadlineUnreachable):
        check(deadlines(*waiting), 1.0, 2.9, free_at=2.0, priority=200)
    with pytest.raises(DeadlineUnreachable):
        check(deadlines(*waiting), 1.0, 50.9)  # nothing runs yet, and all of them wait to be batched


def test_time_counts_from_when_it_was_read() -> None:
    waiting = Entry(cost=2 * SECOND)
    check(deadlines(waiting), 1.0, 3.1, now=100.0, decode=50.0)
    with pytest.raises(DeadlineUnreachable):
        check(deadlines(waiting), 1.0, 2.9, now=100.0, decode=50.0)


def test_a_batch_that_should_be_done_by_now_takes_no_time_and_gives_none_back() -> None:
    waiting = Entry(cost=2 * SECOND)
    check(deadlines(waiting), 1.0, 3.1, now=100.0, free_at=99.0)
    with pytest.raises(DeadlineUnreachable):
        check(deadlines(waiting), 1.0, 2.9, now=100.0, free_at=99.0)


@pytest.mark.parametrize(("waiting", "left"), [((), 2.5), ((Entry(cost=2 * SECOND),), 3.5)])
def test_what_has_others_before_it_for_too_long_is_not(waiting: tuple[Entry, ...], left: float) -> None:
    with pytest.raises(DeadlineUnreachable):
        check(deadlines(*waiting, running=""), 1.0, left, free_at=2.0)


def test_what_nothing_is_known_of_is_not_refused_and_nobody_is_on_its_account() -> None:
    """A kind that has never run, and a request larger than any of its kind so far."""
    check(deadlines(Entry(cost=10**6 * SECOND, kind="another")), 1.0, 3.1, free_at=2.0)
    check(deadlines(Entry(cost=10**6 * SECOND)), 1.0, 13.1, free_at=2.0)
    check(deadlines(), 10**6, 12.1, free_at=2.0)


def test_an_idle_device_tries_what_should_be_too_late_a_tenth_of_the_time() -> None:
    several = deadlines()
    tried = check(several, 1.0, 0.5)
    with pytest.raises(DeadlineUnreachable):
        check(several, 1.0, 0.5, now=0.1)
    computed(several, 2.0, 2.0, tried)
    with pytest.raises(DeadlineUnreachable):
        check(several, 1.0, 0.5, now=1.9 + TRIAL_PAUSE * 2.0)
    tried = check(several, 1.0, 0.5, now=2.0 + TRIAL_PAUSE * 2.0)
    computed(several, 100.0, 1.0, tried)
    computed(several, 1000.0, 50.0, Request())  # for which no trial was made
    check(several, 1.0, 0.5, now=1000.0)


def test_a_busy_device_tries_what_is_late_only_by_its_own_time_if_nothing_else_shows_how_fast_it_is() -> None:
    check(deadlines(running="another"), 1.0, 2.5, free_at=2.0)
    check(deadlines(Entry(cost=2 * SECOND, kind="another")), 1.0, 0.5)
    for others, left in ((deadlines(running=""), 2.5), (deadlines(running="another"), 1.9)):
        with pytest.raises(DeadlineUnreachable):
            check(others, 1.0, left, free_at=2.0)
    several = deadlines(running="another")
    tried = check(several, 1.0, 2.5, free_at=2.0)
    computed(several, 2.0, 2.0, Request())
    computed(several, 2.3, 0.3, tried, Request(cost=2 * SECOND))  # a third of what was computed
    with pytest.raises(DeadlineUnreachable):
        check(several, 1.0, 0.5, now=2.2 + TRIAL_PAUSE * 0.1)
    check(several, 1.0, 0.5, now=2.4 + TRIAL_PAUSE * 0.1)


def test_a_trial_whose_turn_comes_too_late_is_forgotten() -> None:
    several = deadlines(running="another")
    tried = check(several, 1.0, 2.5, free_at=2.0)
    tried.answered = True
    computed(several, 4.0, 4.0, Request())
    computed(several, 100.0, 50.0, tried)  # it is not asked for any more
    check(several, 1.0, 0.5, now=101.0)


def test_a_trial_that_ends_otherwise_is_not_kept() -> None:
    """It may have failed, or been cancelled, and its message be large."""
    asked = deadlines()
    gone = ref(check(asked, 10.0, 5.0))
    assert gone() is None
    computed(asked, 1.0, 1.0)
    with pytest.raises(DeadlineUnreachable):
        check(asked, 10.0, 5.0, now=2.0)


def test_a_trial_that_is_not_over_counts_for_as_long_as_it_should_take() -> None:
    several = deadlines()
    check(several, 2.0, 0.5)
    with pytest.raises(DeadlineUnreachable):
        check(several, 2.0, 0.5, now=TRIAL_PAUSE * 2.0 - 0.1)
    check(several, 2.0, 0.5, now=TRIAL_PAUSE * 2.0 + 0.1)


def test_a_trial_counts_from_when_it_was_read() -> None:
    several = deadlines()
    check(several, 1.0, 0.5, now=100.0, decode=50.0)
    with pytest.raises(DeadlineUnreachable):
        check(several, 1.0, 0.5, now=99.9 + TRIAL_PAUSE)
    check(several, 1.0, 0.5, now=100.1 + TRIAL_PAUSE)


def test_what_is_in_time_is_no_trial() -> None:
    several = deadlines()
    in_time = check(several, 1.0, 1.1, now=51.0)
    computed(several, 52.0, 1.0, in_time)
    check(several, 1.0, 0.5, now=52.1)
