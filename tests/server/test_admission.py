"""Who comes in: bounds by count, bytes and cost, and the delay that the refused are told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnserve_server.admission import MAX_RETRY_DELAY, MIN_RETRY_DELAY, Admission
from attnserve_server.errors import InvalidRequest, Overloaded


def counts(admission: Admission) -> tuple[int, int, int]:
    return admission.requests, admission.bytes, admission.flops


def refused(admission: Admission, size: int, flops: int) -> Overloaded:
    """The error of a request that is refused; nothing may have been counted."""
    before = counts(admission)
    with pytest.raises(Overloaded) as caught:
        admission.admit(size, flops)
    assert counts(admission) == before
    return caught.value


@pytest.mark.parametrize(
    ("bound", "size", "flops"), [("requests", 0, 0), ("bytes", 60, 0), ("flops", 0, 600)], ids=lambda value: str(value)
)
def test_each_bound_refuses_what_is_beyond_it_and_counts_nothing(bound: str, size: int, flops: int) -> None:
    admission = Admission(max_requests=2, max_bytes=119, max_flops=1199)
    admission.admit(60, 600)
    if bound == "requests":
        admission.admit(0, 0)
    error = refused(admission, size, flops)
    assert (error.bound, error.reason, error.metadata) == (bound, "OVERLOADED", {"bound": bound})


def test_a_bound_can_be_reached_exactly() -> None:
    admission = Admission(max_requests=2, max_bytes=100, max_flops=1000)
    admission.admit(40, 400)
    admission.admit(60, 600)
    assert counts(admission) == (2, 100, 1000)


def test_room_comes_back_in_two_steps() -> None:
    admission = Admission(max_requests=1, max_bytes=100, max_flops=1000)
    admission.admit(100, 1000)
    admission.computed(1000, 0.1)
    assert counts(admission) == (1, 100, 0)
    assert refused(admission, 1, 1).bound == "requests"
    admission.release(100)
    assert counts(admission) == (0, 0, 0)
    admission.admit(100, 1000)


@pytest.mark.parametrize(("size", "flops"), [(101, 0), (0, 1001)])
def test_what_can_never_come_in_is_the_callers_mistake(size: int, flops: int) -> None:
    admission = Admission(max_requests=1, max_bytes=100, max_flops=1000)
    with pytest.raises(InvalidRequest) as caught:
        admission.admit(size, flops)
    assert caught.value.reason == "LIMIT_EXCEEDED"
    assert counts(admission) == (0, 0, 0)


def full(flops: int, measure: Callable[[Admission], None]) -> Admission:
    """An admission with one request in flight, of so many FLOPs, after some measurements."""
    admission = Admission(max_requests=1, max_bytes=10, max_flops=10**15)
    measure(admission)
    admission.admit(1, flops)
    return admission


def compute(flops: int, seconds: float) -> Callable[[Admission], None]:
    def measure(admission: Admission) -> None:
        admission.admit(1, flops)
        admission.computed(flops, seconds)
        admission.release(1)

    return measure


def test_the_delay_is_the_least_before_anything_has_been_measured() -> None:
    assert refused(full(10**12, lambda admission: None), 1, 1).retry_delay == MIN_RETRY_DELAY


def test_the_delay_is_the_time_of_half_the_queue_at_the_measured_rate() -> None:
    queue = full(8 * 10**9, compute(10**9, 0.25))  # 4e9 a second: 2 s of queue
    assert refused(queue, 1, 1).retry_delay == pytest.approx(1.0)


def test_the_delay_follows_the_rate() -> None:
    def slower(admission: Admission) -> None:
        compute(10**9, 0.25)(admission)
        for _ in range(100):
            compute(10**9, 1.0)(admission)

    assert refused(full(8 * 10**9, slower), 1, 1).retry_delay == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize(("flops", "delay"), [(1, MIN_RETRY_DELAY), (10**14, MAX_RETRY_DELAY)])
def test_the_delay_is_bounded(flops: int, delay: float) -> None:
    assert refused(full(flops, compute(10**9, 1.0)), 1, 1).retry_delay == delay


def test_what_is_not_computed_does_not_change_the_rate() -> None:
    def dropped(admission: Admission) -> None:
        compute(10**9, 1.0)(admission)
        compute(10**12, 0.0)(admission)  # cancelled: no time was spent
        compute(0, 5.0)(admission)  # nothing to compute

    assert refused(full(4 * 10**9, dropped), 1, 1).retry_delay == pytest.approx(2.0)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 600), st.booleans()), max_size=40))
def test_counts_never_pass_the_bounds_and_return_to_zero(requests: list[tuple[int, int, bool]]) -> None:
    admission = Admission(max_requests=5, max_bytes=100, max_flops=1000)
    inside: list[tuple[int, int]] = []
    for size, flops, leave in requests:
        if leave and inside:
            old_size, old_flops = inside.pop(0)
            admission.computed(old_flops, 0.01)
            admission.release(old_size)
        fits = len(inside) < 5 and sum(s for s, _ in inside) + size <= 100 and sum(f for _, f in inside) + flops <= 1000
        if fits:
            admission.admit(size, flops)
            inside.append((size, flops))
        else:
            refused(admission, size, flops)
        assert counts(admission) == (len(inside), sum(s for s, _ in inside), sum(f for _, f in inside))
    for size, flops in inside:
        admission.computed(flops, 0.01)
        admission.release(size)
    assert counts(admission) == (0, 0, 0)
