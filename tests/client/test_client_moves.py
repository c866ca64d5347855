"""Calls that move from one server to another, and what stays where it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, cast

import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from multiplexed import DONE, Alone, replica_of

from attnserve._errors import AttnServeError, ClientClosedError
from attnserve._requests.reply import Reply
from attnserve._settings.retry import RetryPolicy
from attnserve._transports.connection import others_of
from attnserve._transports.in_flight import Call
from attnserve._transports.multiplexer import LOOK_S, Multiplexer

UNAVAILABLE = Status(code=14, message="draining")


def full(seconds: int) -> Status:
    """The status of a server that is full for `seconds` seconds."""
    status = Status(code=8, message="full")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="OVERLOADED"))
    status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=seconds)))
    return status


def calls_on(multiplexer: Multiplexer[str], owners: Iterable[str], pinned: Iterable[str] = ()) -> dict[str, Call[str]]:
    made = {}
    for owner in owners:
        made[owner] = call = Call(owner, 15, [owner.encode()], 1, 0.0, 9.0)
        call.pinned = owner in pinned
        multiplexer.add(call, 0.0)
    return made


def sent(multiplexer: Multiplexer[str], stream: int) -> bytes:
    return b"".join(multiplexer.next_message(stream, 0.0) or ())


@pytest.fixture
def here() -> Multiplexer[str]:
    return Alone(RetryPolicy(2, random=lambda: 1.0), replica_of("here"))


def test_what_is_tried_again_is_tried_elsewhere(here: Multiplexer[str]) -> None:
    calls = calls_on(here, ("free", "pinned"), pinned=("pinned",))
    stream = here.opened(0.0)
    assert sent(here, stream)
    for call in calls.values():
        assert here.resolve(stream, [Reply(call.id, UNAVAILABLE)], 0.0) == []
    here.opened(0.0)
    assert here.tick(1.0, others=True) == []
    assert here.take_leaving() == [calls["free"]]
    assert calls["free"].avoid == "here"
    assert here.take_leaving() == []
    assert b"pinned" in sent(here, 2)
    there: Multiplexer[str] = Alone(RetryPolicy(2), replica_of("there"))
    calls_on(there, ("another",))
    there.add(calls["free"], 0.0)
    assert b"free" in sent(there, there.opened(0.0))
    assert calls["free"].attempts == 1


def test_without_others_it_stays(here: Multiplexer[str]) -> None:
    (call,) = calls_on(here, ("free",)).values()
    stream = here.opened(0.0)
    sent(here, stream)
    here.resolve(stream, [Reply(call.id, UNAVAILABLE)], 0.0)
    assert here.tick(1.0) == []
    assert here.take_leaving() == []
    assert b"free" in sent(here, here.opened(0.0))


def test_a_stream_that_is_asked_to_close_is_owed_its_replies(here: Multiplexer[str]) -> None:
    calls = calls_on(here, ("sent",))
    stream = here.opened(0.0)
    sent(here, stream)
    calls |= calls_on(here, ("unsent", "pinned"), pinned=("pinned",))
    here.asked_to_leave(stream, 0.0, others=True)
    assert not here.writes(stream)
    assert here.take_leaving() == [calls["unsent"]]
    assert here.wants_stream
    refused = Status(code=3, message="no")
    ((call, error),) = here.resolve(stream, [Reply(calls["sent"].id, refused)], 0.0)
    assert call is calls["sent"]
    assert isinstance(error, AttnServeError)
    following = here.opened(0.0)
    message = sent(here, following)
    assert b"pinned" in message
    assert b"unsent" not in message
    here.asked_to_leave(stream, 0.0, others=True)
    assert here.writes(following), "it was another that was to be closed"
    (kept,) = calls_on(here, ("kept",)).values()
    here.asked_to_leave(following, 0.0, others=False)
    assert here.take_leaving() == []
    assert kept.owner.encode() in sent(here, here.opened(0.0))


def test_what_another_server_would_answer_sooner_goes_there_in_its_order(here: Multiplexer[str]) -> None:
    calls = calls_on(here, ("sent",))
    stream = here.opened(0.0)
    sent(here, stream)
    calls |= calls_on(here, ("first", "pinned", "second", "third"), pinned=("pinned",))
    calls |= calls_on(here, ("urgent",))
    asked = []

    def excess() -> int:
        asked.append(len(here))
        return 3

    assert here.tick(LOOK_S / 2, others=True, excess=excess) == []
    assert not asked, "the connection may take them in a moment"
    assert here.tick(2 * LOOK_S, others=True, excess=excess) == []
    assert here.take_leaving() == [calls["first"], calls["second"], calls["third"]]
    assert here.tick(2.5 * LOOK_S, others=True, excess=excess) == []
    assert here.tick(4 * LOOK_S, others=True, excess=excess) == []
    assert here.take_leaving() == [calls["urgent"]]
    assert asked == [6, 3]
    assert b"pinned" in sent(here, stream)
    assert len(here) == 2


def test_without_others_nobody_looks(here: Multiplexer[str]) -> None:
    calls_on(here, ("ready",))
    assert here.wakeup == 9.0, "its deadline"
    alike: Multiplexer[str] = Alone(RetryPolicy(2), replica_of("here"), others=lambda: True)
    calls_on(alike, ("ready",))
    assert alike.wakeup == LOOK_S


def test_a_server_that_says_nothing_in_a_calls_time_is_taken_to_hang(here: Multiplexer[str]) -> None:
    replica = replica_of("hangs")
    silent: Multiplexer[str] = Alone(RetryPolicy(2), replica)
    calls = calls_on(silent, ("answered", "late"))
    stream = silent.opened(0.0)
    sent(silent, stream)
    silent.resolve(stream, [Reply(calls["answered"].id, DONE)], 5.0)
    assert len(silent.tick(9.0)) == 1
    assert replica.rests_until == 0, "it has answered another in that time"
    silent.add(Call("unsent", 15, [b"unsent"], 1, 9.5, 0.4), 9.5)
    assert len(silent.tick(9.9)) == 1
    assert replica.rests_until == 0, "it was not asked"
    silent.add(Call("unheard", 15, [b"unheard"], 1, 10.0, 2.0), 10.0)
    sent(silent, stream)
    assert len(silent.tick(12.0)) == 1
    assert replica.rests_until > 12.0


def test_who_leaves_takes_everything_along_that_was_not_sent(here: Multiplexer[str]) -> None:
    calls = calls_on(here, ("waiting", "sent"))
    stream = here.opened(0.0)
    sent(here, stream)
    here.resolve(stream, [Reply(calls["waiting"].id, UNAVAILABLE)], 0.0)
    calls |= calls_on(here, ("ready",))
    ids = {calls["ready"].id, calls["waiting"].id}
    here.leave()
    assert {call.owner for call in here.take_leaving()} == {"waiting", "ready"}
    assert len(here) == 1
    # A call that has left gets an id on its next server, which is another call's id here.
    calls["ready"].id = calls["waiting"].id = calls["sent"].id
    assert here.tick(1.0) == []
    stream = here.opened(0.0)
    assert sent(here, stream) == b""
    assert ids
    ((_, error),) = here.close()
    assert isinstance(error, AttnServeError)


def test_who_leaves_has_what_was_refused_wait(here: Multiplexer[str]) -> None:
    """For as long as the server said."""
    calls = calls_on(here, ("refused", "later"))
    stream = here.opened(0.0)
    sent(here, stream)
    assert here.resolve(stream, [Reply(calls["refused"].id, full(1))], 0.0) == []
    assert here.resolve(stream, [Reply(calls["later"].id, full(3))], 0.0) == []
    here.leave()
    assert here.take_leaving() == []
    assert 1.0 <= here.wakeup <= 2.0
    assert here.tick(0.9, others=True) == []
    assert here.take_leaving() == []
    assert here.tick(2.0, others=True) == []
    assert here.take_leaving() == [calls["refused"]]
    assert here.tick(5.0, others=True) == []
    assert here.take_leaving() == [calls["later"]]


def test_a_call_that_cannot_be_moved_fails() -> None:
    """Nothing else would ever end it."""

    class Closed:
        others = others_answer = excess = bool

        def connection(self, avoid: str | None) -> NoReturn:
            raise ClientClosedError

    class Caller:
        outcome: Any = None

        def settle(self, outcome: Any) -> None:
            self.outcome = outcome

    servers: Any = Closed()
    others_of(servers, cast(Any, None)).move(Call(caller := Caller(), 15, [b"call"], 4, 0.0, None))
    assert isinstance(caller.outcome, ClientClosedError)
