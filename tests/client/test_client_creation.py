"""The creation of a cache at several servers, without any."""

from __future__ import annotations

import itertools
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo

from attnserve import OverloadedError, UnavailableError
from attnserve._caching.creation import Attempt, Making
from attnserve._requests import cache_requests
from attnserve._settings.retry import RetryPolicy


def full(seconds: float | None) -> OverloadedError:
    """The error of a server that has room in some seconds, or does not say when."""
    details: tuple[ErrorInfo | RetryInfo, ...] = (ErrorInfo(reason="OVERLOADED"),)
    if seconds is not None:
        delay = Duration()
        delay.FromMilliseconds(round(seconds * 1000))
        details += (RetryInfo(retry_delay=delay),)
    return OverloadedError("full", code=grpc.StatusCode.RESOURCE_EXHAUSTED, details=details)


ERRORS = (full(0.0), full(3.0), full(None), UnavailableError("gone"))


@pytest.mark.parametrize("best", range(len(ERRORS)))
def test_the_error_is_that_of_the_server_with_room_soonest(best: int) -> None:
    """Whichever is asked first."""
    for order in itertools.permutations(ERRORS[best:]):
        rpc = cache_requests.create(2, 8, None, 1, "float32", None)
        with Making(rpc, lambda rpc, home: None) as making:
            for home, error in enumerate(order):
                making.at(str(home))
                making.failed(error)
        assert making.failure is ERRORS[best]


class Clock:
    """A clock that stands still unless it is told to move on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


RPC = cache_requests.create(2, 8, None, 1, "float32", None)


def asked(making: Making, clock: Clock, *answers: OverloadedError | UnavailableError, **options: Any) -> list[Attempt]:
    """The attempts at the servers a, b and c, which end with these errors, one after the other, each a second later."""
    policy = RetryPolicy(options.get("retries", 3), random=lambda: 0.0)
    attempts = []
    remaining = iter(answers)
    for attempt in making.attempts("abc", policy, options.get("timeout", 60.0)):
        attempts.append(attempt)
        clock.now += attempt.again.pause + 1
        making.failed(next(remaining))
    return attempts


def test_each_server_is_asked_once_and_then_the_one_with_room_soonest(clock: Clock) -> None:
    """A server that refuses again asks for twice as long in fact."""
    making = Making(RPC, lambda rpc, home: None)
    answers = full(4.0), full(1.0), full(3.5), full(2.0), full(3.0), full(0.5)
    attempts = asked(making, clock, *answers)
    assert [attempt.address for attempt in attempts] == ["a", "b", "c", "b", "a", "c"]
    assert [attempt.again.pause for attempt in attempts] == pytest.approx([0, 0, 0, 0, 1, 0.5])
    assert [attempt.timeout for attempt in attempts] == pytest.approx([60, 60, 60, 58, 56, 56])
    assert attempts[3].again.refusal is answers[1]
    assert making.failure is answers[5]


def test_servers_that_are_out_of_reach_are_asked_again_as_for_any_call_once_all_have_been(clock: Clock) -> None:
    """Each after its own delay, which doubles; a full one meanwhile, if it has room sooner."""
    gone, refusal = UnavailableError("gone"), full(3.0)
    making = Making(RPC, lambda rpc, home: None)
    attempts = asked(making, clock, gone, refusal, gone, gone, gone, gone, full(3.0), gone, retries=2)
    assert [attempt.address for attempt in attempts] == ["a", "b", "c", "a", "c", "a", "b", "c"]
    assert [attempt.again.refusal for attempt in attempts] == [None] * 6 + [refusal, None]


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_each_server_that_is_out_of_reach_has_its_own_retries(clock: Clock, retries: int) -> None:
    answers = [UnavailableError("gone")] * 3 * (1 + retries)
    assert len(asked(Making(RPC, lambda rpc, home: None), clock, *answers, retries=retries)) == len(answers)


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_a_full_server_is_asked_again_as_often_as_any_call(clock: Clock, retries: int) -> None:
    attempts = asked(Making(RPC, lambda rpc, home: None), clock, *map(full, [1.0] * (3 + retries)), retries=retries)
    assert len(attempts) == 3 + retries


def test_no_server_is_asked_again_that_has_no_room_in_time(clock: Clock) -> None:
    for answers, timeout in (((full(6.0), full(7.0), full(10.0)), None), ([full(3.0)] * 3, 2.5)):
        attempts = asked(Making(RPC, lambda rpc, home: None), clock, *answers, timeout=timeout)
        assert [attempt.address for attempt in attempts] == ["a", "b", "c"]


def test_no_server_is_asked_again_whose_time_others_have_taken(clock: Clock) -> None:
    """Each has 1.5 s, and it takes 2 until those that are asked after the full one are found out of reach. The last
    has time left.
    """
    making, refusal = Making(RPC, lambda rpc, home: None), full(0.1)
    attempts = asked(making, clock, refusal, *[UnavailableError("gone")] * 3, timeout=1.5)
    assert [attempt.address for attempt in attempts] == ["a", "b", "c", "c"]
    assert attempts[3].timeout == pytest.approx(0.5)
    assert making.failure is refusal


def test_a_creation_that_the_retry_budget_does_not_allow_ends_with_the_refusal(clock: Clock) -> None:
    making, refusal = Making(RPC, lambda rpc, home: None), full(1.0)
    attempts = asked(making, clock, full(3.0), refusal, full(3.0), refusal)
    assert [attempt.address for attempt in attempts] == ["a", "b", "c", "b"]
    assert making.failure is refusal


@pytest.mark.parametrize("last", [full(1.0), None])
def test_a_server_that_may_have_made_it_at_an_earlier_attempt_is_told(last: OverloadedError | None) -> None:
    """Unless its last answer is that cache: then only the others are."""
    told: list[str | None] = []
    with Making(RPC, lambda rpc, home: told.append(home)) as making:
        for home in "ab":
            making.at(home)
            making.failed(UnavailableError("lost"))
        making.at("a")
        if last is None:
            making.done()
        else:
            making.failed(last)
    assert sorted(map(str, told)) == (["b"] if last is None else ["a", "b"])
