"""The multiplexer without I/O: what is sent when, and which caller gets which reply."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from multiplexed import DONE, POLICY, Alone, call, message, status

from attnserve import (
    ClientClosedError,
    DeadlineExceededError,
    InvalidRequestError,
)
from attnserve._requests.operation import APPLY
from attnserve._requests.reply import Reply, Response
from attnserve._transports.multiplexer import MESSAGE_CALLS, Multiplexer
from attnserve.v1 import attention_pb2 as pb


@pytest.fixture
def multiplexer() -> Multiplexer[Any]:
    return Alone(POLICY)


def test_what_is_ready_travels_together(multiplexer: Multiplexer[Any]) -> None:
    assert not multiplexer.wants_stream
    first, second = call("a", priority=3), call("b", priority=-4, timeout=2.5)
    multiplexer.add(first, 0.0)
    multiplexer.add(second, 0.0)
    assert multiplexer.wants_stream
    stream = multiplexer.opened(0.0)
    assert not multiplexer.wants_stream
    sent = message(multiplexer, stream, now=0.25)
    assert sent is not None
    assert [c.id for c in sent.calls] == [first.id, second.id]
    assert [c.attend.priority for c in sent.calls] == [3, -4]
    assert not sent.calls[0].HasField("timeout")
    assert sent.calls[1].timeout.ToTimedelta().total_seconds() == 2.25
    assert message(multiplexer, stream) is None


def test_who_writes_is_wanted_when_there_is_something_to_do(multiplexer: Multiplexer[Any]) -> None:
    calls = [call("a"), call("b")]
    for each in calls:
        multiplexer.add(each, 0.0)
    stream = multiplexer.opened(0.0)
    assert multiplexer.wants_writer
    message(multiplexer, stream)
    assert not multiplexer.wants_writer
    multiplexer.resolve(stream, [Reply(calls[0].id, DONE)], 0.0)
    assert not multiplexer.wants_writer  # what was received has nothing to do with what is sent
    multiplexer.cancel(calls[1])
    assert multiplexer.wants_writer
    message(multiplexer, stream)
    assert not multiplexer.wants_writer
    multiplexer.leave()
    assert multiplexer.wants_writer  # the sending side is to be closed


def test_operations_travel_together(multiplexer: Multiplexer[Any]) -> None:
    """Each in a field of its own, so that the server can tell them apart."""
    for number in range(3):
        multiplexer.add(call(number, priority=number), 0.0)
        multiplexer.add(call(number, priority=-number, operation=APPLY), 0.0)
    stream = multiplexer.opened(0.0)
    sent = message(multiplexer, stream)
    assert sent is not None
    assert [c.WhichOneof("operation") for c in sent.calls] == ["attend", "apply"] * 3
    assert [c.attend.priority for c in sent.calls[::2]] == [0, 1, 2]
    assert [c.apply.priority for c in sent.calls[1::2]] == [0, -1, -2]
    results = [Response(APPLY, pb.ApplyResponse(layer_version=c.id), []) for c in sent.calls]
    replies = [Reply(c.id, result) for c, result in zip(sent.calls, results, strict=True)]
    outcomes = multiplexer.resolve(stream, reversed(replies), 0.0)
    assert [c.owner for c, _ in outcomes] == [2, 2, 1, 1, 0, 0]
    assert [result for _, result in outcomes] == list(reversed(results))


def test_a_message_holds_a_bounded_number_of_calls_and_of_cancelled_ones(multiplexer: Multiplexer[Any]) -> None:
    calls = [call(number) for number in range(2 * MESSAGE_CALLS + 3)]
    for each in calls:
        multiplexer.add(each, 0.0)
    stream = multiplexer.opened(0.0)
    ids = []
    for expected in (MESSAGE_CALLS, MESSAGE_CALLS, 3):
        sent = message(multiplexer, stream)
        assert sent is not None
        assert len(sent.calls) == expected
        ids += [c.id for c in sent.calls]
    assert message(multiplexer, stream) is None
    assert ids == [each.id for each in calls]
    for each in calls:
        assert multiplexer.cancel(each)
    multiplexer.add(last := call("last"), 0.0)
    cancelled: list[int] = []
    for expected in (MESSAGE_CALLS, MESSAGE_CALLS, 3):
        sent = message(multiplexer, stream)
        assert sent is not None
        assert len(sent.cancel) == expected
        assert [c.id for c in sent.calls] == ([last.id] if not cancelled else [])
        cancelled += sent.cancel
    assert message(multiplexer, stream) is None
    assert cancelled == ids


@pytest.mark.parametrize("timeout", [1e-12, 1e-9, 0.5, 1.0, 59.999999, 3600.0, 1e9])
def test_timeouts_are_stock_durations(multiplexer: Multiplexer[Any], timeout: float) -> None:
    multiplexer.add(call("a", timeout=timeout), 0.0)
    sent = message(multiplexer, multiplexer.opened(0.0))
    assert sent is not None
    assert sent.calls[0].HasField("timeout")
    assert sent.calls[0].timeout.seconds + sent.calls[0].timeout.nanos / 1e9 == pytest.approx(timeout, abs=2e-9)


def test_a_message_is_bounded_unless_one_call_is_larger() -> None:
    multiplexer: Multiplexer[Any] = Alone(POLICY, message_bytes=1000)
    for padding in (300, 300, 300, 5000, 10):
        multiplexer.add(call(padding, padding=padding), 0.0)
    stream = multiplexer.opened(0.0)
    lengths = []
    while (sent := message(multiplexer, stream)) is not None:
        lengths.append([len(c.attend.query.data) for c in sent.calls])
    assert lengths == [[300, 300, 300], [5000], [10]]


def test_replies_in_any_order_reach_their_calls(multiplexer: Multiplexer[Any]) -> None:
    calls = [call(name) for name in "abc"]
    for each in calls:
        multiplexer.add(each, 0.0)
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream)
    invalid = Reply(calls[0].id, status(grpc.StatusCode.INVALID_ARGUMENT))
    outcomes = multiplexer.resolve(stream, [Reply(calls[2].id, DONE), invalid], 0.0)
    assert [c.owner for c, _ in outcomes] == ["c", "a"]
    assert outcomes[0][1] is DONE
    assert isinstance(outcomes[1][1], InvalidRequestError)
    assert len(multiplexer) == 1
    assert multiplexer.resolve(stream, [Reply(calls[2].id, DONE), Reply(10**12, DONE)], 0.0) == []
    assert multiplexer.resolve(stream + 1, [Reply(calls[1].id, DONE)], 0.0) == []
    assert multiplexer.resolve(stream, [Reply(calls[1].id, DONE)], 0.0) == [(calls[1], DONE)]


def test_a_call_cancelled_before_it_is_sent_is_not_sent(multiplexer: Multiplexer[Any]) -> None:
    first, second = call("a"), call("b")
    multiplexer.add(first, 0.0)
    multiplexer.add(second, 0.0)
    assert multiplexer.cancel(first)
    assert not multiplexer.cancel(first)
    sent = message(multiplexer, multiplexer.opened(0.0))
    assert sent is not None
    assert [c.id for c in sent.calls] == [second.id]
    assert not sent.cancel


def test_a_call_made_elsewhere_by_now_takes_no_other_with_it(multiplexer: Multiplexer[Any]) -> None:
    """By then its id is from another server's stream, and belongs to another call here."""
    elsewhere: Multiplexer[Any] = Alone(POLICY)
    leaving, stays = call("a"), call("b")
    multiplexer.add(leaving, 0.0)
    multiplexer.leave()
    assert multiplexer.take_leaving() == [leaving]
    multiplexer.add(stays, 0.0)
    elsewhere.add(call("c"), 0.0)
    elsewhere.add(leaving, 0.0)
    assert leaving.id == stays.id
    assert not multiplexer.cancel(leaving)
    assert (len(multiplexer), len(elsewhere)) == (1, 2)
    assert multiplexer.cancel(stays)
    assert elsewhere.cancel(leaving)


