"""Equal shares of device time, as virtual times, and the order in which a queue that uses them yields batches."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import SECOND, Entry, popped, queue_of, work

from attnserve_server.scheduling.fairness import FORGOTTEN, FairClock, Place
from attnserve_server.scheduling.pace import Pace


def served(entries: list[Entry], *, cost: float) -> Counter[object]:
    """Each caller's part of the first `cost` of work, if each entry were a batch of its own."""
    queue, taken = queue_of(*entries, max_requests=1), Counter[object]()
    for _ in entries:
        (entry,) = queue.pop(0.0).entries
        taken[entry.caller] += entry.cost
        if taken.total() >= cost:
            break
    return taken


def run(entries: Mapping[str, Entry], seconds: Mapping[str, float], *, each: int, pace: Pace) -> Counter[str]:
    """For how long each caller's entries run, where it always has `each` of them waiting or running, which take so many
    `seconds` whatever the pace says. The pace learns nothing.
    """
    queue, taken = queue_of(pace=pace), Counter[str]()
    for caller, entry in entries.items():
        for _ in range(each):
            queue.push(replace(entry, caller=caller))
    while taken.total() < 500 * max(seconds.values()):
        batch = queue.pop(0.0)
        queue.end(batch, sum(seconds[entry.caller] for entry in batch.entries))
        for entry in batch.entries:
            taken[entry.caller] += seconds[entry.caller]
            queue.push(replace(entry))
    return taken


def test_a_flood_does_not_delay_who_sends_little() -> None:
    flood = [Entry(caller="flood", cost=10) for _ in range(1000)]
    queue = queue_of(*flood, max_requests=1)
    for _ in range(100):
        queue.pop(0.0)
    other = Entry(caller="other", cost=10)
    queue.push(other)
    assert other in [*queue.pop(0.0).entries, *queue.pop(0.0).entries]


def test_who_waits_for_each_answer_is_served_first_time_and_again() -> None:
    queue = queue_of(*(Entry(caller="flood", cost=10) for _ in range(500)), max_requests=1)
    for _ in range(100):
        patient = Entry(caller="patient", cost=10)
        queue.push(patient)
        batches = [queue.pop(0.0).entries for _ in range(3)]
        assert [patient] in batches


def test_callers_share_by_time_and_not_by_number() -> None:
    large = [Entry(caller="large", cost=100) for _ in range(100)]
    small = [Entry(caller="small", cost=1) for _ in range(10_000)]
    taken = served([*large, *small], cost=4000)
    assert taken["large"] == pytest.approx(taken["small"], abs=200)


@pytest.mark.parametrize("slow", [1.0, 35.0])
@pytest.mark.parametrize("known", [True, False])
def test_what_takes_longer_per_flop_gets_no_more_time(slow: float, known: bool) -> None:
    """Nor if that shows only in how long batches take."""
    pace = Pace(1 / SECOND, 1e-12)
    if known:
        for _ in range(100):
            pace.learn(work(1, 10, "slow"), slow * 0.01)
            pace.learn(work(1, 10, "fast"), 0.01)
    entries = {"slow": Entry(group="a", kind="slow", cost=10), "fast": Entry(group="b", kind="fast", cost=10)}
    taken = run(entries, {"slow": slow * 0.01, "fast": 0.01}, each=40, pace=pace)
    assert taken["fast"] > 0.4 * taken.total()
    assert taken["slow"] > 0.4 * taken.total()


