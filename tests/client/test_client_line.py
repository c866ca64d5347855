"""The order in which calls wait, against a trivial model of it."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st
from multiplexed import Alone

from attnserve._settings.retry import RetryPolicy
from attnserve._transports.in_flight import Call
from attnserve._transports.line import SPARE, Line, by_priority
from attnserve._transports.multiplexer import Multiplexer

STEPS = st.lists(st.tuples(st.sampled_from(["join", "leave", "next", "up_to"]), st.integers(0, 9)), max_size=200)


def call(number: int, rank: float = 0.0) -> Call[int]:
    made = Call(number, 1, [b"x"], 1, 0.0, None)
    made.id, made.due = number, rank
    return made


@given(STEPS)
def test_calls_come_by_rank_and_age_and_may_leave_and_return_with_another(steps: list[tuple[str, int]]) -> None:
    line: Line[int] = Line(lambda each: each.due)
    calls = [call(number) for number in range(10)]
    model: set[tuple[float, int]] = set()
    for step, (action, n) in enumerate(steps):
        if action == "join" and calls[n] not in line:
            calls[n].due = float((step * 7 + n) % 5)
            line.join(calls[n])
            model.add((calls[n].due, n))
        elif action == "leave":
            line.leave(calls[n])
            model.discard((calls[n].due, n))
        elif action == "next" and model:
            expected = min(model)
            assert line.next() is calls[expected[1]]
            model.remove(expected)
        elif action == "up_to":
            due = sorted(each for each in model if each[0] <= n / 2)
            assert [each.id for each in line.up_to(n / 2)] == [number for _, number in due]
            model.difference_update(due)
        assert line.least == min(model, default=(inf, 0))[0]
        assert {each.id for each in line.calls} == {number for _, number in model}
        assert len(line._order) <= 2 * len(line) + SPARE + 1
    assert [line.next().id for _ in range(len(line))] == [number for _, number in sorted(model)]


def test_what_is_to_be_sent_goes_by_priority_even_while_the_connection_is_slow() -> None:
    """No server has refused anything: the calls wait for the connection, one message each."""
    multiplexer: Multiplexer[str] = Alone(RetryPolicy(3), message_bytes=1)
    for name, priority in (("low", -8), ("first", 0), ("second", 0), ("high", 8)):
        made = Call(name, 1, [name.encode()], 10, 0.0, 5.0)
        made.priority = priority
        multiplexer.add(made, 0.0)
    stream = multiplexer.opened(0.0)
    messages = iter(lambda: multiplexer.next_message(stream, 0.0), None)
    assert [bytes(message[-1]).decode() for message in messages] == ["high", "first", "second", "low"]


def test_priorities_rank_the_highest_first() -> None:
    high, low = call(1), call(2)
    high.priority, low.priority = 8, -8
    assert by_priority(high) < by_priority(low)
