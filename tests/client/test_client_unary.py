"""A unary call through its attempts, without a server: what follows each that fails, and what it says of the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from multiplexed import beside, refusal, replica_of
from settled import settings_of

from attnserve import AttnServeError, DeadlineExceededError, InvalidRequestError, OverloadedError, UnavailableError
from attnserve._rpc import Rpc
from attnserve._settings.credentials import Bearer
from attnserve._settings.retry import BUDGET_ALWAYS, Again, RetryPolicy
from attnserve._transports.thread_connection import Connection
from attnserve._transports.unary import UnaryCall
from attnserve.v1 import attention_pb2 as pb

CODE = grpc.StatusCode
BY_THE_SERVER = ErrorInfo(reason="A_REASON")


class Ended(grpc.RpcError):
    """An attempt that has failed. Those that a server has ended have details."""

    def __init__(self, code: grpc.StatusCode, *details: Message) -> None:
        self._code = code
        self._status = Status(code=code.value[0], message="no")
        for detail in details:
            self._status.details.add().Pack(detail)

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._status.message

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return (("grpc-status-details-bin", self._status.SerializeToString()),) if self._status.details else ()


class Now:
    """The time, which passes when a test says so."""

    def __init__(self) -> None:
        self.at = 100.0


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    now = Now()
    monkeypatch.setattr("attnserve._transports.unary.time.monotonic", lambda: now.at)
    return now


@pytest.fixture
def connection() -> Iterator[Connection]:
    """To the only server, which nobody has called."""
    made = Connection(settings_of("host:1"), None, Bearer(None), replica_of("host:1"), lambda _: beside(lambda: False))
    yield made
    made.close()


def policy(retries: int = 3) -> RetryPolicy:
    return RetryPolicy(retries, random=lambda: 0.0)


def call(connection: Connection, timeout: float | None = None, **options: Any) -> UnaryCall[None, Connection]:
    how = options.pop("policy", policy())
    return UnaryCall(
        None, "/service/Method", [b""], timeout, how, lambda left, avoid: connection, pinned=True, **options
    )


@pytest.mark.parametrize(
    ("error", "rest"),
    [
        (Ended(CODE.UNAVAILABLE), 2),
        (Ended(CODE.DEADLINE_EXCEEDED), 1),
        (Ended(CODE.DEADLINE_EXCEEDED, BY_THE_SERVER), 0),
        (Ended(CODE.INTERNAL), 0),
        (Ended(CODE.INVALID_ARGUMENT, BY_THE_SERVER), 0),
    ],
)
def test_a_server_that_is_out_of_reach_or_silent_is_left_alone(
    error: Ended, rest: int, connection: Connection, now: Now
) -> None:
    attempt = call(connection, 1.0)
    attempt.connect()
    now.at += 1.0
    with suppress(AttnServeError):
        attempt.failed(connection, error)
    assert connection.replica.rest(now.at) == rest


def test_a_call_without_time_left_is_not_sent(connection: Connection, now: Now) -> None:
    attempts = call(connection, 1.0), call(connection, 1.0, given=3.0)
    now.at += 0.5
    assert [attempt.connect() for attempt in attempts] == [(connection, 0.5)] * 2
    now.at += 0.5
    for attempt, seconds in zip(attempts, ("1", "3"), strict=True):
        with pytest.raises(DeadlineExceededError, match=f"^no reply from host:1 within {seconds}.* s$"):
            attempt.connect()


@pytest.mark.parametrize(
    ("timeout", "error", "words"),
    [
        (1.0, Ended(CODE.DEADLINE_EXCEEDED), "no reply from host:1 within 1.* s"),
        (1.0, Ended(CODE.DEADLINE_EXCEEDED, BY_THE_SERVER), "no"),
        (None, Ended(CODE.DEADLINE_EXCEEDED), "no"),
    ],
)
def test_a_deadline_has_the_words_of_whoever_noticed_it(
    timeout: float | None, error: Ended, words: str, connection: Connection
) -> None:
    """But for gRPC's own, which say neither how much time there was, nor who was asked."""
    attempt = call(connection, timeout)
    attempt.connect()
    with pytest.raises(DeadlineExceededError, match=f"^{words}$"):
        attempt.failed(connection, error)


