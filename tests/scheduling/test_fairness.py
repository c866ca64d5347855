"""Equal shares of device time, as virtual times, and the order in which a queue that uses them yields batches."""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import Entry, queue_of

from attnserve_server.scheduling.fairness import FORGOTTEN, FairClock


def served(entries: list[Entry], *, cost: float) -> Counter[object]:
    """Each caller's part of the first `cost` of work, if each entry were a batch of its own."""
    queue, taken = queue_of(*entries, max_requests=1), Counter[object]()
    for _ in entries:
        (entry,) = queue.pop(0.0).entries
        taken[entry.caller] += entry.cost
        if taken.total() >= cost:
            break
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


def test_a_batch_is_filled_with_what_anybody_has() -> None:
    flood = [Entry(caller="flood", cost=10) for _ in range(3)]
    other = Entry(caller="other", cost=10)
    assert set(map(id, queue_of(*flood, other).pop(0.0).entries)) == {id(entry) for entry in [*flood, other]}


def test_nobody_owes_anything_once_all_have_been_served() -> None:
    queue = queue_of(*(Entry(caller="busy", cost=10) for _ in range(8)))
    while queue.requests:
        queue.pop(0.0)
    busy, other = Entry(caller="busy", cost=10), Entry(caller="other", cost=10)
    queue.push(busy)
    queue.push(other)
    assert queue.pop(0.0).entries == [busy, other]


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
