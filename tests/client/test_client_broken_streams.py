"""The multiplexer without I/O, when streams end: what is retried, what fails, and that nothing is lost."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st
from multiplexed import DONE, POLICY, Alone, asked, call, full, message, status

from attnserve import AttnServeError, InvalidRequestError, OverloadedError, ProtocolError, UnavailableError
from attnserve._requests.operation import APPLY, ATTEND
from attnserve._requests.reply import Reply, Response
from attnserve._settings.retry import RetryPolicy
from attnserve._transports.in_flight import Call
from attnserve._transports.multiplexer import Multiplexer
from attnserve.v1 import attention_pb2 as pb


@pytest.fixture
def multiplexer() -> Multiplexer[Any]:
    return Alone(POLICY)


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.OK,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
    ],
)
def test_a_broken_stream_has_its_calls_sent_again(multiplexer: Multiplexer[Any], code: grpc.StatusCode) -> None:
    first = call("a", priority=5)
    multiplexer.add(first, 0.0)
    now, delays = 0.0, []
    for _ in range(POLICY.retries):
        stream = multiplexer.opened(0.0)
        sent = message(multiplexer, stream, now)
        assert sent is not None
        assert sent.calls[0].attend.priority == 5
        assert multiplexer.broken(stream, status(code), now) == []
        assert not multiplexer.wants_stream
        delays.append(multiplexer.wakeup - now)
        now = multiplexer.wakeup
        assert multiplexer.tick(now) == []
        assert multiplexer.wants_stream
    assert delays == pytest.approx([0.1, 0.2, 0.4])
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream, now)
    ((given_up, error),) = multiplexer.broken(stream, status(code), now)
    assert given_up is first
    assert isinstance(error, UnavailableError)
    assert "(attempt 4)" in str(error)
    assert len(multiplexer) == 0


def test_a_call_that_was_about_to_be_sent_shares_the_retries(multiplexer: Multiplexer[Any]) -> None:
    """Otherwise a stream that breaks before anything is sent would be opened again for ever, at once."""
    multiplexer.add(call("a"), 0.0)
    now = 0.0
    for _ in range(POLICY.retries):
        assert multiplexer.broken(multiplexer.opened(0.0), status(grpc.StatusCode.UNAVAILABLE), now) == []
        assert multiplexer.wakeup > now
        now = multiplexer.wakeup
        multiplexer.tick(now)
    ((_, error),) = multiplexer.broken(multiplexer.opened(0.0), status(grpc.StatusCode.UNAVAILABLE), now)
    assert isinstance(error, UnavailableError)


def test_a_stream_that_cannot_be_opened_counts_as_one_that_broke(multiplexer: Multiplexer[Any]) -> None:
    """But nothing has been sent on it, and replies still due on another stream are awaited."""
    owed, ready = call("owed"), call("ready")
    multiplexer.add(owed, 0.0)
    old = multiplexer.opened(0.0)
    message(multiplexer, old)
    multiplexer.asked_to_leave(old, 0.0, others=False)
    multiplexer.add(ready, 0.0)
    now = 0.0
    for _ in range(POLICY.retries):
        assert multiplexer.unopened(multiplexer.opened(0.0), RuntimeError("no thread"), now) == []
        assert not multiplexer.wants_stream
        assert multiplexer.wakeup > now
        now = multiplexer.wakeup
        assert multiplexer.tick(now) == []
        assert multiplexer.wants_stream
    ((given_up, error),) = multiplexer.unopened(multiplexer.opened(0.0), RuntimeError("no thread"), now)
    assert given_up is ready
    assert not ready.resent
    assert isinstance(error, UnavailableError)
    assert "no thread" in str(error)
    assert multiplexer.resolve(old, [Reply(owed.id, DONE)], now) == [(owed, DONE)]


def test_no_retry_begins_beyond_the_deadline(multiplexer: Multiplexer[Any]) -> None:
    multiplexer.add(call("a", timeout=0.05), 0.0)
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream)
    ((_, error),) = multiplexer.broken(stream, status(grpc.StatusCode.UNAVAILABLE), 0.0)
    assert isinstance(error, UnavailableError)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED])
def test_a_stream_that_would_break_again_is_not_retried(multiplexer: Multiplexer[Any], code: grpc.StatusCode) -> None:
    multiplexer.add(call("a"), 0.0)
    multiplexer.add(call("b"), 0.0)
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream)
    outcomes = multiplexer.broken(stream, status(code), 0.0)
    assert [c.owner for c, _ in outcomes] == ["a", "b"]
    assert all(isinstance(error, AttnServeError) and error.code is code for _, error in outcomes)
    assert not any(isinstance(error, UnavailableError) for _, error in outcomes)


def test_a_stream_that_a_proxy_refuses_is_sent_again_after_a_pause(multiplexer: Multiplexer[Any]) -> None:
    """No message was too long: nothing fails for that, and no stream is opened at once."""
    for owner in "abc":
        multiplexer.add(call(owner, padding=100), 0.0)
    stream = multiplexer.opened(0.0)
    while multiplexer.next_message(stream, 0.0) is not None:
        pass
    refused = status(grpc.StatusCode.RESOURCE_EXHAUSTED)
    refused.message = "too many requests"
    outcomes = multiplexer.broken(stream, refused, 0.0)
    assert not any(isinstance(error, InvalidRequestError) for _, error in outcomes)
    assert len(outcomes) + len(multiplexer) == 3
    assert not multiplexer.wants_stream


def too_many_streams() -> Status:
    """What a server ends a stream with that is one too many for its caller."""
    refused = status(grpc.StatusCode.RESOURCE_EXHAUSTED)
    refused.details.add().Pack(error_details_pb2.ErrorInfo(reason="TOO_MANY_STREAMS"))
    again = error_details_pb2.RetryInfo()
    again.retry_delay.FromSeconds(1)
    refused.details.add().Pack(again)
    return refused


def test_where_there_are_too_many_streams_calls_go_elsewhere_when_told_to(multiplexer: Multiplexer[Any]) -> None:
    """The error has details that say why: no message was too long."""
    for name in "ab":
        multiplexer.add(call(name), 0.0)
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream)
    assert multiplexer.broken(stream, too_many_streams(), 0.0) == []
    assert multiplexer.tick(0.9, others=True) == []
    assert multiplexer.take_leaving() == []
    assert multiplexer.tick(2.0, others=True) == []
    assert [each.owner for each in multiplexer.take_leaving()] == ["a", "b"]


def test_where_there_are_always_too_many_streams_calls_fail(multiplexer: Multiplexer[Any]) -> None:
    for name in "ab":
        multiplexer.add(call(name), 0.0)
    now, outcomes = 0.0, []
    while len(multiplexer):
        if multiplexer.wants_stream:
            stream = multiplexer.opened(now)
            message(multiplexer, stream, now)
            outcomes += multiplexer.broken(stream, too_many_streams(), now)
        now = multiplexer.wakeup
        outcomes += multiplexer.tick(now)
    assert {c.owner for c, _ in outcomes} == {"a", "b"}
    assert now < 60
    assert all(isinstance(error, OverloadedError) for _, error in outcomes)
    assert len(multiplexer) == 0


def test_a_server_that_goes_away_is_left_and_what_it_owes_awaited(multiplexer: Multiplexer[Any]) -> None:
    refused, owed, late, new = call("refused"), call("owed"), call("refused late"), call("new")
    for each in (refused, owed, late):
        multiplexer.add(each, 0.0)
    old = multiplexer.opened(0.0)
    message(multiplexer, old)
    assert multiplexer.resolve(old, [Reply(refused.id, status(grpc.StatusCode.UNAVAILABLE))], 0.0) == []
    assert not multiplexer.writes(old)
    multiplexer.add(new, 0.0)
    assert multiplexer.wants_stream
    assert message(multiplexer, old) is None
    young = multiplexer.opened(0.0)
    assert message(multiplexer, old) is None
    sent = message(multiplexer, young)
    assert sent is not None
    assert [c.id for c in sent.calls] == [new.id]
    assert multiplexer.resolve(old, [Reply(owed.id, DONE)], 0.0) == [(owed, DONE)]
    assert multiplexer.resolve(old, [Reply(late.id, status(grpc.StatusCode.UNAVAILABLE))], 0.0) == []
    assert multiplexer.writes(young)
    assert multiplexer.broken(old, Status(), 0.0) == []
    assert multiplexer.writes(young)
    multiplexer.tick(0.1)
    sent = message(multiplexer, young, 0.1)
    assert sent is not None
    assert [c.id for c in sent.calls] == [refused.id, late.id]
    assert (refused.attempts, refused.resent) == (1, False)  # answered, so not one that the end of the stream broke


def test_nonsense_ends_the_stream_and_the_calls_on_it(multiplexer: Multiplexer[Any]) -> None:
    on_it, behind_it = call("a"), call("b")
    multiplexer.add(on_it, 0.0)
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream)
    multiplexer.add(behind_it, 0.0)
    ((failed, error),) = multiplexer.distrusted(stream, "nonsense")
    assert failed is on_it
    assert isinstance(error, ProtocolError)
    assert multiplexer.wants_stream
    young = multiplexer.opened(0.0)
    assert multiplexer.distrusted(stream, "more nonsense") == []
    assert multiplexer.writes(young)


@given(st.data())
def test_every_call_has_one_outcome_and_its_own(data: st.DataObject) -> None:
    """For any sequence of events: no call has two outcomes, none is lost, none gets another's reply."""
    multiplexer: Multiplexer[int] = Alone(RetryPolicy(2, random=lambda: 0.0), message_bytes=64)
    settled: dict[int, Any] = {}
    withdrawn: set[int] = set()
    calls: dict[int, Call[int]] = {}
    on_wire: dict[int, dict[int, int]] = {}  # stream -> id -> the priority that was sent with it
    now, stream = 0.0, 0

    def settle(outcomes: list[Any]) -> None:
        for each, outcome in outcomes:
            assert each.owner not in settled
            assert each.owner not in withdrawn
            if isinstance(outcome, Response):
                assert outcome.message.batch_size == each.owner
            settled[each.owner] = outcome

    actions = st.sampled_from(
        ["add", "add", "send", "send", "reply", "reply", "refuse", "full", "break", "cancel", "wait"]
    )
    for action in data.draw(st.lists(actions, max_size=60)):
        if multiplexer.wants_stream:
            stream = multiplexer.opened(0.0)
            on_wire[stream] = {}
        if action == "add":
            number = len(calls) + 1
            timeout = data.draw(st.sampled_from([None, 0.05, 10.0]))
            calls[number] = call(
                number,
                operation=data.draw(st.sampled_from([ATTEND, APPLY])),
                priority=number,
                padding=data.draw(st.integers(0, 80)),
                now=now,
                timeout=timeout,
            )
            multiplexer.add(calls[number], now)
        elif action == "send" and stream:
            sent = message(multiplexer, stream, now)
            on_wire[stream].update({c.id: asked(c).priority for c in sent.calls} if sent else {})
        elif action in ("reply", "refuse", "full"):
            waiting = [(s, i) for s, ids in on_wire.items() for i in ids]
            if waiting:
                where, which = data.draw(st.sampled_from(waiting))
                done = Response(ATTEND, pb.AttendResponse(batch_size=on_wire[where].pop(which)), [])
                errors = {"refuse": status(grpc.StatusCode.UNAVAILABLE), "full": full("requests", 0.05)}
                result = done if action == "reply" else errors[action]
                settle(multiplexer.resolve(where, [Reply(which, result)], now))
        elif action == "break" and on_wire:
            where = data.draw(st.sampled_from(sorted(on_wire)))
            code = data.draw(st.sampled_from(["OK", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"]))
            del on_wire[where]
            settle(multiplexer.broken(where, status(grpc.StatusCode[code]), now))
            stream = stream if stream in on_wire else 0
        elif action == "cancel" and calls:
            number = data.draw(st.sampled_from(sorted(calls)))
            if multiplexer.cancel(calls[number]):
                assert number not in settled
                withdrawn.add(number)
        elif action == "wait":
            now += data.draw(st.sampled_from([0.01, 0.1, 1.0]))
            settle(multiplexer.tick(now))
    settle(multiplexer.close())
    assert settled.keys() | withdrawn == calls.keys()
    assert not settled.keys() & withdrawn


def test_an_error_says_whether_an_earlier_attempt_may_have_been_carried_out(multiplexer: Multiplexer[Any]) -> None:
    """Not if that attempt was answered, or never left."""
    sent, late, refused = (call(name) for name in ("sent", "late", "refused"))
    multiplexer.add(refused, 0.0)
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream)
    multiplexer.resolve(stream, [Reply(refused.id, status(grpc.StatusCode.UNAVAILABLE))], 0.0)
    multiplexer.add(sent, 0.0)
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream)
    multiplexer.add(late, 0.0)
    multiplexer.broken(stream, status(grpc.StatusCode.INTERNAL), 0.0)
    multiplexer.tick(1.0)
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream, 1.0)
    refusal = status(grpc.StatusCode.FAILED_PRECONDITION)
    outcomes = multiplexer.resolve(stream, [Reply(c.id, refusal) for c in (sent, late, refused)], 1.0)
    assert [(c.owner, isinstance(error, AttnServeError) and error.resent) for c, error in outcomes] == [
        ("sent", True),
        ("late", False),
        ("refused", False),
    ]
