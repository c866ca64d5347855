"""Admission: bounds by count, bytes, cost and time, shares of them per caller, and the retry delay of the refused."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable

import pytest
from admitted import ME, OTHER, at, counts, flood, queue_of, refused
from engines import OpenAdmission
from hypothesis import given
from hypothesis import strategies as st
from waiting import work

from attnserve_server.errors import InvalidRequest, Overloaded
from attnserve_server.scheduling.admission import (
    ALWAYS_BATCHES,
    ALWAYS_WAIT,
    MAX_RETRY_DELAY,
    MIN_RETRY_DELAY,
    SHARE,
    UNREAD_RETRY_DELAY,
)


@pytest.mark.parametrize(
    ("bound", "size", "flops"), [("requests", 0, 0), ("bytes", 60, 0), ("flops", 0, 600)], ids=lambda value: str(value)
)
def test_each_bound_refuses_what_is_beyond_it_and_counts_nothing(bound: str, size: int, flops: int) -> None:
    admission = OpenAdmission(max_requests=2, max_bytes=119, max_flops=1199)
    admission.admit(ME, 60, 600)
    if bound == "requests":
        admission.admit(ME, 0, 0)
    error = refused(admission, size, flops)
    assert (error.bound, error.reason, error.metadata) == (bound, "OVERLOADED", {"bound": bound})


def test_a_bound_can_be_reached_exactly() -> None:
    admission = OpenAdmission(max_requests=2, max_bytes=100, max_flops=1000)
    admission.admit(ME, 40, 400)
    admission.admit(ME, 60, 600)
    assert counts(admission) == (2, 100, 1000)


def test_room_comes_back_in_two_steps() -> None:
    admission = OpenAdmission(max_requests=1, max_bytes=100, max_flops=1000)
    admission.admit(ME, 100, 1000)
    assert admission.seconds > 0
    admission.computed(ME, 100, 1000)
    assert (*counts(admission), admission.seconds) == (1, 100, 0, 0.0)
    assert refused(admission, 1, 1).bound == "requests"
    admission.release(ME, 100)
    assert counts(admission) == (0, 0, 0)
    admission.admit(ME, 100, 1000)


@pytest.mark.parametrize(
    ("size", "flops", "reply", "limit"),
    [(101, 0, 0, "max_bytes"), (0, 1001, 0, "max_flops"), (0, 0, 51, "max_message_bytes")],
)
def test_what_can_never_come_in_is_the_callers_mistake(size: int, flops: int, reply: int, limit: str) -> None:
    admission = OpenAdmission(max_requests=1, max_bytes=100, max_flops=1000, max_reply_bytes=50)
    with pytest.raises(InvalidRequest) as caught:
        admission.admit(ME, size, flops, reply)
    assert caught.value.reason == "LIMIT_EXCEEDED"
    assert caught.value.metadata["limit"] == limit
    assert f"({limit})" in str(caught.value)
    assert counts(admission) == (0, 0, 0)


def full(flops: int, measure: Callable[[OpenAdmission], None]) -> OpenAdmission:
    """An admission after some measurements, with one request of that many FLOPs in flight."""
    admission = OpenAdmission(max_requests=1, max_bytes=10, max_flops=10**15)
    measure(admission)
    admission.admit(ME, 1, flops)
    return admission


def test_the_delay_is_the_time_of_half_the_queue_at_the_measured_rate() -> None:
    queue = full(8 * 10**9, at(10**9, 0.25))  # 4e9 FLOPs a second: a queue of 2 s
    assert refused(queue, 1, 1).retry_delay == pytest.approx(1.0, rel=0.01)


def test_the_delay_follows_the_rate() -> None:
    def slower(admission: OpenAdmission) -> None:
        at(10**9, 0.25)(admission)
        at(10**9, 1.0)(admission)

    assert refused(full(8 * 10**9, slower), 1, 1).retry_delay == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize(("flops", "delay"), [(1, MIN_RETRY_DELAY), (10**14, MAX_RETRY_DELAY)])
def test_the_delay_is_bounded(flops: int, delay: float) -> None:
    assert refused(full(flops, at(10**9, 1.0)), 1, 1).retry_delay == delay


def test_a_queue_is_bounded_by_the_time_it_takes() -> None:
    admission = queue_of(0, 0.01, 1.0)
    for caller in range(100):
        admission.admit(caller, 1, 10**9)
    error = flood(admission, ME, 1, 10**9)
    assert (error.bound, error.reason, error.rejection) == ("queue_time", "OVERLOADED", "queue_time")
    assert "its bound on queue_time is 1 s; retry in 0.5" in str(error)
    assert error.retry_delay == pytest.approx(0.5, rel=0.05)
    assert admission.requests == pytest.approx(100, abs=3)
    assert admission.seconds == pytest.approx(1.0, rel=0.05)


class Waiting:
    """Requests of 10 ms each, of a caller each, of which so many may wait for up to 10 s; batches have so many."""

    def __init__(self, batch_requests: int) -> None:
        self.admission = OpenAdmission(10**6, 10**9, 10**18, max_queue_time=10.0)
        self.admission.pace.formed(1 / batch_requests)
        at(10**9, 0.01)(self.admission)
        self._callers = itertools.count()
        self._waiting = deque[int]()

    def fill(self) -> int:
        """Sends until one is refused; returns how many wait then."""
        for caller in self._callers:
            try:
                self.admission.admit(caller, 1, 10**9)
            except Overloaded:
                return len(self._waiting)
            self._waiting.append(caller)
        raise AssertionError("unreachable")

    def until(self, count: int) -> None:
        """Computes and answers the first until so many wait."""
        while len(self._waiting) > count:
            caller = self._waiting.popleft()
            self.admission.computed(caller, 1, 10**9)
            self.admission.release(caller, 1)


@pytest.mark.parametrize(("batch_requests", "kept"), [(1, ALWAYS_WAIT), (50, ALWAYS_BATCHES * 50)])
def test_a_queue_that_stays_is_kept_short_until_it_has_nearly_gone(batch_requests: int, kept: int) -> None:
    waiting = Waiting(batch_requests)
    assert waiting.admission.longest_seconds == 10.0
    assert waiting.fill() == pytest.approx(1000, abs=10)
    for left in (900, kept + kept // 10, kept):
        waiting.until(left)
        assert waiting.fill() == pytest.approx(left, abs=1), "nobody gets in"
        assert waiting.admission.longest_seconds == waiting.admission.seconds
    for left in (kept // 2, kept // 4 + kept // 20 + 1):
        waiting.until(left)
        assert waiting.fill() == pytest.approx(kept, abs=1), "no more than keep the device busy"
        longest = max(kept * 0.01, waiting.admission.seconds)
        assert waiting.admission.longest_seconds == pytest.approx(longest, rel=0.05)
    waiting.until(kept // 4 - 1)
    assert waiting.fill() == pytest.approx(1000, abs=10), "a queue that had gone may be long again"
    waiting.until(0)
    assert waiting.admission.longest_seconds == 10.0


def test_some_may_wait_however_slow_they_are() -> None:
    admission = queue_of(0, 5.0, 1.0)
    for caller in range(ALWAYS_WAIT):
        admission.admit(caller, 1, 10**9)
    assert refused(admission, 1, 1).bound == "queue_time"


def after_quick_ones() -> OpenAdmission:
    """An admission for which most requests have been quick, and requests of a kind of their own slow: 5 s each."""
    admission = OpenAdmission(10**6, 10**9, 10**18, max_queue_time=1.0)
    for kind, seconds in (("slow", 5.0), ("", 0.01)):
        for _ in range(200):
            admission.pace.learn(work(1, 10**9, kind), seconds)
    return admission


def test_slow_requests_fill_the_bound_one_after_another() -> None:
    """As operators see it (attnserve_in_flight_limit), whether or not some of those that count are being computed."""
    admission = after_quick_ones()
    for number in range(1, ALWAYS_WAIT + 1):
        admission.admit(ME, 1, 10**9, kind="slow")
        assert admission.seconds / admission.longest_seconds == pytest.approx(number / ALWAYS_WAIT)
    with pytest.raises(Overloaded):
        admission.admit(ME, 1, 10**9, kind="slow")
    for left in range(ALWAYS_WAIT - 1, 0, -1):
        admission.computed(ME, 1, 10**9, kind="slow")
        assert admission.seconds / admission.longest_seconds == pytest.approx(left / ALWAYS_WAIT)


def test_of_what_may_always_wait_another_caller_gets_half_as_much() -> None:
    """However slow that is beside all that came before: then both wait equally long, each at half of the device."""
    admission = after_quick_ones()
    for caller, count in ((ME, ALWAYS_WAIT), (OTHER, ALWAYS_WAIT // 2)):
        for _ in range(count):
            admission.admit(caller, 1, 10**9, kind="slow")
        with pytest.raises(Overloaded):
            admission.admit(caller, 1, 10**9, kind="slow")


@pytest.mark.parametrize("others", [1, 3, ALWAYS_WAIT - 1, ALWAYS_WAIT])
def test_a_part_of_what_may_always_wait_is_each_callers_whatever_others_have_waiting(others: int) -> None:
    """A caller with a few slow requests gets in beside those who send quick ones without end."""
    admission = after_quick_ones()
    for other in range(others):
        admission.admit(other, 1, 10**9)
    for other in range(others):
        flood(admission, other, 1, 10**9)
    for _ in range(ALWAYS_WAIT // (others + 1)):
        admission.admit(ME, 1, 10**9, kind="slow")
    with pytest.raises(Overloaded):
        admission.admit(ME, 1, 10**9, kind="slow")


def test_without_a_bound_on_time_there_is_none() -> None:
    admission = queue_of(1000, 60.0, 0.0)
    assert admission.requests == 1000
    assert admission.longest_seconds == math.inf


def test_an_idle_server_takes_anything_whatever_it_has_measured() -> None:
    queue_of(1, 10**6, 0.001)


@pytest.mark.parametrize("bound", ["requests", "bytes", "flops", "queue_time"])
def test_one_caller_leaves_room_for_another(bound: str) -> None:
    """One caller takes all it can get; another then gets in at once, with more than one request."""
    size, flops = {"requests": (0, 1), "bytes": (10, 1), "flops": (1, 10**9), "queue_time": (1, 10**9)}[bound]
    admission = OpenAdmission(
        100 if bound == "requests" else 10**6,
        1000 if bound == "bytes" else 10**9,
        10**11 if bound == "flops" else 10**18,
        max_queue_time=1.0 if bound == "queue_time" else 0.0,
    )
    at(10**9, 0.01)(admission)
    error = flood(admission, ME, size, flops)
    assert error.bound == bound
    if bound != "queue_time":  # others need no share of queue time: their turn comes before everything that waits
        assert (error.reason, error.rejection) == ("SHARE_EXCEEDED", "share")
        assert admission.requests == pytest.approx(100 * SHARE / (SHARE + 1), abs=2)
    for _ in range(5):
        admission.admit(OTHER, size, flops)
    with pytest.raises(Overloaded, match="its share"):
        admission.admit(ME, size, flops)


def test_two_that_want_everything_get_the_same_whoever_was_there_first() -> None:
    admission = OpenAdmission(1000, 10**9, 10**18)
    flood(admission, OTHER, 1, 1)
    for _ in range(1000):
        for caller in (ME, OTHER):
            flood(admission, caller, 1, 1)
            admission.computed(caller, 1, 1)  # both are served equally
            admission.release(caller, 1)
    mine, others = (admission._callers[caller].requests for caller in (ME, OTHER))
    assert mine == pytest.approx(others, abs=5)
    assert mine + others == pytest.approx(1000 * 16 / 17, abs=8)


def test_the_delay_of_who_has_its_share_is_that_of_its_own_requests() -> None:
    admission = queue_of(80, 0.01, 1.0, OTHER)
    error = flood(admission, ME, 1, 10**9)
    assert error.reason == "SHARE_EXCEEDED"
    own = admission._callers[ME].waiting * 0.01
    assert error.retry_delay == pytest.approx(2 * own / 2, rel=0.05)  # two callers


@pytest.mark.parametrize("share", [False, True])
def test_where_bytes_are_those_of_replies_the_delay_is_not_that_of_computing(share: bool) -> None:
    """Nothing tells how long callers take to read, and asking again in 5 ms would not help."""
    admission = OpenAdmission(10, 100, 10**9)
    admission.admit(ME, 90, 1)
    size = 1 if share else 20
    assert refused(admission, size, 1).retry_delay == MIN_RETRY_DELAY, "it may be answered soon"
    admission.computed(ME, 90, 1)
    admission.admit(OTHER, 1, 1)
    error = refused(admission, size, 1)
    assert (error.bound, error.retry_delay) == ("bytes", UNREAD_RETRY_DELAY)
    assert error.reason == ("SHARE_EXCEEDED" if share else "OVERLOADED")
    admission.again(ME, 90, 1, "")
    assert refused(admission, size, 1).retry_delay == MIN_RETRY_DELAY
    assert admission.bytes_of_callers() == {ME: 90, OTHER: 1}


@pytest.mark.parametrize(("unread", "delay"), [(49, MIN_RETRY_DELAY), (51, UNREAD_RETRY_DELAY)])
def test_where_most_bytes_wait_to_be_read_nobody_is_told_to_come_back_at_once(unread: int, delay: float) -> None:
    admission = OpenAdmission(10, 100, 10**9)
    admission.admit(OTHER, unread, 1)
    admission.computed(OTHER, unread, 1)
    admission.admit(ME, 100 - unread, 1)
    assert refused(admission, 1, 1, "a third").retry_delay == delay


def test_a_check_beforehand_counts_nothing_and_refuses_the_same() -> None:
    admission = OpenAdmission(1, 100, 10**9)
    admission.check(ME, 100)
    assert counts(admission) == (0, 0, 0)
    admission.admit(ME, 60, 1)
    with pytest.raises(Overloaded):
        admission.check(ME, 1)


def test_what_costs_less_after_all_is_taken_though_what_runs_again_costs_more_than_all_may() -> None:
    admission = OpenAdmission(10, 100, 1000)
    for caller in (ME, OTHER):
        admission.admit(caller, 10, 500)
    admission.computed(OTHER, 10, 500)
    admission.again(OTHER, 10, 900, "")
    admission.recount(ME, (10, 500), (10, 400), 0)
    assert admission.flops == 1300


def test_what_costs_something_else_after_all_is_counted_anew() -> None:
    admission = OpenAdmission(max_requests=2, max_bytes=100, max_flops=1000, max_reply_bytes=50)
    admission.admit(ME, 40, 400)
    admission.admit(OTHER, 10, 100)
    admission.recount(ME, (40, 400), (90, 900), 50)  # all the room there is
    assert counts(admission) == (2, 100, 1000)
    admission.recount(ME, (90, 900), (20, 200), 0)
    assert counts(admission) == (2, 30, 300)
    assert admission.seconds == admission.pace.seconds(work(2, 150))
    for now, bound in (((91, 200), "bytes"), ((20, 901), "flops")):
        with pytest.raises(Overloaded) as refused:
            admission.recount(ME, (20, 200), now, 0)
        assert refused.value.bound == bound
    for now, reply in (((101, 200), 0), ((20, 1001), 0), ((20, 200), 51)):
        with pytest.raises(InvalidRequest):
            admission.recount(ME, (20, 200), now, reply)
    assert counts(admission) == (2, 30, 300)
    for caller, size, flops in ((ME, 20, 200), (OTHER, 10, 100)):
        admission.computed(caller, size, flops)
        admission.release(caller, size)
    assert counts(admission) == (0, 0, 0)
    assert admission._everybody.waiting_bytes == 0
    assert admission._callers == {}


def test_nothing_is_kept_of_callers_who_have_gone() -> None:
    admission = OpenAdmission(10, 100, 10**9)
    for caller in range(1000):
        admission.admit(caller, 1, 1)
        admission.computed(caller, 1, 1)
        admission.release(caller, 1)
    assert admission._callers == {}


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 600), st.booleans()), max_size=40))
def test_counts_never_pass_the_bounds_and_return_to_zero(requests: list[tuple[int, int, bool]]) -> None:
    """Each request has a caller of its own, so that no share is exceeded."""
    admission = OpenAdmission(max_requests=5, max_bytes=100, max_flops=1000)
    inside: list[tuple[str, int, int]] = []

    def out(caller: str, size: int, flops: int) -> None:
        admission.computed(caller, size, flops)
        admission.release(caller, size)

    for number, (size, flops, leave) in enumerate(requests):
        if leave and inside:
            out(*inside.pop(0))
        sizes, costs = sum(each[1] for each in inside), sum(each[2] for each in inside)
        if len(inside) < 5 and sizes + size <= 100 and costs + flops <= 1000:
            admission.admit(str(number), size, flops)
            inside.append((str(number), size, flops))
        else:
            refused(admission, size, flops, str(number))
        assert counts(admission) == (len(inside), sum(each[1] for each in inside), sum(each[2] for each in inside))
    for each in inside:
        out(*each)
    assert counts(admission) == (0, 0, 0)
