"""Which requests run together: a queue of plain data, with numbers for times."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from waiting import AGING, MAX_FLOPS, MAX_REQUESTS, SECOND, Entry, popped, queue_of, work

from attnserve_server.scheduling.batching import MOST_SKIPPED, Batch, BatchQueue
from attnserve_server.scheduling.pace import Pace


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


def test_a_batch_is_bounded_by_bytes() -> None:
    """Where what it receives is copied while another batch computes; a single request may have more."""
    sizes = (6, 4, 1, 11, 0, 5, 6)
    entries = [Entry(arrival, cost=0, received_bytes=size) for arrival, size in enumerate(sizes)]
    queue: BatchQueue[Entry] = BatchQueue(MAX_FLOPS, 9, AGING, Pace(), 10, 1)
    for entry in entries:
        assert queue.is_full == (queue.bytes >= 10)
        queue.push(entry)
    assert popped(queue) == [entries[:2], entries[2:3], entries[3:4], entries[4:6], entries[6:]]
    assert not queue.is_full


def test_operations_of_a_layer_may_count_for_less() -> None:
    """Where its weights are read once for all requests of a batch, and that is most of the work."""
    own, large, others = (
        [Entry(arrival, group, cost=cost, layer=layer) for arrival in range(count)]
        for group, cost, layer, count in (("a", 60, None, 2), ("b", 300, "b", 3), ("c", 1500, "c", 1))
    )
    queue: BatchQueue[Entry] = BatchQueue(MAX_FLOPS, 9, AGING, Pace(1 / SECOND, 1e-12), None, 10)
    for entry in large:
        queue.push(entry)
    assert not queue.is_full
    for entry in (*others, *own):
        queue.push(entry)
    assert queue.is_full
    assert sorted(map(len, popped(queue))) == [1, 1, 1, 3]
    assert not queue.is_full


def test_a_request_above_the_bound_of_a_batch_runs_alone() -> None:
    small, huge, later = Entry(0, cost=1), Entry(1, cost=10 * MAX_FLOPS), Entry(2, cost=1)
    queue = queue_of(small, huge, later)
    batch = queue.pop(3.0)
    assert (batch.entries, batch.cost) == ([small], 1)
    assert popped(queue) == [[huge], [later]]


def test_a_request_above_the_bound_of_a_batch_fills_one() -> None:
    pace = Pace()
    queue_of(Entry(cost=10 * MAX_FLOPS), pace=pace).pop(0.0)
    assert pace.request_share == 1.0


def test_a_batch_of_which_nothing_ran_changes_nothing_for_others() -> None:
    first, other = Entry(0.0, "a", caller="me"), Entry(1.0, "b", caller="me")
    queue = queue_of(first, other)
    queue.end(queue.pop(1.0), None)
    assert popped(queue, 1.0) == [[other]]


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


def test_it_gives_way_even_if_more_of_it_is_due_later() -> None:
    gone, runs, later = Entry(0, "a", cancelled=True), Entry(1, "b"), Entry(2, "a")
    queue = queue_of(gone, runs, later)
    assert queue.pop(3.0).entries == [runs]
    assert queue.pop(3.0).entries == [later]


def test_what_nobody_waits_for_does_not_end_a_batch() -> None:
    first, gone, last = Entry(0), Entry(1, cancelled=True), Entry(2)
    batch = queue_of(first, gone, last).pop(3.0)
    assert (batch.entries, batch.cancelled) == ([first, last], [gone])


@pytest.mark.parametrize(
    ("costs", "full"),
    [([0] * MAX_REQUESTS, True), ([0] * (MAX_REQUESTS - 1), False), ([99, 1], True), ([99], False), ([], False)],
)
def test_a_batch_could_be_filled_by_count_or_by_cost(costs: list[int], full: bool) -> None:
    queue = queue_of(*(Entry(cost=cost, group=str(index)) for index, cost in enumerate(costs)))
    assert queue.is_full == full


def test_a_cancellation_after_queueing_counts() -> None:
    entry = Entry()
    queue = queue_of(entry)
    entry.cancelled = True
    assert queue.pop(0.0).cancelled == [entry]


def test_what_is_cancelled_can_be_taken_out_at_once() -> None:
    gone = [Entry(0, group) for group in "abc"]
    stay = [Entry(1, group) for group in "ab"]
    queue = queue_of(*gone, *stay)
    for entry in gone:
        entry.cancelled = True
    assert queue.drop_cancelled() == gone
    assert (queue.requests, queue.cost, queue.bytes) == (2, 20, 2)
    assert queue.drop_cancelled() == []
    assert popped(queue) == [[entry] for entry in stay]


def test_taking_out_what_is_cancelled_leaves_the_others_in_their_order() -> None:
    low, gone, high = (Entry(priority=priority) for priority in (-8, 8, 0))
    other, urgent = Entry(group="b", priority=-7), Entry(group="c", priority=1)
    queue = queue_of(gone, low, high, other, urgent, max_requests=1)
    gone.cancelled = True
    queue.drop_cancelled()
    assert popped(queue) == [[urgent], [high], [other], [low]]


def test_an_empty_queue_keeps_nothing_of_what_it_held() -> None:
    """Not even the place of a group whose first request another overtook."""
    queue = queue_of(Entry(), Entry(priority=1))
    queue.pop(0.0)
    assert (queue.requests, bool(queue._first), queue._groups) == (0, False, {})


def test_what_is_due_before_a_request_is_known() -> None:
    pace = Pace(1 / SECOND, 1e-12)
    pace.learn(work(1, 10_000), 10.0)
    queue = queue_of(
        *(Entry(caller="flood", cost=1000) for _ in range(5)),
        Entry(caller="flood", cost=10_000, priority=-8),
        Entry(caller="other", cost=500, priority=8),
        Entry(caller="other", cost=250),
        Entry(caller="third", cost=10**9, kind="one that nothing is known of"),
        pace=pace,
    )
    assert queue.least_seconds == pytest.approx(15.75)
    # All that the flood has sent before, and what of the other's is due by then.
    assert queue.least_seconds_before("flood", 0) == pytest.approx(5.75)
    # Of those that begin at the same time, queued ones come first: one of the flood's, and all of the other's own.
    assert queue.least_seconds_before("other", 0) == pytest.approx(1.75)
    assert queue.least_seconds_before("new", 0) == pytest.approx(1.5)
    assert queue.least_seconds_before("new", 8) == pytest.approx(0.5)
    while queue.requests:
        queue.pop(0.0)
    assert queue.least_seconds == 0.0
    assert queue.least_seconds_before("flood", 0) == 0.0


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
    caller=st.sampled_from("xyz"),
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


def test_places_that_are_never_skipped_are_forgotten() -> None:
    """One caller sends twice as much as the other, and what it has sent too much goes along in the other's batches."""
    queue = queue_of(Entry(caller="a"), max_requests=3, max_cost=10**9)
    for _ in range(1000):
        for caller in "aab":
            queue.push(Entry(caller=caller))
        queue.pop(0.0)
        assert len(queue._first) <= 2 * queue.requests + MOST_SKIPPED


