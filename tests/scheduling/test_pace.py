"""The measured rate: what is learnt from batches, and what is left alone."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import work

from attnserve_server.scheduling.pace import (
    FIRST_FLOP_SECONDS,
    FIRST_REQUEST_SECONDS,
    LEARNING,
    MAX_KINDS,
    Amount,
    Pace,
)


@dataclass(frozen=True)
class Speed:
    """How long a device takes per request and per FLOP of some kind."""

    request: float
    flop: float

    def seconds(self, requests: int, flops: float) -> float:
        """The time of `requests` requests of `flops` FLOPs each."""
        return requests * (self.request + flops * self.flop)


FAST = Speed(3e-4, 1e-11)
SLOW = Speed(1e-2, 4e-10)
"""Forty times as slow, per request and per FLOP."""
TINY, HEAVY = 1e6, 3e10


class Device:
    """Runs batches and reports how long they took."""

    def __init__(self, noise: float = 0.0) -> None:
        self.pace = Pace()
        self._noise = noise
        self._random = random.Random(0)

    def run(self, speed: Speed, *sizes: float, kind: str = "", batches: int = 200) -> None:
        """Runs batches of one request size each, cycling through these FLOPs."""
        for number in range(batches):
            size, requests = sizes[number % len(sizes)], self._random.randint(1, 16)
            seconds = speed.seconds(requests, size) * self._random.lognormvariate(0.0, self._noise)
            self.pace.learn(work(requests, size, kind), seconds)

    def error(self, speed: Speed, size: float, kind: str = "") -> float:
        """The ratio of the predicted to the true time of one such request."""
        return self.pace.seconds(work(1, size, kind)) / speed.seconds(1, size)


@pytest.mark.parametrize("sizes", [(1e9,), (1e4,), (1e4, 1e9), (1e4, 1e6, 1e8, 1e10)])
@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("speed", [FAST, SLOW, Speed(5e-5, 1e-14)], ids=["fast", "slow", "accelerator"])
def test_it_foretells_what_it_has_seen(sizes: tuple[float, ...], noise: float, speed: Speed) -> None:
    device = Device(noise)
    device.run(speed, *sizes)
    for size in sizes:
        assert device.error(speed, size) == pytest.approx(1.0, rel=0.1 + noise)


def test_small_requests_leave_alone_what_is_known_of_large_ones() -> None:
    device = Device()
    device.run(FAST, 1e9, 1e4)
    device.run(FAST, 1e4, batches=10_000)
    assert device.error(FAST, 1e9) == pytest.approx(1.0, rel=0.1)


def test_tiny_requests_to_a_slow_kernel_say_nothing_of_heavy_ones_to_a_fast_one() -> None:
    """With a single rate for all, a heavy request was predicted to take some forty times as long as it does."""
    device = Device(noise=0.3)
    device.run(FAST, TINY, HEAVY, kind="fast", batches=20)
    for _ in range(100):
        device.run(SLOW, TINY, 10 * TINY, kind="slow", batches=2)
        assert 0.5 < device.error(FAST, HEAVY, "fast") < 2.0
    assert 0.5 < device.error(SLOW, TINY, "slow") < 2.0


@pytest.mark.parametrize("kind", ["slow", "fast"])
@pytest.mark.parametrize("tiny", [TINY, 10 * TINY])
def test_a_heavy_request_after_slow_tiny_ones_is_foretold_as_soon_as_one_has_run(kind: str, tiny: float) -> None:
    """Of the same kind, slow only because of its requests, and of a kind that has not run yet."""
    overhead = Speed(1e-2, 1e-11)
    device = Device(noise=0.1)
    device.run(overhead, tiny, kind="slow")
    assert device.pace.least_seconds_of(kind, HEAVY) < 2 * overhead.seconds(1, tiny), "nobody is refused on a guess"
    device.pace.learn(work(1, HEAVY, kind), overhead.seconds(1, HEAVY))
    assert 0.5 < device.error(overhead, HEAVY, kind) < 2.0
    device.run(overhead, tiny, HEAVY, kind=kind, batches=6)
    assert 0.7 < device.error(overhead, HEAVY, kind) < 1.4


def test_a_kind_that_has_not_run_is_like_all_others() -> None:
    device = Device()
    device.run(SLOW, TINY, HEAVY, kind="slow")
    assert device.error(SLOW, HEAVY, "new") == pytest.approx(1.0, rel=0.1)


def test_a_batch_of_two_kinds_teaches_both() -> None:
    device = Device(noise=0.1)
    device.run(FAST, TINY, HEAVY, kind="fast", batches=20)
    for _ in range(30):
        batch = work(2, HEAVY, "fast")
        batch.add("slow", HEAVY)
        device.pace.learn(batch, FAST.seconds(2, HEAVY) + SLOW.seconds(1, HEAVY))
        device.run(FAST, HEAVY, kind="fast", batches=1)
    assert 0.5 < device.error(FAST, HEAVY, "fast") < 2.0
    assert 0.5 < device.error(SLOW, HEAVY, "slow") < 2.0


def test_it_follows_a_device_that_becomes_slower() -> None:
    device = Device()
    device.run(FAST, 1e9)
    device.run(SLOW, 1e9, batches=10)
    assert device.error(SLOW, 1e9) == pytest.approx(1.0, rel=0.1)


def test_the_time_of_a_request_is_that_of_the_latest_batches() -> None:
    device = Device()
    device.run(FAST, 1e9)
    device.run(SLOW, 1e9)
    assert device.pace.request_seconds == pytest.approx(SLOW.seconds(1, 1e9), rel=0.1)


def test_the_first_batches_formed_count_equally() -> None:
    pace = Pace()
    for share, average in ((0.5, 0.5), (0.1, 0.3), (0.9, 0.5)):
        pace.formed(share)
        assert pace.request_share == pytest.approx(average)
    for _ in range(100):
        pace.formed(0.5)
    pace.formed(1.0)
    assert pace.request_share == pytest.approx(0.5 + LEARNING * 0.5)


def test_one_batch_that_was_held_up_changes_little() -> None:
    device = Device()
    device.run(FAST, 1e9)
    device.pace.learn(work(1, 1e9), 1000 * FAST.seconds(1, 1e9))
    assert device.error(FAST, 1e9) < 2
    device.run(FAST, 1e9, batches=3)
    assert device.error(FAST, 1e9) == pytest.approx(1.0, rel=0.1)


def test_a_first_batch_that_was_held_up_is_soon_made_up_for() -> None:
    """Such as by a kernel's first call, which may compile it."""
    device = Device()
    device.pace.learn(work(1, 1e9), 1000 * FAST.seconds(1, 1e9))
    device.run(FAST, 1e9, batches=5)
    assert 0.5 < device.error(FAST, 1e9) < 2.0


