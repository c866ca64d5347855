"""Calls on a stream wait in the client while the server has no room for them, and are sent as it answers others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from typing import TYPE_CHECKING

import calls
import grpc
import numpy as np
import pytest
from askers import array
from multiplexed import DONE, full, refusal, status
from peers import peer, replies
from windowed import EAGER, Stream, stream

from attnserve import Client, OverloadedError
from attnserve._transports.window import FORGOTTEN_AFTER, Window
from attnserve.v1 import attention_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from conftest import Server

__all__ = ["stream"]


def test_no_more_are_sent_than_the_server_took(stream: Stream) -> None:
    stream.add("a", "b", now=0.1)
    assert stream.sent(0.1) == []
    stream.replies(0, now=0.2)
    assert stream.sent(0.2) == ["a"]
    stream.replies(1, now=0.3)
    assert stream.sent(0.3) == ["b"]
    stream.add("c", now=0.3)
    assert stream.sent(0.3) == []


def test_those_that_were_refused_are_sent_before_others_once_they_have_waited(stream: Stream) -> None:
    stream.add("a", "b", "c", now=0.1)
    stream.replies(0, now=0.9)
    assert stream.sent(0.9) == ["a"]
    stream.tick(1.0)
    assert stream.sent(1.0) == []
    stream.replies(1, 2, now=1.1)
    assert stream.sent(1.1) == [4, 5]


def test_those_of_a_higher_priority_are_sent_first(stream: Stream) -> None:
    stream.add("a", "b", now=0.1)
    stream.add("urgent", now=0.2, priority=3)
    stream.add("idle", now=0.2, priority=-3)
    stream.tick(1.0)
    stream.replies(0, 1, 2, 3, now=1.1)
    first = stream.sent(1.1)
    stream.replies("urgent", 4, 5, now=1.2)
    assert first + stream.sent(1.2) == ["urgent", 4, 5, "a", "b", "idle"]


def test_a_connection_that_takes_no_calls_finds_no_more_room(stream: Stream) -> None:
    """A server that reads slowly refuses nothing: what it has not read could not move to another server."""
    stream.add(*range(100, 200), now=0.1)
    for name in range(4):  # each makes room for one, which is not read
        stream.replies(name, now=0.2)
    assert stream.sent(0.2) == [100, 101, 102, 103]


def test_answers_while_others_wait_find_more_room(stream: Stream) -> None:
    names = [f"held {n}" for n in range(100)]
    stream.add(*names, now=0.1)
    in_flight, most = [0, 1, 2, 3], 0
    for _ in range(40):
        stream.replies(in_flight.pop(0), now=0.2)
        in_flight += stream.sent(0.2)
        most = max(most, len(in_flight))
    assert 6 <= most <= 12
    stream.replies(in_flight.pop(), now=0.3, error=full("queue_time", 1.0))
    assert stream.sent(0.3) == [], "which ends where one is refused"


def test_a_server_that_stays_full_refuses_less_and_less_until_it_has_more_room(stream: Stream) -> None:
    stream.add(*(f"held {n}" for n in range(1000)), now=0.1)
    in_flight: list[Any] = [0, 1, 2, 3]

    def refused(places: int, times: range) -> int:
        """How many calls are refused while others are answered, one each time."""
        refusals = 0
        for time in times:
            now = 0.2 + time / 100
            stream.replies(in_flight.pop(0), now=now)
            in_flight.extend(stream.sent(now))
            while len(in_flight) > places:
                refusals += 1
                stream.replies(in_flight.pop(), now=now, error=full("bytes", 0.1))
        return refusals

    assert refused(4, range(200)) < 15
    assert refused(4, range(200, 400)) < 10
    assert refused(8, range(400, 480)) < 5
    assert len(in_flight) == 8, "which does not take long"
    assert refused(8, range(480, 680)) < 10


def share_of_growth(window: Window) -> float:
    """By how many calls a round of answers raises a window's bound."""
    before = window.room(0)
    window.answered(1, 1, 0.0, taken=True)
    return (window.room(0) - before) * before


