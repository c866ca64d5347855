"""The multiplexer without I/O, where messages or replies are too long: which call fails, and that no other does."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from multiplexed import DONE, POLICY, Alone, call, message, status

from attnserve import InvalidRequestError
from attnserve._requests.reply import Reply
from attnserve._transports.multiplexer import Multiplexer
from attnserve.v1 import attention_pb2 as pb


@pytest.fixture
def multiplexer() -> Multiplexer[Any]:
    return Alone(POLICY)


@pytest.mark.parametrize("limit", [100, 1000, 10_000])
def test_messages_that_are_too_long_fail_only_the_calls_that_are(multiplexer: Multiplexer[Any], limit: int) -> None:
    """A server that ends the stream at any message over its limit still answers every call within the limit."""
    for padding in (10, 3000, 20, 20, 900, 7000, 30, 800):
        multiplexer.add(call(padding, padding=padding), 0.0)
    answered, failed = [], []
    too_long = status(grpc.StatusCode.RESOURCE_EXHAUSTED)
    too_long.message = "SERVER: Received message larger than max"
    while len(multiplexer):
        stream = multiplexer.opened(0.0)
        while (pieces := multiplexer.next_message(stream, 0.0)) is not None:
            data = b"".join(pieces)
            if len(data) > limit:
                outcomes = multiplexer.broken(stream, too_long, 0.0)
                assert all(isinstance(error, InvalidRequestError) for _, error in outcomes)
                failed += [c.owner for c, _ in outcomes]
                break
            replies = [Reply(c.id, DONE) for c in pb.AttendStreamRequest.FromString(data).calls]
            answered += [c.owner for c, _ in multiplexer.resolve(stream, replies, 0.0)]
    assert sorted(answered + failed) == [10, 20, 20, 30, 800, 900, 3000, 7000]
    assert all(padding > limit - 100 for padding in failed)
    assert all(padding < limit for padding in answered)
    assert not multiplexer.wants_stream


@pytest.mark.parametrize("too_late", [False, True])
@pytest.mark.parametrize("others", ["sent", "ready"])
def test_a_message_that_is_too_long_fails_no_other_call_once_it_is_given_up(
    multiplexer: Multiplexer[Any], others: str, too_late: bool
) -> None:
    long = call("long", padding=9000, timeout=1.0)
    multiplexer.add(long, 0.0)
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream)
    for owner in "ab":
        multiplexer.add(call(owner, padding=10), 0.0)
    if others == "sent":
        message(multiplexer, stream)
    if too_late:
        assert [given_up for given_up, _ in multiplexer.tick(1.0)] == [long]
    else:
        assert multiplexer.cancel(long)
    too_long = status(grpc.StatusCode.RESOURCE_EXHAUSTED)
    too_long.message = "SERVER: Received message larger than max"
    assert multiplexer.broken(stream, too_long, 1.0) == []
    assert multiplexer.wants_stream
    sent = message(multiplexer, multiplexer.opened(1.0), 1.0)
    assert sent is not None
    replies = [Reply(each.id, DONE) for each in sent.calls]
    assert sorted(each.owner for each, _ in multiplexer.resolve(2, replies, 1.0)) == ["a", "b"]


def test_a_call_that_is_too_long_fails_though_a_shorter_one_was_given_up(multiplexer: Multiplexer[Any]) -> None:
    short, long = call("short", padding=10), call("long", padding=9000)
    multiplexer.add(short, 0.0)
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream)
    multiplexer.add(long, 0.0)
    message(multiplexer, stream)
    assert multiplexer.cancel(short)
    too_long = status(grpc.StatusCode.RESOURCE_EXHAUSTED)
    too_long.message = "SERVER: Received message larger than max"
    ((failed, error),) = multiplexer.broken(stream, too_long, 0.0)
    assert failed is long
    assert isinstance(error, InvalidRequestError)


def test_a_reply_that_is_too_long_fails_no_other_call_once_its_own_is_given_up(multiplexer: Multiplexer[Any]) -> None:
    given_up, other = call("given up"), call("other")
    for each in (given_up, other):
        multiplexer.add(each, 0.0)
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream)
    assert multiplexer.cancel(given_up)
    too_long = status(grpc.StatusCode.RESOURCE_EXHAUSTED)
    too_long.message = "CLIENT: Received message larger than max (9 vs. 5)"
    assert multiplexer.broken(stream, too_long, 0.0) == []
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream)
    ((failed, _),) = multiplexer.broken(stream, too_long, 0.0)
    assert failed is other, "now it can only be its own"


def test_metadata_that_are_too_long_fail_all_calls_at_once(multiplexer: Multiplexer[Any]) -> None:
    """Each stream has them: no call is at fault, and messages need not be shorter."""
    for owner in "abc":
        multiplexer.add(call(owner), 0.0)
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream)
    multiplexer.add(call("d"), 0.0)
    too_long = status(grpc.StatusCode.RESOURCE_EXHAUSTED)
    too_long.message = "received metadata size exceeds hard limit (value length 20007 vs. 16384)"
    outcomes = multiplexer.broken(stream, too_long, 0.0)
    assert [c.owner for c, _ in outcomes] == ["a", "b", "c", "d"]
    assert all(isinstance(error, InvalidRequestError) for _, error in outcomes)
    assert not multiplexer.wants_stream
    for owner in "ef":
        multiplexer.add(call(owner), 0.0)
    sent = message(multiplexer, multiplexer.opened(0.0))
    assert sent is not None
    assert len(sent.calls) == 2, "together, as before"


def test_replies_that_are_too_long_fail_only_their_calls(multiplexer: Multiplexer[Any]) -> None:
    """Which reply it was gRPC does not say. Calls with long requests are not suspected for that."""
    long_replies = {"b", "e", "f"}
    for owner in "abcdefgh":
        multiplexer.add(call(owner, padding=5000 if owner == "a" else 10), 0.0)
    too_long = status(grpc.StatusCode.RESOURCE_EXHAUSTED)
    too_long.message = "Stream removed (CLIENT: Received message larger than max (9 vs. 5))"
    answered: list[str] = []
    failed: list[str] = []
    streams = 0
    while len(multiplexer):
        streams += 1
        assert streams <= 2 + len(long_replies)
        stream = multiplexer.opened(0.0)
        while (sent := message(multiplexer, stream)) is not None:
            assert message(multiplexer, stream) is None, "all of them, or one by one"
            calls = {each.id: multiplexer._calls[each.id] for each in sent.calls}
            if long_replies & {each.owner for each in calls.values()}:
                outcomes = multiplexer.broken(stream, too_long, 0.0)
                assert all(isinstance(error, InvalidRequestError) for _, error in outcomes)
                failed += [each.owner for each, _ in outcomes]
                break
            replies = [Reply(call_id, DONE) for call_id in calls]
            answered += [each.owner for each, _ in multiplexer.resolve(stream, replies, 0.0)]
    assert set(failed) == long_replies
    assert set(answered) == set("abcdefgh") - long_replies
    for owner in "ij":  # nobody is suspected any more
        multiplexer.add(call(owner), 0.0)
    sent = message(multiplexer, multiplexer.opened(0.0))
    assert sent is not None
    assert len(sent.calls) == 2