def test_a_cancel_rides_along(multiplexer: Multiplexer[Any]) -> None:
    first, second, third = call("a"), call("b"), call("c")
    multiplexer.add(first, 0.0)
    multiplexer.add(second, 0.0)
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream)
    assert multiplexer.cancel(first)
    multiplexer.add(third, 0.0)
    sent = message(multiplexer, stream)
    assert sent is not None
    assert (list(sent.cancel), [c.id for c in sent.calls]) == ([first.id], [third.id])
    assert multiplexer.resolve(stream, [Reply(first.id, DONE)], 0.0) == []
    assert multiplexer.cancel(second)
    sent = message(multiplexer, stream)
    assert sent is not None
    assert (list(sent.cancel), len(sent.calls)) == ([second.id], 0)


def test_what_was_sent_on_a_stream_before_is_not_cancelled_on_the_next(multiplexer: Multiplexer[Any]) -> None:
    """There, the server does not have it."""
    before, after = call("a"), call("b")
    multiplexer.add(before, 0.0)
    message(multiplexer, multiplexer.opened(0.0))
    multiplexer.leave()
    multiplexer.add(after, 0.0)
    stream = multiplexer.opened(0.0)
    assert multiplexer.cancel(before)
    sent = message(multiplexer, stream)
    assert sent is not None
    assert ([c.id for c in sent.calls], list(sent.cancel)) == ([after.id], [])


def test_deadlines_are_kept_whatever_the_stream_does(multiplexer: Multiplexer[Any]) -> None:
    short, long, never = call("short", timeout=1.0), call("long", timeout=5.0), call("never")
    for each in (long, short, never):
        multiplexer.add(each, 0.0)
    assert multiplexer.wakeup == 1.0
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream)
    assert multiplexer.tick(0.5) == []
    ((expired, error),) = multiplexer.tick(1.0)
    assert expired is short
    assert isinstance(error, DeadlineExceededError)
    assert multiplexer.wakeup == 5.0
    sent = message(multiplexer, stream)
    assert sent is not None
    assert list(sent.cancel) == [short.id]
    assert [c.owner for c, _ in multiplexer.tick(9.0)] == ["long"]
    assert multiplexer.wakeup == float("inf")
    assert len(multiplexer) == 1


def test_a_call_that_is_too_late_is_not_sent(multiplexer: Multiplexer[Any]) -> None:
    multiplexer.add(call("late", timeout=0.0), 0.0)
    assert message(multiplexer, multiplexer.opened(0.0)) is None
    ((_, error),) = multiplexer.tick(0.0)
    assert isinstance(error, DeadlineExceededError)


def test_closing_fails_what_is_left(multiplexer: Multiplexer[Any]) -> None:
    multiplexer.add(call("sent"), 0.0)
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream)
    multiplexer.add(call("ready"), 0.0)
    outcomes = multiplexer.close()
    assert [c.owner for c, _ in outcomes] == ["sent", "ready"]
    assert all(isinstance(error, ClientClosedError) for _, error in outcomes)
    assert not multiplexer.wants_stream
    assert not multiplexer.writes(stream)
    assert multiplexer.close() == []