def test_a_bound_grows_half_as_fast_after_each_refusal_of_what_was_beyond_it() -> None:
    window = Window(3)
    found = []
    for _ in range(5):
        for _ in range(3):  # of the calls in one message, which is one refusal
            window.refused(refusal(0.1), 4, 0.1, 0.0)
        found.append(share_of_growth(window))
    assert found == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8, 1 / 8])


def test_a_bound_grows_fast_again_where_the_server_has_taken_more() -> None:
    window = Window(3)
    found = []
    for unanswered in (4, 4, 6, 8, 8, 4):
        window.refused(refusal(0.1), unanswered, 0.1, 0.0)
        found.append(share_of_growth(window))
    assert found == pytest.approx([1, 1 / 2, 1, 1, 1 / 2, 1 / 4])


def test_a_call_that_cannot_be_answered_in_its_time_is_told_at_once(stream: Stream) -> None:
    """By the speed at which calls are answered, and with half of its time for the server."""
    stream.add(*(f"held {n}" for n in range(200)), now=0.1)
    in_flight, now = [0, 1, 2, 3], 0.0
    for _ in range(50):  # ten a second
        now += 0.1
        stream.replies(in_flight.pop(0), now=now)
        in_flight += stream.sent(now)
    ahead = len(stream.multiplexer) - 2  # two wait for what the server has told them
    stream.add("hopeless", now=now, timeout=0.12 * ahead)
    stream.add("hopeful", now=now, timeout=0.3 * ahead)
    stream.tick(now)
    assert isinstance(error := stream.outcomes["hopeless"], OverloadedError)
    assert "ahead of this one, should take" in str(error)
    assert error.bound == "queue_time"
    assert error.retry_delay == pytest.approx(0.11 * ahead - (0.12 * ahead - 5), abs=2)
    assert "hopeful" not in stream.outcomes


def test_a_long_time_is_mostly_for_waiting(stream: Stream) -> None:
    stream.add("a", now=0.1)
    stream.add("hopeful", now=0.1, timeout=8.0)
    stream.multiplexer._waiting._window.speed.told(1, 1.0, 0.1)  # of four calls in flight, one a second
    stream.add("late", now=0.1, timeout=10.9)
    stream.add("in time", now=0.1, timeout=12.0)
    stream.tick(0.1)
    assert set(stream.outcomes) == {"late"}


def test_a_call_that_finds_the_server_idle_again_is_sent() -> None:
    """However short its time, and however rare such calls are."""
    stream = Stream()
    stream.add("first")
    stream.sent()
    stream.replies("first", error=full("requests", 0.5))
    now = 0.5
    stream.tick(now)
    assert stream.sent(now) == ["first"]
    stream.replies("first", now=now)
    for name in range(20):
        now += 0.4
        stream.add(name, now=now, timeout=0.1)
        assert stream.sent(now) == [name]
        stream.replies(name, now=now)


def test_a_call_for_which_there_is_room_is_sent_however_short_its_time(stream: Stream) -> None:
    """And however slow the server has said to be."""
    stream.replies(0, 1, 2, now=0.1)
    stream.add("hasty", now=0.1, timeout=0.2)
    assert stream.sent(0.1) == ["hasty"]


def test_a_server_that_answers_between_refusals_is_not_given_up() -> None:
    stream, now = Stream(), 0.0
    for number in range(2 * EAGER.retries):
        stream.add(number, now=now)
        for reply in (full("requests", 0.5), full("requests", 0.5), DONE):
            while number not in stream.sent(now):
                now = stream.multiplexer.wakeup
                stream.tick(now)
            stream.replies(number, error=reply, now=now)
        assert stream.outcomes[number] is DONE