@pytest.mark.parametrize("last", [CODE.INVALID_ARGUMENT, CODE.DEADLINE_EXCEEDED])
@pytest.mark.parametrize(
    ("earlier", "resent"),
    [
        ([], False),
        ([Ended(CODE.UNAVAILABLE, BY_THE_SERVER)], False),
        ([Ended(CODE.UNAVAILABLE)], True),
        ([Ended(CODE.UNAVAILABLE), Ended(CODE.UNAVAILABLE, BY_THE_SERVER)], True),
    ],
)
def test_an_error_says_whether_an_earlier_attempt_may_have_run(
    earlier: list[Ended], resent: bool, last: grpc.StatusCode, connection: Connection
) -> None:
    """It may unless the server itself has ended it."""
    attempts = call(connection, 1000.0)
    for error in earlier:
        attempts.connect()
        attempts.failed(connection, error)
    attempts.connect()
    with pytest.raises((InvalidRequestError, DeadlineExceededError)) as caught:
        attempts.failed(connection, Ended(last))
    assert caught.value.resent == resent


def test_a_single_attempt_is_not_followed_by_another(connection: Connection) -> None:
    attempt = call(connection, again=Again(0.5))
    assert attempt.pause == 0.5
    attempt.connect()
    with pytest.raises(UnavailableError):
        attempt.failed(connection, Ended(CODE.UNAVAILABLE))


@pytest.mark.parametrize("repeatable", [True, False])
@pytest.mark.parametrize("anyhow", [True, False])
def test_a_plain_rpc_is_sent_where_and_as_often_as_it_may_be(
    repeatable: bool, anyhow: bool, connection: Connection
) -> None:
    request = pb.ServerInfoRequest()
    rpc = Rpc("/service/Method", request, pb.ServerInfoResponse, bool, repeatable=repeatable, anyhow=anyhow)
    attempts = UnaryCall.of_rpc(
        None, rpc, None, policy(), lambda left, avoid: connection, again=None, given=None, pinned=True
    )
    found, _ = attempts.connect()
    assert found is (connection.anyhow if anyhow else connection)
    if repeatable:
        assert attempts.failed(found, Ended(CODE.UNAVAILABLE)) == 0.05
    else:
        with pytest.raises(UnavailableError):
            attempts.failed(found, Ended(CODE.UNAVAILABLE))


def test_calls_to_a_full_server_beyond_the_budget_wait_as_if_they_were_refused(
    connection: Connection, now: Now
) -> None:
    connection.replica.room.refused(now.at, refusal(3.0), None)
    ours, impatient = policy(), policy(retries=0)
    for how in (ours, impatient):
        for _ in range(BUDGET_ALWAYS):
            assert call(connection, policy=how, size=1).held_back(connection) is None
    assert call(connection, policy=ours).held_back(connection) is None, "it needs no room"
    held = call(connection, policy=ours, size=1)
    assert held.held_back(connection) == pytest.approx(3.0)
    assert held.held_back(connection) is None, "it has waited"
    with pytest.raises(OverloadedError, match="was not asked again"):
        call(connection, policy=impatient, size=1).held_back(connection)
    with pytest.raises(OverloadedError, match="was not asked again"):
        call(connection, 2.0, policy=ours, size=1).held_back(connection)


@pytest.mark.parametrize("anyhow", [False, True])
def test_an_answer_counts_unless_it_may_come_from_a_server_that_takes_no_calls(
    anyhow: bool, connection: Connection, now: Now
) -> None:
    connection.replica.failed(now.at)
    now.at += 0.1
    answering, how = connection.anyhow if anyhow else connection, policy()
    attempt = call(answering, policy=how)
    attempt.connect()
    attempt.answered(answering)
    assert connection.replica.is_failing == anyhow
    for budget in (how.retried, how.begun):
        assert [budget.take(now.at) for _ in range(BUDGET_ALWAYS + 2)].count(True) == BUDGET_ALWAYS + (not anyhow)
