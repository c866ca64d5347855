"""How fast a server is taken to be, from what it says of itself and from its answers: without a clock."""

from __future__ import annotations

from math import inf

import pytest
from multiplexed import refusal

from attnserve._transports.window import Speed, Window


@pytest.fixture
def speed() -> Speed:
    """Of a server that says that it needs a second for ten calls."""
    speed = Speed()
    speed.told(10, 1.0, 0.0)
    return speed


def test_what_a_server_says_does_not_count_once_it_has_answered(speed: Speed) -> None:
    speed.answered(10, 1.0)
    expected = speed.seconds_for(10, 1.0)
    speed.told(1, 100.0, 1.0)
    assert speed.seconds_for(10, 1.0) == expected


def test_a_server_that_answers_nothing_is_ever_slower(speed: Speed) -> None:
    assert speed.seconds_for(10, 0.0) == pytest.approx(1.0)
    assert speed.seconds_for(10, 10.0) > 5.0
    assert 1e6 < speed.seconds_for(10, 1e6) < inf


def test_what_is_out_of_date_says_nothing_of_what_is_answered_from_then_on(speed: Speed) -> None:
    """Calls that wait later may be much smaller."""
    speed.answered(1, 10.0)
    speed.begin(20.0, anew=True)
    assert speed.seconds_for(1000, 20.0) == 0.0
    speed.answered(100, 20.1)
    assert speed.seconds_for(1000, 20.15) == 0.0, "since when these were computed is not known"
    speed.answered(100, 20.2)
    assert speed.seconds_for(1000, 20.2) == pytest.approx(1.0, rel=0.01)


def test_what_a_server_says_counts_until_its_answers_tell(speed: Speed) -> None:
    speed.begin(20.0, anew=True)
    speed.answered(1, 20.1)
    speed.told(10, 1.0, 20.1)
    assert speed.seconds_for(10, 20.1) == pytest.approx(1.0)


def test_what_a_server_that_refuses_still_has_says_how_fast_it_is() -> None:
    window = Window(3)
    window.refused(refusal(1.0), 4, 1.0, 0.0)
    assert window.speed.seconds_for(2, 0.0) == pytest.approx(1.0), "all four take twice the delay"
