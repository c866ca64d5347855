"""When a call is retried, and after how long: without a server, and without a clock."""

from __future__ import annotations

import inspect
from math import inf

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st
from settled import settings_of

from attnserve import AttnServeError, Client, InvalidRequestError, OverloadedError, UnavailableError
from attnserve._errors import error_from_status
from attnserve._settings.retry import (
    BUDGET_ALWAYS,
    BUDGET_WINDOW_S,
    NO_RETRIES,
    Again,
    Budget,
    RetryPolicy,
    breaks_only_the_stream,
    given_up,
    room_after,
)

CODE = grpc.StatusCode


def status(code: grpc.StatusCode, *details: Message) -> Status:
    found = Status(code=code.value[0], message="no")
    for detail in details:
        found.details.add().Pack(detail)
    return found


def overloaded(delay: float | None, reason: str = "OVERLOADED") -> Status:
    """The status of a full server, which may omit when to come back."""
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromNanoseconds(round((delay or 0.0) * 1e9))
    why = error_details_pb2.ErrorInfo(reason=reason)
    return status(CODE.RESOURCE_EXHAUSTED, *((why,) if delay is None else (retry, why)))


def after(
    policy: RetryPolicy, status: Status, attempts: int, now: float, deadline: float, *, resent: bool = False
) -> Again | AttnServeError:
    return policy.after(status, attempts, now, deadline, resent=resent)


def pause(verdict: Again | AttnServeError) -> float:
    """How long to wait, having asserted that there is another attempt."""
    assert isinstance(verdict, Again)
    return verdict.pause


@pytest.mark.parametrize("draw", [0.0, 0.3, 1.0])
def test_delays_double_up_to_a_bound_and_are_jittered(draw: float) -> None:
    policy = RetryPolicy(10, first_delay=0.1, longest_delay=1.0, random=lambda: draw)
    share = 0.5 + 0.5 * draw
    delays = [policy.delay(attempts, 0.0, float("inf")) for attempts in range(1, 8)]
    assert delays == pytest.approx([d * share for d in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0)])
    assert policy.delay(11, 0.0, float("inf")) is None


def test_retries_last_longer_than_a_pause_between_attempts_to_connect() -> None:
    """Or all could fall into one, although the server is there again."""
    retries = inspect.signature(Client).parameters["retries"].default
    policy = RetryPolicy(retries, random=lambda: 0.0)
    delays = [policy.delay(attempts, 0.0, inf) for attempts in range(1, retries + 1)]
    pause = dict(settings_of("host:1", retries=retries).channel_options("host:1"))
    assert sum(filter(None, delays)) > 1.2 * pause["grpc.max_reconnect_backoff_ms"] / 1000, "with gRPC's jitter"


@pytest.mark.parametrize("draw", [0.0, 0.3, 1.0])
def test_a_full_server_is_left_alone_for_as_long_as_it_says_and_twice_as_long_every_time(draw: float) -> None:
    policy = RetryPolicy(4, first_delay=0.1, longest_delay=0.2, random=lambda: draw)
    share = 1.0 + 0.5 * draw
    delays = [pause(after(policy, overloaded(0.05), attempts, 0.0, inf)) for attempts in (1, 2, 3)]
    assert delays == pytest.approx([0.05 * share, 0.1 * share, 0.2 * share])
    assert isinstance(after(policy, overloaded(0.05), 4, 0.0, inf), OverloadedError), "0.4 s is longer than any wait"
    assert isinstance(after(policy, overloaded(0.0), 4, 0.0, inf), Again)
    assert isinstance(after(policy, overloaded(0.0), 5, 0.0, inf), OverloadedError), "four retries are enough"
    for told in (None, 0.0, 0.001):
        assert pause(after(policy, overloaded(told), 1, 0.0, inf)) == pytest.approx(0.01 * share)