@pytest.mark.parametrize("learns", [True, False])
def test_what_waits_is_due_later_once_its_like_is_known_to_take_long(learns: bool) -> None:
    """However much had come before anybody knew."""
    pace = Pace(1 / SECOND, 1e-12)
    pace.learn(work(1, 10, "fast"), 0.01)
    flood = [Entry(caller="flood", kind="slow", group="a", cost=10, priority=number % 2) for number in range(16)]
    queue = queue_of(*flood, max_requests=1, pace=pace)
    slow, other = queue.pop(0.0), Entry(caller="other", kind="fast", group="b", cost=10)
    queue.push(replace(other))
    if learns:
        pace.learn(slow.work, 1.0)
    queue.end(slow, 1.0)
    callers = Counter[object]()
    while callers["flood"] < len(flood) - 1:
        batch = queue.pop(0.0)
        callers[batch.entries[0].caller] += 1
        queue.push(replace(other))
        queue.end(batch, 1.0 if batch.entries[0].caller == "flood" else 0.01)
    assert callers["other"] == pytest.approx(100 * callers["flood"], rel=0.2)


def test_who_shares_batches_with_others_is_charged_its_part() -> None:
    entries = {caller: Entry(caller=caller, cost=cost) for caller, cost in (("a", 10), ("b", 30))}
    taken = run(entries, {"a": 0.5, "b": 1.5}, each=4, pace=Pace(1 / SECOND, 1e-12))  # fifty times what is expected
    assert taken["a"] == pytest.approx(taken["b"], rel=0.1)


@pytest.mark.parametrize("how", ["cancelled, and taken out", "cancelled", "expired"])
def test_what_never_runs_is_not_held_against_what_its_caller_sends_next(how: str) -> None:
    left = [Entry(caller="one", cost=50, priority=1, deadline=0.5) for _ in range(20)]
    queue = queue_of(*left, Entry(caller="another", cost=10), max_requests=1)
    for entry in left:
        entry.cancelled = how != "expired"
    if "taken out" in how:
        assert queue.drop_cancelled() == left
    assert [entry.caller for batch in popped(queue, 1.0) for entry in batch] == ["another"]  # which runs on
    for caller in ("another", "one") * 4:
        queue.push(Entry(caller=caller, cost=10))
    assert Counter(batch[0].caller for batch in popped(queue, 1.0)[:4]) == {"one": 2, "another": 2}


def test_a_caller_owes_what_took_longer_even_if_it_was_forgotten_meanwhile() -> None:
    pace = Pace(1 / SECOND, 1e-12)
    queue = queue_of(Entry(caller="one", cost=10), max_requests=1, pace=pace)
    slow = queue.pop(0.0)
    for number in range(2 * FORGOTTEN):
        queue.push(Entry(caller=number, cost=10))
    for _ in range(2 * FORGOTTEN):
        queue.end(queue.pop(0.0), 0.01)
    queue.push(Entry(caller="another", cost=10))
    queue.end(slow, 100.0)
    queue.push(Entry(caller="one", cost=10))
    for _ in range(5):
        queue.push(Entry(caller="another", cost=10))
    assert [batch[0].caller for batch in popped(queue)] == ["another"] * 6 + ["one"]


def test_a_caller_owes_what_still_runs_when_nobody_waits() -> None:
    """Else what it had would be forgotten whenever another's requests all run at once."""
    slow, quick = Entry(caller="slow"), Entry(caller="quick")
    queue = queue_of(slow, quick, max_requests=1)
    batch = queue.pop(0.0)
    queue.end(batch, 5.0)
    batch = queue.pop(0.0)
    assert (batch.entries, queue.requests, queue._fairness._running) == ([quick], 0, 1)
    queue.push(slow)
    queue.push(quick)
    queue.end(batch, 0.1)
    assert [queue.pop(0.0).entries for _ in range(2)] == [[quick], [slow]]


