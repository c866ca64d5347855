"""The decision what runs together: a queue of plain data, with numbers for times."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from attnserve_server.batching import Batch, BatchQueue

AGING = 0.5
MAX_FLOPS = 100
MAX_REQUESTS = 4


@dataclass(eq=False)
class Entry:
    """What waits, in these tests."""

    arrival: float = 0.0
    group: str = "a"
    cost: int = 10
    received_bytes: int = 1
    priority: int = 0
    deadline: float = math.inf
    cancelled: bool = False


def queue_of(*entries: Entry, max_cost: int = MAX_FLOPS, max_requests: int = MAX_REQUESTS) -> BatchQueue[Entry]:
    queue: BatchQueue[Entry] = BatchQueue(max_cost, max_requests, AGING)
    for entry in entries:
        queue.push(entry)
    return queue


def popped(queue: BatchQueue[Entry], now: float = 0.0) -> list[list[Entry]]:
    """The entries of all batches, one batch after the other, until the queue is empty."""
    batches = []
    while queue.requests:
        batches.append(queue.pop(now).entries)
    return batches


def test_an_empty_queue_has_nothing_to_run() -> None:
    assert queue_of().pop(0.0) == Batch()
    assert queue_of().oldest_arrival() is None


def test_a_batch_is_of_one_group_and_does_not_stop_at_another() -> None:
    a1, b1, a2, c1, a3, b2 = (Entry(arrival, group) for arrival, group in enumerate("abacab"))
    assert popped(queue_of(a1, b1, a2, c1, a3, b2)) == [[a1, a2, a3], [b1, b2], [c1]]


def test_the_group_of_the_oldest_goes_first_whatever_came_between() -> None:
    b1, a1, b2 = Entry(0.0, "b"), Entry(1.0, "a"), Entry(2.0, "b")
    queue = queue_of(b1, a1, b2)
    assert queue.pop(3.0).entries == [b1, b2]
    younger = Entry(4.0, "b")
    queue.push(younger)
    assert queue.pop(5.0).entries == [a1]
    assert queue.pop(6.0).entries == [younger]


def test_a_batch_is_bounded_by_count() -> None:
    entries = [Entry(arrival, cost=0) for arrival in range(9)]
    assert popped(queue_of(*entries)) == [entries[:4], entries[4:8], entries[8:]]


def test_a_batch_is_bounded_by_cost() -> None:
    sixty, forty, one = Entry(0, cost=60), Entry(1, cost=40), Entry(2, cost=1)
    assert popped(queue_of(sixty, forty, one)) == [[sixty, forty], [one]]


def test_a_request_above_the_bound_of_a_batch_runs_alone() -> None:
    small, huge, later = Entry(0, cost=1), Entry(1, cost=10 * MAX_FLOPS), Entry(2, cost=1)
    queue = queue_of(small, huge, later)
    batch = queue.pop(3.0)
    assert (batch.entries, batch.cost) == ([small], 1)
    assert popped(queue) == [[huge], [later]]


def test_within_a_priority_the_oldest_goes_first() -> None:
    entries = [Entry(arrival, priority=3) for arrival in range(3)]
    assert popped(queue_of(*entries)) == [entries]


def test_a_higher_priority_goes_before_an_older_request_up_to_aging() -> None:
    old, urgent = Entry(0.0, priority=0), Entry(2 * AGING - 0.01, priority=2)
    assert popped(queue_of(old, urgent, max_requests=1)) == [[urgent], [old]]
    old, urgent = Entry(0.0, priority=0), Entry(2 * AGING + 0.01, priority=2)
    assert popped(queue_of(old, urgent, max_requests=1)) == [[old], [urgent]]


def test_priority_decides_between_groups_too() -> None:
    old, urgent = Entry(0.0, "a"), Entry(AGING / 2, "b", priority=1)
    assert popped(queue_of(old, urgent)) == [[urgent], [old]]


def test_a_batch_takes_every_priority_of_its_group() -> None:
    low, high, middle = Entry(0, priority=-8), Entry(0, priority=8), Entry(0, priority=0)
    assert popped(queue_of(low, high, middle)) == [[high, middle, low]]


def test_what_nobody_waits_for_never_runs_and_is_reported_once() -> None:
    cancelled, expired = Entry(0, cancelled=True), Entry(1, deadline=5.0)
    runs, in_time = Entry(2), Entry(3, deadline=5.1)
    queue = queue_of(cancelled, expired, runs, in_time)
    batch = queue.pop(5.0)
    assert (batch.entries, batch.cancelled, batch.expired) == ([runs, in_time], [cancelled], [expired])
    assert queue.pop(5.0) == Batch()


def test_an_entry_that_is_both_is_reported_as_cancelled() -> None:
    entry = Entry(0, deadline=1.0, cancelled=True)
    batch = queue_of(entry).pop(2.0)
    assert (batch.cancelled, batch.expired) == ([entry], [])


def test_what_nobody_waits_for_takes_no_room_in_a_batch() -> None:
    gone = [Entry(0, cost=MAX_FLOPS, cancelled=True) for _ in range(2 * MAX_REQUESTS)]
    runs = [Entry(1, cost=25) for _ in range(4)]
    batch = queue_of(*gone, *runs).pop(2.0)
    assert (batch.entries, batch.cost, batch.cancelled) == (runs, 100, gone)


def test_a_group_without_anybody_waiting_gives_way_to_the_next() -> None:
    gone, runs = Entry(0, "a", cancelled=True), Entry(1, "b")
    batch = queue_of(gone, runs).pop(2.0)
    assert (batch.entries, batch.cancelled) == ([runs], [gone])


def test_a_cancellation_after_queueing_counts() -> None:
    entry = Entry()
    queue = queue_of(entry)
    entry.cancelled = True
    assert queue.pop(0.0).cancelled == [entry]


def test_the_oldest_arrival_is_that_of_any_lane() -> None:
    queue = queue_of(Entry(5.0, "a", priority=8), Entry(3.0, "b"), Entry(4.0, "a"))
    assert queue.oldest_arrival() == 3.0
    queue.pop(6.0)  # of group a
    assert queue.oldest_arrival() == 3.0
    queue.pop(6.0)
    assert queue.oldest_arrival() is None


entries = st.builds(
    Entry,
    arrival=st.floats(0, 10),
    group=st.sampled_from("abc"),
    cost=st.integers(0, 2 * MAX_FLOPS),
    received_bytes=st.integers(0, 9),
    priority=st.integers(-8, 8),
    deadline=st.one_of(st.just(math.inf), st.floats(0, 20)),
    cancelled=st.booleans(),
)


@given(st.lists(entries, max_size=30), st.floats(0, 20))
def test_every_entry_comes_out_once(waiting: list[Entry], now: float) -> None:
    waiting = sorted(waiting, key=lambda entry: entry.arrival)
    queue = queue_of(*waiting)
    out: Counter[int] = Counter()
    for _ in range(len(waiting) + 1):
        batch = queue.pop(now)
        assert all(not entry.cancelled and entry.deadline > now for entry in batch.entries)
        assert all(entry.cancelled for entry in batch.cancelled)
        assert all(entry.deadline <= now for entry in batch.expired)
        out.update(id(entry) for entry in [*batch.entries, *batch.cancelled, *batch.expired])
    assert out == Counter(id(entry) for entry in waiting)
    assert (queue.requests, queue.bytes, queue.cost) == (0, 0, 0)


@given(
    priority=st.integers(-8, 7),
    higher=st.integers(1, 8),
    other_group=st.booleans(),
    interval=st.floats(0.05, 1.0),
    backlog=st.integers(0, 8),
)
def test_a_steady_stream_of_higher_priority_starves_nobody(
    priority: int, higher: int, other_group: bool, interval: float, backlog: int
) -> None:
    """One request runs at each tick and one of higher priority comes: the low one runs as soon as those that came up
    to (levels of priority) * aging after it have run.
    """
    above = min(priority + higher, 8)
    queue = queue_of(max_requests=1)
    low = Entry(0.0, "low" if other_group else "a", priority=priority)
    queue.push(low)
    for _ in range(backlog):
        queue.push(Entry(0.0, priority=above))
    first_younger = (above - priority) * AGING  # what comes from now on is due after the low one
    ahead = backlog + math.floor(first_younger / interval) + 1
    for tick in range(ahead + 1):
        queue.push(Entry(tick * interval, priority=above))
        if low in queue.pop(tick * interval).entries:
            return
    raise AssertionError(f"still waiting after {ahead + 1} batches")


class QueueMachine(RuleBasedStateMachine):
    """The queue beside a plain list, through any order of pushes, cancellations and batches."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = queue_of()
        self.model: list[Entry] = []
        self.now = 0.0

    @rule(entry=entries, later=st.floats(0, 2))
    def push(self, entry: Entry, later: float) -> None:
        self.now += later
        entry.deadline += self.now - entry.arrival
        entry.arrival = self.now
        entry.cancelled = False
        self.queue.push(entry)
        self.model.append(entry)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.model)).cancelled = True

    @rule(later=st.floats(0, 5))
    def pop(self, later: float) -> None:
        self.now += later
        batch = self.queue.pop(self.now)
        living = [entry for entry in self.model if not entry.cancelled and entry.deadline > self.now]
        if living:
            self.check_choice(batch, living)
        else:
            assert batch.entries == []
        for entry in [*batch.entries, *batch.cancelled, *batch.expired]:
            self.model.remove(entry)  # raises if it came out before
        assert all(entry.cancelled for entry in batch.cancelled)
        assert all(not entry.cancelled and entry.deadline <= self.now for entry in batch.expired)

    @staticmethod
    def check_choice(batch: Batch[Entry], living: list[Entry]) -> None:
        """The batch holds the entries of one group that are due first, as many as fit."""
        (group,) = {entry.group for entry in batch.entries}
        assert all(entry in living for entry in batch.entries)
        candidates = sorted((entry for entry in living if entry.group == group), key=due)
        chosen = 0
        cost = 0
        for entry in candidates[:MAX_REQUESTS]:
            if chosen and cost + entry.cost > MAX_FLOPS:
                break
            chosen += 1
            cost += entry.cost
        # Entries that are due at the same moment may come in any order, and then fit or not.
        assert [due(entry) for entry in batch.entries] == [due(entry) for entry in candidates[: len(batch.entries)]]
        if len({due(entry) for entry in candidates}) == len(candidates):
            assert len(batch.entries) == chosen
        assert batch.cost == sum(entry.cost for entry in batch.entries)
        assert batch.cost <= MAX_FLOPS or len(batch.entries) == 1
        assert len(batch.entries) <= MAX_REQUESTS

    @invariant()
    def counts(self) -> None:
        assert self.queue.requests == len(self.model)
        assert self.queue.bytes == sum(entry.received_bytes for entry in self.model)
        assert self.queue.cost == sum(entry.cost for entry in self.model)
        assert self.queue.oldest_arrival() == min((entry.arrival for entry in self.model), default=None)


def due(entry: Entry) -> float:
    """When an entry is due: its arrival, less aging for each level of its priority."""
    return entry.arrival - entry.priority * AGING


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(stateful_step_count=20)
