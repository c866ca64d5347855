"""Priorities in the queue: what goes first, what is worth how much, and that nothing waits for ever."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import AGING, MAX_FLOPS, SECOND, Entry, popped, queue_of

from attnserve_server.scheduling.batching import BatchQueue
from attnserve_server.scheduling.pace import Pace


def test_within_a_priority_the_oldest_goes_first() -> None:
    entries = [Entry(arrival, priority=3) for arrival in range(3)]
    assert popped(queue_of(*entries)) == [entries]


def test_of_what_is_due_at_the_same_time_the_oldest_goes_first() -> None:
    """As all is, of callers that come anew, where priorities are worth nothing."""
    queue: BatchQueue[Entry] = BatchQueue(MAX_FLOPS, 1, 0.0, Pace(1 / SECOND, 1e-12), None, 1)
    entries = [Entry(caller=priority, priority=priority) for priority in (0, 2, 1)]
    for entry in entries:
        queue.push(entry)
    assert popped(queue) == [[entry] for entry in entries]


@pytest.mark.parametrize("work", [0.99, 1.01])
def test_a_higher_priority_goes_before_an_older_request_up_to_aging(work: float) -> None:
    """Aging is measured in the device's working time: here, `work` times what two levels of priority are worth."""
    queue = queue_of(max_requests=1)
    between = Entry(cost=int(2 * AGING * work * SECOND), priority=8)
    old, urgent = Entry(priority=0, cost=0), Entry(priority=2)
    queue.push(old)
    queue.push(between)
    assert queue.pop(0.0).entries == [between]
    queue.push(urgent)
    assert popped(queue) == ([[urgent], [old]] if work < 1 else [[old], [urgent]])


@pytest.mark.parametrize("work", [0.99, 1.01])
def test_aging_is_in_time_of_the_device_however_many_callers_share_it(work: float) -> None:
    queue = queue_of(max_requests=1)
    between = Entry(cost=int(2 * AGING * work * SECOND), priority=8, caller="a")
    old, urgent = Entry(priority=0, cost=0, caller="b"), Entry(priority=2, caller="c")
    queue.push(between)
    queue.push(old)
    assert queue.pop(0.0).entries == [between]
    queue.push(urgent)
    assert popped(queue) == ([[urgent], [old]] if work < 1 else [[old], [urgent]])


def test_priority_decides_between_groups_too() -> None:
    old, urgent = Entry(0.0, "a"), Entry(1.0, "b", priority=1)
    assert popped(queue_of(old, urgent)) == [[urgent], [old]]


def test_a_batch_takes_every_priority_of_its_group() -> None:
    low, high, middle = Entry(0, priority=-8), Entry(0, priority=8), Entry(0, priority=0)
    assert popped(queue_of(low, high, middle)) == [[high, middle, low]]


@given(
    priority=st.integers(-8, 7),
    higher=st.integers(1, 8),
    other_group=st.booleans(),
    other_caller=st.booleans(),
    work=st.integers(50, 1000),
    backlog=st.integers(0, 8),
)
def test_a_steady_stream_of_higher_priority_starves_nobody(
    priority: int, higher: int, other_group: bool, other_caller: bool, work: int, backlog: int
) -> None:
    """Each tick runs one request and adds one of higher priority: the low one runs once the device has worked for
    (levels of priority) * aging on others, and on those queued before it.
    """
    above = min(priority + higher, 8)
    queue = queue_of(max_requests=1)
    low = Entry(group="low" if other_group else "a", priority=priority, caller="low" if other_caller else None)
    queue.push(low)
    for _ in range(backlog):
        queue.push(Entry(priority=above, cost=work))
    levels = abs(above) + abs(priority)  # each level is worth half as much once there are two callers
    ahead = 2 * backlog + math.ceil(2 * levels * AGING * SECOND / work) + 2
    for _ in range(ahead + 1):
        queue.push(Entry(priority=above, cost=work))
        if low in queue.pop(0.0).entries:
            return
    raise AssertionError(f"still waiting after {ahead + 1} batches")


