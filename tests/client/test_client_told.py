"""What a multiplexer tells others: of its server's successes and failures, and of answers, the retry budget. And that
what comes late from an attempt that is over has no effect.
"""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from multiplexed import DONE, POLICY, Alone, call, message, replica_of, status

from attnserve._requests.reply import Reply
from attnserve._servers.replicas import Replica
from attnserve._settings.retry import RetryPolicy
from attnserve._transports.multiplexer import Multiplexer

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class Recorded(Replica):
    """A server of which it is recorded what was noted."""

    __slots__ = ("noted",)

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1", lambda: None)
        self.noted: list[str] = []

    def failed(self, now: float) -> None:
        self.noted.append("failed")

    def asks_to_leave(self, now: float) -> None:
        self.noted.append("asks to leave")

    def worked(self, now: float, begin: float) -> None:
        self.noted.append("worked")


@pytest.fixture
def server() -> Recorded:
    return Recorded()


@pytest.fixture
def multiplexer(server: Recorded) -> Multiplexer[Any]:
    return Alone(POLICY, server)


def sent(multiplexer: Multiplexer[Any], *names: str) -> tuple[int, list[int]]:
    """Calls that have been sent on a new stream: its number, and their ids."""
    calls = [call(name) for name in names]
    for each in calls:
        multiplexer.add(each, 0.0)
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream)
    return stream, [each.id for each in calls]


@pytest.mark.parametrize("code", [grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT])
def test_a_server_that_answers_works_whatever_it_says(
    multiplexer: Multiplexer[Any], server: Recorded, code: grpc.StatusCode
) -> None:
    stream, (number,) = sent(multiplexer, "a")
    multiplexer.resolve(stream, [Reply(number, DONE if code == grpc.StatusCode.OK else status(code))], 0.0)
    assert server.noted == ["worked"]


def test_a_server_that_takes_no_calls_has_failed(multiplexer: Multiplexer[Any], server: Recorded) -> None:
    stream, (number,) = sent(multiplexer, "a")
    multiplexer.resolve(stream, [Reply(number, status(UNAVAILABLE))], 0.0)
    assert server.noted == ["failed"]


@pytest.mark.parametrize("code", [UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT])
@pytest.mark.parametrize("names", [(), ("a", "b")], ids=["idle", "busy"])
def test_a_server_whose_stream_breaks_has_failed(
    multiplexer: Multiplexer[Any], server: Recorded, code: grpc.StatusCode, names: tuple[str, ...]
) -> None:
    stream, _ = sent(multiplexer, *names)
    multiplexer.broken(stream, status(code), 0.0)
    assert server.noted == ["failed"]


def test_a_server_that_ends_a_stream_in_good_order_prefers_others(
    multiplexer: Multiplexer[Any], server: Recorded
) -> None:
    stream, _ = sent(multiplexer, "a")
    multiplexer.broken(stream, status(grpc.StatusCode.OK), 0.0)
    assert server.noted == ["asks to leave"]


def test_so_does_one_that_asks_for_it(multiplexer: Multiplexer[Any], server: Recorded) -> None:
    stream, _ = sent(multiplexer, "a")
    multiplexer.asked_to_leave(stream, 0.0, others=False)
    assert server.noted == ["asks to leave"]


def test_the_end_of_a_stream_that_was_left_says_nothing(multiplexer: Multiplexer[Any], server: Recorded) -> None:
    """Where nothing was in flight on it any more; the calls that are about to be sent on the next one do not notice."""
    left, (number,) = sent(multiplexer, "a")
    multiplexer.asked_to_leave(left, 0.0, others=False)
    multiplexer.resolve(left, [Reply(number, DONE)], 0.0)
    server.noted.clear()
    multiplexer.add(call("b"), 0.0)
    following = multiplexer.opened(0.0)
    assert multiplexer.broken(left, status(UNAVAILABLE), 0.0) == []
    assert server.noted == []
    assert multiplexer.writes(following)
    asked = message(multiplexer, following)
    assert asked is not None
    assert len(asked.calls) == 1


def test_a_server_that_failed_is_there_again_once_a_stream_opened_since_answers() -> None:
    replica = replica_of("here")
    multiplexer: Multiplexer[Any] = Alone(POLICY, replica)
    calls = [call(name, timeout=60.0) for name in ("before", "after")]
    multiplexer.add(calls[0], 0.0)
    left = multiplexer.opened(0.0)
    message(multiplexer, left)
    replica.failed(10.0)
    multiplexer.leave()
    multiplexer.add(calls[1], 10.1)
    stream = multiplexer.opened(10.1)
    message(multiplexer, stream, 10.1)
    multiplexer.resolve(left, [Reply(calls[0].id, DONE)], 10.2)
    assert replica.rest(10.2), "the reply may have been on its way when the server failed"
    multiplexer.resolve(stream, [Reply(calls[1].id, DONE)], 10.2)
    assert not replica.rest(10.2)


def test_answers_fill_the_retry_budget() -> None:
    policy = RetryPolicy(retries=3, random=lambda: 1.0)
    multiplexer: Multiplexer[Any] = Alone(policy)
    while policy.retried.take(0.0):
        pass
    stream, numbers = sent(multiplexer, *"abc")
    replies = [Reply(number, DONE) for number in numbers[:2]]
    multiplexer.resolve(stream, [*replies, Reply(numbers[2], status(grpc.StatusCode.NOT_FOUND))], 0.0)
    assert [policy.retried.take(0.0) for _ in range(3)] == [True, True, False], "errors are no answers"


def test_what_comes_for_an_attempt_that_is_over_is_dropped(multiplexer: Multiplexer[Any]) -> None:
    stream, (number,) = sent(multiplexer, "a")
    multiplexer.resolve(stream, [Reply(number, status(UNAVAILABLE))], 0.0)
    assert multiplexer.resolve(stream, [Reply(number, DONE)], 0.0) == []
    assert len(multiplexer) == 1


def test_nothing_is_due_after_the_end(multiplexer: Multiplexer[Any]) -> None:
    stream, (number, _) = sent(multiplexer, "a", "b")
    multiplexer.resolve(stream, [Reply(number, status(UNAVAILABLE))], 0.0)
    assert len(multiplexer.close()) == 2
    assert multiplexer.tick(100.0) == []
    assert not multiplexer.wants_stream
    assert multiplexer.wakeup == float("inf")


def test_it_wakes_up_for_what_is_due_first(multiplexer: Multiplexer[Any]) -> None:
    """A retry or a deadline."""
    for timeout, first in ((5.0, 0.1), (0.05, 0.05)):
        stream, (number,) = sent(multiplexer, "a")
        multiplexer.resolve(stream, [Reply(number, status(UNAVAILABLE))], 0.0)
        multiplexer.add(call("b", timeout=timeout), 0.0)
        multiplexer.tick(0.01)
        assert multiplexer.wakeup == pytest.approx(first)
        multiplexer.close()