class QueueMachine(RuleBasedStateMachine):
    """The queue compared with a plain list, through any order of pushes, cancellations and batches."""

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
        entry.caller = None  # sharing between callers is tested separately
        self.queue.push(entry)
        self.model.append(entry)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.model)).cancelled = True

    @rule()
    def drop_cancelled(self) -> None:
        dropped = self.queue.drop_cancelled()
        assert len(dropped) == len({id(entry) for entry in dropped})
        assert {id(entry) for entry in dropped} == {id(entry) for entry in self.model if entry.cancelled}
        self.model = [entry for entry in self.model if not entry.cancelled]

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
            self.model.remove(entry)  # raises if it has come out before
        assert all(entry.cancelled for entry in batch.cancelled)
        assert all(not entry.cancelled and entry.deadline <= self.now for entry in batch.expired)

    @staticmethod
    def check_choice(batch: Batch[Entry], living: list[Entry]) -> None:
        """The batch holds the entries of one group that are due first, as many as fit."""
        (group,) = {entry.group for entry in batch.entries}
        assert all(entry in living for entry in batch.entries)
        # The model is in order of arrival, and the sort is stable.
        candidates = sorted((entry for entry in living if entry.group == group), key=lambda entry: -entry.priority)
        assert candidates[0].priority == max(entry.priority for entry in living)
        chosen: list[Entry] = []
        for entry in candidates[:MAX_REQUESTS]:
            if chosen and sum(each.cost for each in chosen) + entry.cost > MAX_FLOPS:
                break
            chosen.append(entry)
        assert batch.entries == chosen
        assert batch.cost == sum(entry.cost for entry in batch.entries)
        assert batch.cost <= MAX_FLOPS or len(batch.entries) == 1
        assert len(batch.entries) <= MAX_REQUESTS

    @invariant()
    def counts(self) -> None:
        assert self.queue.requests == len(self.model)
        assert self.queue.bytes == sum(entry.received_bytes for entry in self.model)
        assert self.queue.cost == sum(entry.cost for entry in self.model)
        assert self.queue.oldest_arrival() == min((entry.arrival for entry in self.model), default=None)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(stateful_step_count=20)