def test_time_in_which_nothing_waits_says_nothing_of_the_server(stream: Stream) -> None:
    """Bursts of calls, each of which is worked off in no time."""
    stream.replies(*range(4), now=0.01)
    now = 0.02
    for burst in range(10):
        names = [f"{burst}.{n}" for n in range(100)]
        stream.add(*names, now=now, timeout=4.0)
        in_flight = stream.sent(now)
        while in_flight:
            now += 0.001
            stream.replies(in_flight.pop(0), now=now)
            in_flight += stream.sent(now)
        assert set(names) <= stream.outcomes.keys()
        now += 8.0
    assert not any(isinstance(outcome, OverloadedError) for outcome in stream.outcomes.values())


@pytest.mark.parametrize("bound", ["bytes", "flops"])
def test_one_that_is_too_large_now_keeps_no_other_waiting(bound: str) -> None:
    stream = Stream()
    stream.add("large")
    stream.sent()
    stream.replies("large", error=full(bound, 1.0))
    for name in range(5):
        stream.add(name, now=0.1)
        assert stream.sent(0.1) == [name]
        stream.replies(name, now=0.1)


@pytest.mark.parametrize("bound", ["bytes", "flops"])
def test_one_that_is_too_large_again_and_again_is_given_up(bound: str) -> None:
    """It would cost the server as much each time, and nothing says that there will ever be room for it."""
    stream, now = Stream(), 0.0
    stream.add("large")
    for _ in range(1 + EAGER.retries):
        assert stream.sent(now) == ["large"]
        stream.replies("large", error=full(bound, 0.1), now=now)
        now = stream.multiplexer.wakeup
        stream.tick(now)
    assert isinstance(stream.outcomes["large"], OverloadedError)


def test_many_that_are_given_up_while_they_wait_cost_little(stream: Stream) -> None:
    multiplexer = stream.multiplexer
    stream.add("held", now=0.1)
    multiplexer.tick(0.1)
    due = multiplexer.wakeup
    for n in range(1000):
        stream.add(f"gone {n}", now=0.1)
        assert multiplexer.cancel(multiplexer._calls[stream.ids[f"gone {n}"]])
    assert multiplexer.wakeup == due, "they make no room"
    assert len(multiplexer._waiting._held._order) < 100


def test_the_deadline_of_one_that_waits(stream: Stream) -> None:
    stream.add("a", now=0.1, timeout=10.0)
    stream.tick(10.1)
    assert isinstance(stream.outcomes["a"], OverloadedError)
    assert str(stream.outcomes["a"]) == "full; no room within 10 s"
    stream.replies(0, now=10.2)
    assert stream.sent(10.2) == [4], "which has no deadline"


def test_one_that_is_given_up_makes_room(stream: Stream) -> None:
    stream.add("a", "b", now=0.1)
    multiplexer = stream.multiplexer
    assert multiplexer.cancel(multiplexer._calls[stream.ids[0]])
    assert multiplexer.cancel(multiplexer._calls[stream.ids["a"]])
    assert multiplexer.wakeup == 0.0
    stream.tick(0.2)
    assert stream.sent(0.2) == ["b"]
    assert multiplexer.wakeup == 1.0


@pytest.mark.parametrize("waits", [False, True])
def test_a_bound_is_forgotten_after_a_while_in_which_nothing_waits(stream: Stream, waits: bool) -> None:
    late = 1.0 + FORGOTTEN_AFTER
    if waits:
        stream.add("a", "b", "c", now=0.1)
    stream.tick(1.0)
    stream.replies(*range(4), now=1.1)
    before = stream.sent(1.1)
    stream.add(*(f"late {n}" for n in range(10)), now=late)
    assert (len(stream.sent(late)) == 10) == (not waits)
    assert before[:2] == [4, 5]


def test_another_stream_may_lead_to_another_server(stream: Stream) -> None:
    stream.add("a", "b", now=0.1)
    assert stream.multiplexer.broken(stream.number, status(grpc.StatusCode.UNAVAILABLE), 0.2) == []
    assert stream.multiplexer.wants_stream
    stream.number = stream.multiplexer.opened(0.2)
    assert stream.sent(0.2) == ["a", "b"]