@pytest.mark.parametrize("draw", [0.0, 0.3, 1.0])
def test_a_call_that_waits_for_room_does_so_twice_as_long_every_time_up_to_a_bound(draw: float) -> None:
    policy = RetryPolicy(2, first_delay=0.1, longest_delay=0.2, random=lambda: draw)
    share = 1.0 + 0.5 * draw

    def delay(told: float, attempts: int) -> float | None:
        return policy.until_room(error_from_status(overloaded(told)), attempts, 0.0, inf)

    delays = [delay(0.05, attempts) for attempts in (1, 2, 3, 4, 50)]
    assert delays == pytest.approx([d * share for d in (0.05, 0.1, 0.2, 0.2, 0.2)])
    assert delay(0.5, 3) == pytest.approx(0.5 * share), "never sooner than it is told"
    assert delay(0.0, 1) == pytest.approx(0.01 * share)
    assert policy.until_room(UnavailableError("gone"), 1, 0.0, inf) is None
    assert RetryPolicy(0).until_room(error_from_status(overloaded(0.05)), 1, 0.0, inf) is None


def test_every_answer_counts_for_new_calls_and_for_those_sent_again() -> None:
    policy = RetryPolicy(1)
    policy.answered(2, 0.0)
    for budget in (policy.retried, policy.begun):
        assert [budget.take(0.0) for _ in range(BUDGET_ALWAYS + 3)] == [True] * (BUDGET_ALWAYS + 2) + [False]


def test_as_much_is_sent_again_as_has_been_answered_lately_and_a_little() -> None:
    budget = Budget()
    assert [budget.take(0.0) for _ in range(BUDGET_ALWAYS + 2)] == [True] * BUDGET_ALWAYS + [False] * 2
    budget.answered(3, 0.5)
    assert [budget.take(1.5) for _ in range(4)] == [True, True, True, False]
    budget.answered(2, 5.0)
    last = BUDGET_WINDOW_S - 0.1
    assert [budget.take(last) for _ in range(3)] == [True, True, False]
    # Retries of the first second count no more, those of the second still do.
    assert [budget.take(last + 0.5) for _ in range(BUDGET_ALWAYS)] == [True] * (BUDGET_ALWAYS - 3) + [False] * 3


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=60))
def test_within_the_window_no_more_is_sent_again_than_that(steps: list[tuple[float, int, int]]) -> None:
    budget, now = Budget(), 1000.0
    answered: list[tuple[int, int]] = []
    taken: list[tuple[int, int]] = []
    for pause, answers, wanted in steps:
        now += pause
        budget.answered(answers, now)
        answered.append((int(now), answers))
        given = sum([budget.take(now) for _ in range(wanted)])
        taken.append((int(now), given))
        since = int(now) - BUDGET_WINDOW_S
        room = BUDGET_ALWAYS + sum(n for at, n in answered if at > since) - sum(n for at, n in taken if at > since)
        assert room >= 0 or not given
        assert given == wanted or room <= 0


def test_no_retry_begins_at_the_deadline_or_later() -> None:
    policy = RetryPolicy(3, first_delay=1.0, random=lambda: 0.0)
    for cause, delay in ((status(CODE.UNAVAILABLE), 0.5), (overloaded(2.0), 2.0)):
        assert pause(after(policy, cause, 1, 10.0, 10.01 + delay)) == delay
        assert isinstance(after(policy, cause, 1, 10.0, 10.0 + delay), UnavailableError | OverloadedError)
    assert policy.delay(1, 9.9, 10.0, elsewhere=True) == 0.0
    assert policy.delay(1, 10.0, 10.0, elsewhere=True) is None
    full = error_from_status(overloaded(2.0))
    assert policy.until_room(full, 1, 10.0, 12.01) == 2.0
    assert policy.until_room(full, 1, 10.0, 12.0) is None


def test_what_must_not_be_repeated_is_not() -> None:
    assert NO_RETRIES.delay(1, 0.0, inf) is None


def test_an_overload_that_does_not_pass_is_not_waited_for() -> None:
    policy = RetryPolicy(3)
    assert isinstance(after(policy, overloaded(0.01, "SHARE_EXCEEDED"), 1, 0.0, inf), Again)
    assert isinstance(after(policy, overloaded(0.01, "CACHE_POOL_FULL"), 1, 0.0, inf), OverloadedError)


