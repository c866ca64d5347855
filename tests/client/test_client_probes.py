"""A server that had no room for any of a stream's calls is asked by one of those that wait, until it is given up."""

from __future__ import annotations

from math import inf
from typing import Any

import grpc
import pytest
from multiplexed import Alone, full, refusal, replica_of, status
from windowed import EAGER, Stream

from attnserve import OverloadedError
from attnserve._settings.retry import RetryPolicy
from attnserve._transports.multiplexer import Multiplexer
from attnserve._transports.window import LEAST_PAUSE, Window


def test_a_server_that_took_none_is_asked_by_one_and_then_by_more() -> None:
    stream = Stream()
    stream.add("a", "b")
    stream.sent()
    stream.replies("a", "b", error=full("requests", 0.5))
    stream.add(*range(20), now=0.1)
    stream.tick(0.49)
    assert stream.sent(0.49) == []
    assert stream.multiplexer.wakeup == pytest.approx(0.5)
    stream.tick(0.5)
    assert stream.sent(0.5) == ["a"]
    stream.replies("a", now=0.6)
    assert stream.sent(0.6) == ["b", 0]
    stream.replies("b", 0, now=0.7)
    assert stream.sent(0.7) == [1, 2, 3, 4]
    assert set(stream.outcomes) == {"a", "b", 0}


def test_a_server_that_refuses_whoever_asks_is_asked_half_as_often_each_time() -> None:
    window = Window(9)
    asked = 0.0
    for pause in (1.0, 2.0, 4.0, 8.0):
        window.refused(refusal(1.0), 0, 0.01, asked)
        assert window.probe_at == asked + pause
        asked = window.probe_at
        window.probed(asked)


def test_a_server_that_tells_no_delay_is_not_asked_at_once() -> None:
    window = Window(3)
    window.refused(refusal(0.0), 4, 0.0, 0.0)
    window.answered(1, 2, 1.0, taken=True)
    assert window.probe_at == 1.0 + LEAST_PAUSE


def test_one_that_never_has_room_is_given_up_after_so_many_retries() -> None:
    stream = Stream()
    stream.add("a")
    stream.sent()
    now, times = 0.0, [0.0]
    stream.replies("a", error=full("requests", 0.5))
    stream.add("held", now=0.1)
    while not stream.outcomes:
        now = stream.multiplexer.wakeup
        assert now < inf
        stream.tick(now)
        for name in stream.sent(now):
            times.append(now)
            stream.replies(name, now=now, error=full("requests", 0.5))
    assert times == [0.0, 0.5, 1.5, 3.5]
    assert all(isinstance(error, OverloadedError) for error in stream.outcomes.values())
    assert set(stream.outcomes) == {"a", "held"}
    stream.add("late", now=now + 0.1)
    stream.tick(now + 0.1)
    assert "was not asked again" in str(stream.outcomes["late"])
    stream.add("later", now=now + 5.0)
    assert stream.sent(now + 5.0) == ["later"]


def test_another_is_sent_where_what_the_server_has_takes_long() -> None:
    stream = Stream()
    stream.add("long", "refused")
    stream.sent()
    stream.replies("refused", error=full("queue_time", 0.2))
    stream.add("short", now=0.1)
    assert stream.sent(0.1) == []
    assert stream.multiplexer.wakeup == pytest.approx(0.2)
    stream.tick(0.2)
    assert stream.sent(0.2) == ["refused"]
    stream.replies("refused", now=0.2, error=full("queue_time", 0.2))
    stream.tick(0.61)
    assert stream.sent(0.61) == ["refused"]
    stream.replies("refused", now=0.62)
    assert stream.sent(0.62) == ["short"]


def test_another_server_is_asked_before_a_call_is_told() -> None:
    """Once: what comes from another server that had no room is told."""
    stream = Stream(RetryPolicy(retries=1, random=lambda: 0.0))
    stream.add("a")
    stream.sent()
    stream.replies("a", error=full("requests", 0.5))
    stream.add("held", now=0.1)
    stream.multiplexer.tick(0.5)
    stream.sent(0.5)
    stream.replies("a", now=0.5, error=full("requests", 0.5))
    assert stream.multiplexer.tick(0.5, others=True) == []
    leaving = stream.multiplexer.take_leaving()
    assert {each.owner for each in leaving} == {"a", "held"}
    assert {each.avoid for each in leaving} == {"here"}
    there: Multiplexer[Any] = Alone(EAGER, replica_of("there"))
    there._waiting._window = stream.multiplexer._waiting._window  # which has been given up
    for each in leaving:
        there.add(each, 0.5)
    assert {call.owner for call, _ in there.tick(0.5, others=True)} == {"a", "held"}


def test_a_probe_that_fails_by_itself_ends_no_other_call() -> None:
    stream = Stream(RetryPolicy(retries=1, random=lambda: 0.0))
    stream.add("a", "b")
    stream.sent()
    stream.replies("a", "b", error=full("requests", 0.5))
    stream.tick(0.5)
    stream.sent(0.5)
    stream.replies("a", now=0.5, error=status(grpc.StatusCode.INVALID_ARGUMENT))
    stream.tick(0.5)
    assert set(stream.outcomes) == {"a"}
