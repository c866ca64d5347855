"""The measured rate: what is learnt from batches, and what is left alone."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnserve_server.pace import FIRST_FLOP_SECONDS, Pace

FLOP_SECONDS, REQUEST_SECONDS = 1e-10, 3e-4
"""What the device of these tests takes."""


def truth(flops: float, requests: int) -> float:
    return flops * FLOP_SECONDS + requests * REQUEST_SECONDS


def taught(*sizes: float, batches: int = 200, noise: float = 0.0) -> Pace:
    """What has been learnt from batches of requests of these FLOPs, in turn."""
    generator, pace = random.Random(0), Pace()
    for number in range(batches):
        size, requests = sizes[number % len(sizes)], generator.randint(1, 16)
        seconds = truth(size * requests, requests) * generator.lognormvariate(0.0, noise)
        pace.learn(size * requests, requests, size, seconds)
    return pace


@pytest.mark.parametrize("sizes", [(1e9,), (1e4,), (1e4, 1e9), (1e4, 1e6, 1e8, 1e10)])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_it_foretells_what_it_has_seen(sizes: tuple[float, ...], noise: float) -> None:
    pace = taught(*sizes, noise=noise)
    for size in sizes:
        assert pace.seconds(8 * size, 8) == pytest.approx(truth(8 * size, 8), rel=0.05 + noise)


def test_small_requests_leave_alone_what_is_known_of_large_ones() -> None:
    pace = taught(1e9, 1e4)
    for _ in range(10_000):
        pace.learn(8e4, 8, 1e4, truth(8e4, 8))
    assert pace.seconds(1e9, 1) == pytest.approx(truth(1e9, 1), rel=0.1)


def test_it_follows_a_device_that_becomes_slower() -> None:
    pace = taught(1e9)
    for _ in range(30):
        pace.learn(1e9, 1, 1e9, 10 * truth(1e9, 1))
    assert pace.seconds(1e9, 1) == pytest.approx(10 * truth(1e9, 1), rel=0.05)


def test_one_batch_that_was_held_up_changes_little() -> None:
    pace = taught(1e9)
    pace.learn(1e9, 1, 1e9, 1000 * truth(1e9, 1))
    assert pace.seconds(1e9, 1) < 2 * truth(1e9, 1)


def test_a_request_larger_than_all_is_known_to_take_as_long_as_the_largest() -> None:
    pace = taught(1e6)
    assert pace.least_seconds(1e12) == pytest.approx(pace.seconds(1e6, 1))
    assert pace.least_seconds(1e5) == pytest.approx(pace.seconds(1e5, 1))
    assert Pace().least_seconds(1e12) == Pace().seconds(0, 1)


def test_what_took_no_time_or_did_nothing_says_nothing() -> None:
    pace = Pace()
    pace.learn(1e9, 1, 1e9, 0.0)
    pace.learn(0, 0, 0, 1.0)
    assert pace.seconds(1e9, 0) == pytest.approx(1e9 * FIRST_FLOP_SECONDS)


@given(st.lists(st.tuples(st.floats(0, 1e15), st.integers(1, 1000), st.floats(0, 1e6)), max_size=50))
def test_it_stays_a_number_above_zero(batches: list[tuple[float, int, float]]) -> None:
    pace = Pace()
    for flops, requests, seconds in batches:
        pace.learn(flops, requests, flops, seconds)
    for value in (pace.seconds(1e9, 0), pace.seconds(0, 1)):
        assert 0 < value < math.inf