def test_a_request_larger_than_all_is_known_to_take_as_long_as_the_largest() -> None:
    device = Device()
    device.run(FAST, TINY)
    pace = device.pace
    assert pace.least_seconds_of("", HEAVY) == pytest.approx(pace.seconds(work(1, TINY)))
    assert pace.least_seconds_of("", TINY / 10) == pytest.approx(pace.seconds(work(1, TINY / 10)))
    assert pace.least_seconds(work(3, HEAVY)) == pytest.approx(3 * pace.seconds(work(1, TINY)))
    assert pace.least_seconds_of("another", HEAVY) == pace.least_seconds(work(1, HEAVY, "another")) == 0.0


def test_what_took_no_time_or_did_nothing_says_nothing() -> None:
    pace = Pace()
    pace.learn(work(1, 1e9), 0.0)
    pace.learn(Amount(), 1.0)
    assert pace.seconds(work(1, 1e9)) == pytest.approx(1e9 * FIRST_FLOP_SECONDS + FIRST_REQUEST_SECONDS)


def test_few_kinds_are_remembered() -> None:
    """The most recently run ones, however many there ever were."""
    pace = Pace()
    pace.learn(work(1, 1e9, "often"), 100.0)
    for number in range(3 * MAX_KINDS):
        pace.learn(work(1, 1e9, str(number)), 1.0)
        pace.learn(work(1, 1e9, "often"), 100.0)
    assert len(pace._rates) == MAX_KINDS
    assert pace.seconds(work(1, 1e9, "often")) == pytest.approx(100.0, rel=0.1)


def test_an_amount_counts_by_kinds() -> None:
    amount = work(2, 10, "a")
    amount.add("b", 5)
    amount.add("a", 30)
    both = amount.together()
    assert (both.requests, both.flops, both.largest) == (4, 55, 30)
    for kind, flops in (("a", 10), ("b", 5), ("a", 30)):
        amount.remove(kind, flops)
    assert [(kind, part.requests, part.flops) for kind, part in amount.kinds.items()] == [("a", 1, 10)]
    amount.remove("a", 10)
    assert not amount.kinds


BATCHES = st.lists(
    st.tuples(st.sampled_from("abc"), st.floats(0, 1e15), st.integers(1, 20), st.floats(0, 1e6)), max_size=50
)


@given(BATCHES)
def test_it_stays_a_number_above_zero(batches: list[tuple[str, float, int, float]]) -> None:
    pace = Pace()
    for kind, flops, requests, seconds in batches:
        pace.learn(work(requests, flops, kind), seconds)
    for kind in "abcd":
        assert 0 < pace.seconds(work(1, 1e9, kind)) < math.inf
        assert 0 <= pace.least_seconds_of(kind, 1e9) < math.inf
        assert pace.seconds_of(kind, 1e9) == pace.seconds(work(1, 1e9, kind))