def test_a_server_lacks_room_for_all_calls_only_if_it_says_so() -> None:
    """Not if it has too many caches, say: it may compute at once."""
    retry, caches = error_details_pb2.RetryInfo(), error_details_pb2.ErrorInfo(reason="OVERLOADED")
    retry.retry_delay.FromSeconds(3)
    caches.metadata["bound"] = "caches"
    assert room_after(error_from_status(overloaded(3.0))) == 3
    for reason in ("SHARE_EXCEEDED", "TOO_MANY_STREAMS", "TOO_MANY_UNSENT", "TOO_MANY_UNREAD"):
        assert room_after(error_from_status(overloaded(3.0, reason))) == 3
    for other in (
        overloaded(None),
        overloaded(3.0, "CACHE_FULL"),
        status(grpc.StatusCode.RESOURCE_EXHAUSTED, retry, caches),
        status(grpc.StatusCode.UNAVAILABLE, retry),
    ):
        assert room_after(error_from_status(other)) is None
    assert room_after(None) is None


def test_a_delay_that_comes_with_unavailable_keeps_no_call_from_another_server() -> None:
    """Nor does it lengthen the pause before the same one is asked again: a proxy may send any."""
    hour = error_details_pb2.RetryInfo()
    hour.retry_delay.FromSeconds(3600)
    draining = status(CODE.UNAVAILABLE, error_details_pb2.ErrorInfo(reason="DRAINING"), hour)
    policy = RetryPolicy(3, random=lambda: 1.0)
    assert policy.after(draining, 1, 0.0, 10.0, resent=False, elsewhere=True) == Again(0.0)
    assert pause(after(policy, draining, 1, 0.0, 10.0)) == pytest.approx(0.1)


def test_only_the_unavailable_is_tried_again() -> None:
    policy = RetryPolicy(1)
    unavailable = Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="gone")
    assert isinstance(after(policy, unavailable, 1, 0.0, 10.0), Again)
    assert isinstance(after(policy, unavailable, 2, 0.0, 10.0), UnavailableError)
    assert isinstance(after(policy, unavailable, 1, 0.0, 0.01), UnavailableError)
    invalid = after(policy, Status(code=3, message="no"), 1, 0.0, 10.0)
    assert isinstance(invalid, InvalidRequestError)
    assert not invalid.resent
    again = after(policy, Status(code=3, message="no"), 2, 0.0, 10.0, resent=True)
    assert isinstance(again, InvalidRequestError)
    assert again.resent


@pytest.mark.parametrize("code", [CODE.UNAVAILABLE, CODE.INTERNAL, CODE.UNKNOWN, CODE.CANCELLED, CODE.ABORTED])
def test_what_grpc_says_of_a_connection_is_tried_again(code: grpc.StatusCode) -> None:
    """The service's own errors have details, and would recur, except for UNAVAILABLE."""
    policy = RetryPolicy(1)
    assert breaks_only_the_stream(code.value[0])
    assert isinstance(after(policy, status(code), 1, 0.0, inf), Again)
    gave_up = after(policy, status(code), 2, 0.0, inf)
    assert isinstance(gave_up, UnavailableError)
    assert gave_up.code is code
    detailed = after(policy, status(code, error_details_pb2.ErrorInfo(reason="A_REASON")), 1, 0.0, inf)
    assert isinstance(detailed, Again) == (code is CODE.UNAVAILABLE)


@pytest.mark.parametrize("code", [CODE.UNIMPLEMENTED, CODE.UNAUTHENTICATED, CODE.DEADLINE_EXCEEDED, CODE.DATA_LOSS])
def test_nothing_else_is(code: grpc.StatusCode) -> None:
    assert not breaks_only_the_stream(code.value[0])
    assert not isinstance(after(RetryPolicy(1), status(code), 1, 0.0, inf), Again)


def test_an_error_says_how_often_it_was_tried() -> None:
    assert str(given_up(status(CODE.UNAVAILABLE), 1)) == "UNAVAILABLE: no"
    assert str(given_up(status(CODE.UNAVAILABLE), 3)) == "UNAVAILABLE: no (attempt 3)"
    assert "the server ended the stream" in str(given_up(Status(), 1))