def test_what_is_held_goes_elsewhere_when_the_server_is_left(stream: Stream) -> None:
    stream.add("a", "b", now=0.1)
    stream.multiplexer.asked_to_leave(stream.number, 0.2, others=True)
    assert [each.owner for each in stream.multiplexer.take_leaving()] == ["a", "b"]
    assert len(stream.multiplexer) == 6


@pytest.mark.parametrize("whole", [False, True], ids=["calls", "streams"])
def test_a_server_that_refuses_all_that_it_is_asked_is_given_up(whole: bool) -> None:
    """If it has none of the calls, and as soon as it has been asked again as often as retries are allowed: otherwise
    they might wait for ever.
    """
    stream, now, asked = Stream(), 0.0, 0
    stream.add("first", "second")
    while not stream.outcomes:
        now = max(now, stream.multiplexer.wakeup) if asked else now
        stream.tick(now)
        if stream.multiplexer.wants_stream:
            stream.number = stream.multiplexer.opened(now)
        if sent := stream.sent(now):
            asked += 1
            if whole:
                refused = stream.multiplexer.broken(stream.number, full("", 1.0, "TOO_MANY_STREAMS"), now)
                assert not refused
            else:
                stream.replies(*sent, error=full("requests", 1.0), now=now)
        assert now < 1000.0
    assert asked == 1 + EAGER.retries
    assert sorted(stream.outcomes) == ["first", "second"]
    assert {type(error) for error in stream.outcomes.values()} == {OverloadedError}


def test_closing_ends_what_is_held(stream: Stream) -> None:
    stream.add("a", now=0.1)
    assert len(stream.multiplexer.close()) == 7
    assert stream.multiplexer.tick(1.0) == []


def test_an_error_that_is_kept_holds_no_frames() -> None:
    window = Window(3)
    error = refusal(1.0)
    window.refused(error, 0, 1.0, 0.0)
    assert window.refusal is not error


def test_a_server_with_room_for_one_answers_all() -> None:
    """Of the calls in a message, it takes one, and refuses all others."""
    messages_read = 0

    def narrow(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        nonlocal messages_read
        for data in messages:
            messages_read += 1
            first, *others = pb.AttendStreamRequest.FromString(data).calls
            refused = [pb.AttendStreamReply(id=each.id, error=full("requests", 0.01)) for each in others]
            yield pb.AttendStreamResponse(replies=refused).SerializeToString()
            yield from replies(pb.AttendStreamRequest(calls=[first]).SerializeToString())

    with peer(narrow) as address, Client(address) as client:
        futures = [client.submit(array(n), array(n), array(n)) for n in range(100)]
        assert [future.result(calls.PATIENCE_S).output[0, 0] for future in futures] == [*range(100)]
    assert messages_read > 1


def test_a_burst_that_a_server_can_work_off_is_worked_off(start_server: Callable[..., Server]) -> None:
    """Of many times what it has room for, in one client, with a few others' calls in between."""
    # It answers slowly, or it would never be full where submitting takes longer than computing.
    server = start_server("--max-bytes", "32MiB", "--max-message-bytes", "8MiB", "--max-wait", "50ms")
    rng = np.random.default_rng(0)
    query = rng.standard_normal((8, 256, 64)).astype(np.float32)
    with Client(server.address, timeout=calls.PATIENCE_S) as client, Client(server.address) as other:
        expected = client.attend(query, query, query).output
        futures = [client.submit(query, query, query) for _ in range(300)]
        small = [other.submit(query[:, :1], query, query) for _ in range(10)]
        wait([*futures, *small], calls.PATIENCE_S)
        assert [future.exception() for future in (*futures, *small)] == [None] * 310
        assert all(np.array_equal(future.result().output, expected) for future in futures)
    assert calls.rejections(server.http_address) > 0, "it was full"