@pytest.mark.parametrize("callers", [1, 2, 50])
@pytest.mark.parametrize("comes_first", [True, False])
def test_callers_who_come_later_do_not_make_a_low_priority_wait_longer(callers: int, comes_first: bool) -> None:
    """Each of them always has something of the next level waiting."""
    queue, low = queue_of(max_requests=1), Entry(priority=-1, caller="low")
    if comes_first:
        queue.push(low)
    for number in range(2 * callers):
        queue.push(Entry(caller=number % callers))
    if not comes_first:
        queue.push(low)
    worked = 0
    while (entry := queue.pop(0.0).entries[0]) is not low:
        worked += entry.cost
        assert worked <= AGING * SECOND
        queue.push(Entry(caller=entry.caller))


@given(
    st.lists(
        st.one_of(
            st.builds(
                Entry,
                group=st.sampled_from("abc"),
                caller=st.sampled_from("xyz"),
                priority=st.integers(-8, 8),
                cost=st.sampled_from([0, 10, 10**4]),
                cancelled=st.booleans(),
            ),
            st.sampled_from([0.1, 10.0]),
        ),
        max_size=60,
    )
)
def test_a_batch_begins_with_what_is_due_first_of_all_that_waits(events: list[Entry | float]) -> None:
    """As everything waiting says, at the pace and with the callers of the moment; a number is a batch, as below."""
    pace = Pace(1 / SECOND, 1e-12)
    queue = queue_of(pace=pace)
    for number, event in enumerate(events):
        if isinstance(event, Entry):
            queue.push(event)
            continue
        if number % 3:
            queue.drop_cancelled()
        level = queue._level()
        due = {
            (placed.begin - priority * level, placed.number): placed.item
            for group in queue._groups.values()
            for priority, placed in group
            if not placed.item.cancelled
        }
        batch = queue.pop(0.0)
        assert batch.entries[:1] == ([due[min(due)]] if due else [])
        pace.learn(batch.work, event * pace.seconds(batch.work))


def test_an_aging_beyond_all_numbers_leaves_priorities_in_order() -> None:
    queue: BatchQueue[Entry] = BatchQueue(MAX_FLOPS, 1, 1e308, Pace(1 / SECOND, 1e-12), None, 1)
    low, urgent, other_urgent, other_low = (
        Entry(group=group, priority=priority) for group, priority in zip("abba", (0, 1, 1, 0), strict=True)
    )
    for entry in (low, urgent, other_urgent, other_low):
        queue.push(entry)
    assert popped(queue) == [[urgent], [other_urgent], [low], [other_low]]


@given(
    st.lists(
        st.one_of(
            st.builds(
                Entry,
                caller=st.sampled_from("xy"),
                priority=st.sampled_from([-1, 1]),
                cost=st.sampled_from([10, 10**9]),
            ),
            st.sampled_from([0.1, 10.0]),
        ),
        max_size=40,
    )
)
def test_a_caller_s_requests_of_one_priority_stay_in_order(events: list[Entry | float]) -> None:
    """Whatever others come and go, and however fast the device turns out to be: a number is a batch that takes so many
    times as long as expected.
    """
    pace, ran = Pace(1 / SECOND, 1e-12), []
    queue = queue_of(max_requests=1, pace=pace)
    for event in events:
        if isinstance(event, Entry):
            queue.push(event)
            continue
        batch = queue.pop(0.0)
        ran += batch.entries
        pace.learn(batch.work, event * pace.seconds(batch.work))
    ran += itertools.chain.from_iterable(popped(queue))
    came = [event for event in events if isinstance(event, Entry)]
    for caller, priority in itertools.product("xy", (-1, 1)):
        alike = [[each for each in them if (each.caller, each.priority) == (caller, priority)] for them in (came, ran)]
        assert alike[0] == alike[1]