@given(st.lists(st.integers(1, 30), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_all_who_have_enough_to_do_get_the_same(sizes: list[int], random: Random) -> None:
    entries = [Entry(caller=caller, cost=size) for caller, size in enumerate(sizes) for _ in range(300 // size)]
    random.shuffle(entries)
    share = 100
    taken = served(entries, cost=share * len(sizes))
    for caller in range(len(sizes)):
        assert taken[caller] == pytest.approx(share, abs=65)  # two of the largest requests


def test_what_a_caller_left_for_later_does_not_hold_up_what_it_sends_now() -> None:
    later = [Entry(caller="a", cost=1000, priority=-8) for _ in range(10)]
    now, other = Entry(caller="a", cost=1000), Entry(caller="b", cost=1000)
    queue = queue_of(*later, now, other, max_requests=1)
    assert [*queue.pop(0.0).entries, *queue.pop(0.0).entries] == [now, other]


def test_what_a_caller_sends_first_counts_against_what_it_left_for_later() -> None:
    clock = FairClock()
    assert [clock.enter("a", priority, 10.0) for priority in (0, 1, 1, 0)] == [0.0, 0.0, 10.0, 30.0]
    assert [clock.begin("a", priority) for priority in (-1, 0, 1, 2)] == [40.0, 40.0, 20.0, 0.0]
    assert clock.begin("another", 0) == 0.0


def test_what_took_longer_counts_against_what_its_caller_left_for_later() -> None:
    """But what it sends first does not wait for that which it left for later, however long that took."""
    clock = FairClock()
    assert [clock.enter("a", priority, 1.0) for priority in (1, 0)] == [0.0, 1.0]
    for priority, begins in ((1, [6.0, 5.0]), (0, [10.0, 5.0])):
        clock.begin_run()
        clock.served(1.0, 100)
        clock.end_run({("a", priority): 1.0}, 100, 5.0)
        assert [clock.begin("a", priority) for priority in (0, 1)] == begins


def test_a_caller_owes_what_it_sent_with_any_priority() -> None:
    """It is not forgotten as soon as what it sent first is done."""
    clock = FairClock()
    clock.enter("a", 1, 0.001)
    clock.enter("a", 0, 100.0)
    for caller in range(2 * FORGOTTEN):
        clock.enter(caller, 0, 0.001)
        clock.served(0.001, 1)
        clock.leave(caller)
    assert clock.begin("a", 0) == pytest.approx(100.001)


def test_nothing_that_waits_is_due_earlier_than_it_was() -> None:
    """Although its caller, who owed nothing, has been forgotten."""
    assert FairClock().begin_later("a", [Place(0, 5.0, 1.0, 2.0), Place(0, 6.0, 1.0, 2.0)]) == [5.0, 7.0]


def test_a_batch_is_filled_with_what_anybody_has() -> None:
    flood = [Entry(caller="flood", cost=10) for _ in range(3)]
    other = Entry(caller="other", cost=10)
    assert set(map(id, queue_of(*flood, other).pop(0.0).entries)) == {id(entry) for entry in [*flood, other]}


def test_nobody_owes_anything_once_all_have_been_served() -> None:
    busy, other = Entry(caller="busy", cost=10), Entry(caller="other", cost=10)
    queue = queue_of(busy, other, max_requests=1)
    for entry, seconds in ((busy, 100.0), (other, 0.01)):  # the first takes much longer than expected
        batch = queue.pop(0.0)
        assert batch.entries == [entry]
        queue.end(batch, seconds)
    queue.push(busy)
    queue.push(other)
    assert popped(queue) == [[busy], [other]]


def test_callers_who_have_gone_are_forgotten() -> None:
    clock = FairClock()
    clock.enter("stays", 0, 1.0)
    for caller in range(20 * FORGOTTEN):
        clock.enter(caller, 0, 0.001)
        clock.served(0.002, 2)
        clock.leave(caller)
    assert len(clock._until) <= FORGOTTEN + 1
    clock.leave("stays")
    assert (clock._until, clock._waiting, clock.callers) == ({}, {}, 0)


def test_new_callers_without_end_starve_nobody() -> None:
    """Each has a higher priority and sends a single request."""
    low = Entry(caller="low", cost=10, priority=-8)
    queue = queue_of(low, max_requests=1)
    for caller in itertools.count():
        queue.push(Entry(caller=caller, cost=10, priority=8))
        if low in queue.pop(0.0).entries:
            return
        assert caller < 5000
