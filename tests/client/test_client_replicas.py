"""Which server a call goes to: resolving addresses, the choice, and calls that move from one server to another."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status

from attnserve import TLS, AsyncClient, Client, UnavailableError
from attnserve._errors import AttnServeError, OverloadedError
from attnserve._requests.reply import Reply
from attnserve._servers.replicas import FIRST_REST, FORGET_AFTER, LONGEST_REST, Replica, Replicas
from attnserve._settings.config import Settings
from attnserve._settings.retry import RetryPolicy
from attnserve._settings.targets import look_up, target_of
from attnserve._transports.in_flight import Call
from attnserve._transports.multiplexer import Multiplexer

UNAVAILABLE = Status(code=14, message="draining")


class Connected:
    """A connection that records the requests made to it."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.in_flight = 0
        self.left = False

    def leave(self) -> None:
        self.left = True


class Fleet:
    """Replicas, and the connections that they gave up."""

    def __init__(self, *addresses: str) -> None:
        self.disposed: list[str] = []
        self.replicas: Replicas[Connected] = Replicas(
            Connected, lambda gone: self.disposed.append(gone.replica.address)
        )
        self.replicas.update(addresses, 0.0)

    def choose(self, count: int, now: float = 0.0) -> list[str]:
        return [self.replicas.choose(now).replica.address for _ in range(count)]

    def at(self, address: str, now: float = 0.0) -> Connected:
        return self.replicas.at(address, now)


def test_idle_servers_take_turns_and_busy_ones_get_less() -> None:
    fleet = Fleet("a", "b", "c")
    assert sorted(fleet.choose(3)) == ["a", "b", "c"]
    assert fleet.choose(6) == fleet.choose(3) * 2
    fleet.at("b").in_flight = 2
    fleet.at("c").in_flight = 1
    assert fleet.choose(4) == ["a"] * 4


def test_one_server_is_the_only_choice() -> None:
    fleet = Fleet("a")
    assert fleet.replicas.only is fleet.at("a")
    fleet.at("a").replica.failed(0.0)
    assert fleet.choose(2) == ["a", "a"]
    fleet.replicas.update(["a", "b"], 0.0)
    assert fleet.replicas.only is None


def test_a_server_that_fails_rests_longer_every_time_until_it_works() -> None:
    fleet = Fleet("a", "b")
    replica, now = fleet.at("a").replica, 0.0
    rest = FIRST_REST
    for _ in range(10):
        replica.failed(now)
        replica.failed(now)  # the same failure, reported by another call
        replica.worked(now)  # a reply that was on its way
        assert set(fleet.choose(3, now + 0.99 * rest)) == {"b"}
        now += rest
        assert "a" in fleet.choose(3, now)
        rest = min(LONGEST_REST, 2 * rest)
    replica.worked(now)
    replica.failed(now)
    assert "a" in fleet.choose(3, now + FIRST_REST)


def test_a_server_that_asks_to_leave_rests_once_and_no_shorter_than_it_did() -> None:
    fleet = Fleet("a", "b")
    replica = fleet.at("a").replica
    replica.asks_to_leave(10.0)
    assert set(fleet.choose(3, 10.0 + 0.99 * FIRST_REST)) == {"b"}
    assert "a" in fleet.choose(2, 10.0 + FIRST_REST)
    now = 20.0
    for _ in range(3):
        replica.failed(now)
        now = replica.rests_until
    rested = replica.rests_until = now + 4 * FIRST_REST
    replica.asks_to_leave(now)
    assert replica.rests_until == rested


def test_where_all_rest_the_calls_go_on() -> None:
    fleet = Fleet("a", "b")
    for address in ("a", "b"):
        fleet.at(address).replica.failed(0.0)
    assert sorted(fleet.choose(2)) == ["a", "b"]


def test_servers_come_and_go() -> None:
    fleet = Fleet("a", "b")
    told = []
    fleet.replicas.told = lambda: told.append(True)
    gone = fleet.at("a")
    fleet.replicas.update(["b", "c", "c"], 1.0)
    assert set(fleet.choose(4)) == {"b", "c"}
    assert gone.left
    assert fleet.replicas.others(gone)
    assert fleet.at("a", 2.0) is gone, "a cache may be there"
    fleet.replicas.update([], 3.0)
    assert fleet.replicas.addresses == ["b", "c"], "that there are none is not believed"
    gone.in_flight = 1
    fleet.replicas.update(["b", "c"], 2.0 + 2 * FORGET_AFTER)
    assert fleet.disposed == []
    gone.in_flight = 0
    fleet.replicas.update(["b", "c"], 2.0 + 2 * FORGET_AFTER)
    assert fleet.disposed == ["a"]
    assert fleet.at("a") is not gone
    assert told == []
    gone.replica.failed(0.0)
    fleet.at("b").replica.asks_to_leave(9.0)
    assert told == [True, True]


def test_a_server_is_forgotten_when_it_is_gone_and_was_not_used_for_long() -> None:
    fleet = Fleet("a", "b")
    fleet.at("a", 100.0)
    fleet.at("b", 100.0)
    fleet.replicas.update(["a"], 100.0 + 2 * FORGET_AFTER)
    assert fleet.disposed == [], "it was there until now"
    fleet.at("b", 101.0 + 2 * FORGET_AFTER)
    fleet.replicas.update(["a"], 100.5 + 3 * FORGET_AFTER)
    assert fleet.disposed == [], "it was used since"
    fleet.replicas.update(["a"], 102.0 + 3 * FORGET_AFTER)
    assert fleet.disposed == ["b"]


def test_connections_that_are_made_anew() -> None:
    """The old ones finish their calls, and are closed once nobody can be using them."""
    fleet = Fleet("a", "b")
    first = fleet.at("a")
    first.in_flight = 1
    fleet.replicas.renew(1.0)
    assert first.left
    assert fleet.at("a") is not first
    assert sorted(fleet.choose(2)) == ["a", "b"]
    assert fleet.replicas.others(first)
    assert fleet.replicas.only is None
    assert len(fleet.replicas.all()) == 4, "all are closed with the client"
    assert fleet.replicas.retire(0.5 + FORGET_AFTER)
    assert fleet.disposed == []
    assert fleet.replicas.retire(1.0 + FORGET_AFTER)
    assert fleet.disposed == ["b"], "a call is in flight on the other"
    first.in_flight = 0
    assert not fleet.replicas.retire(2.0 + FORGET_AFTER)
    assert fleet.disposed == ["b", "a"]
    assert not fleet.replicas.retire(3.0 + FORGET_AFTER)
    for now in (2.0, 3.0):
        fleet.replicas.renew(now)
    assert fleet.replicas.retire(2.0 + FORGET_AFTER)
    assert sorted(fleet.disposed) == ["a", "a", "b", "b"]
    assert len(fleet.replicas.all()) == 4


def test_the_only_server_is_connected_to_anew() -> None:
    fleet = Fleet("a")
    first = fleet.at("a")
    fleet.replicas.renew(1.0)
    assert fleet.replicas.only is fleet.at("a") is not first


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
        multiplexer.add(call)
    return made


def sent(multiplexer: Multiplexer[str], stream: int) -> bytes:
    return b"".join(multiplexer.next_message(stream, 0.0) or ())


@pytest.fixture
def here() -> Multiplexer[str]:
    return Multiplexer(RetryPolicy(2, random=lambda: 1.0), Replica("here"))


def test_what_is_tried_again_is_tried_elsewhere(here: Multiplexer[str]) -> None:
    calls = calls_on(here, ("free", "pinned"), pinned=("pinned",))
    stream = here.opened()
    assert sent(here, stream)
    for call in calls.values():
        assert here.resolve(stream, [Reply(call.id, UNAVAILABLE)], 0.0) == []
    here.opened()
    assert here.tick(1.0, others=True) == []
    assert here.take_leaving() == [calls["free"]]
    assert here.take_leaving() == []
    assert b"pinned" in sent(here, 2)
    there: Multiplexer[str] = Multiplexer(RetryPolicy(2), Replica("there"))
    calls_on(there, ("another",))
    there.add(calls["free"])
    assert b"free" in sent(there, there.opened())
    assert calls["free"].attempts == 1


def test_without_others_it_stays(here: Multiplexer[str]) -> None:
    (call,) = calls_on(here, ("free",)).values()
    stream = here.opened()
    sent(here, stream)
    here.resolve(stream, [Reply(call.id, UNAVAILABLE)], 0.0)
    assert here.tick(1.0) == []
    assert here.take_leaving() == []
    assert b"free" in sent(here, here.opened())


def test_a_stream_that_is_asked_to_close_is_owed_its_replies(here: Multiplexer[str]) -> None:
    calls = calls_on(here, ("sent",))
    stream = here.opened()
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
    following = here.opened()
    message = sent(here, following)
    assert b"pinned" in message
    assert b"unsent" not in message
    here.asked_to_leave(stream, 0.0, others=True)
    assert here.writes(following), "it was another that was to be closed"


def test_who_leaves_takes_everything_along_that_was_not_sent(here: Multiplexer[str]) -> None:
    calls = calls_on(here, ("waiting", "sent"))
    stream = here.opened()
    sent(here, stream)
    here.resolve(stream, [Reply(calls["waiting"].id, UNAVAILABLE)], 0.0)
    calls |= calls_on(here, ("ready",))
    ids = {calls["ready"].id, calls["waiting"].id}
    here.leave()
    assert {call.owner for call in here.take_leaving()} == {"waiting", "ready"}
    assert len(here) == 1
    # A call that has left gets an id on its next server, which is another call's id here.
    calls["ready"].id = calls["sent"].id
    stream = here.opened()
    assert sent(here, stream) == b""
    assert ids
    ((_, error),) = here.close()
    assert isinstance(error, AttnServeError)


def test_who_leaves_has_what_was_refused_wait(here: Multiplexer[str]) -> None:
    """For as long as the server said, and then for the shared retry budget."""
    calls = calls_on(here, ("refused", "later"))
    stream = here.opened()
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
    while here._policy.budget.take(2.0):
        pass
    ((call, error),) = here.tick(5.0, others=True)
    assert call is calls["later"]
    assert isinstance(error, OverloadedError)
    assert here.take_leaving() == []


def test_what_addresses_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert target_of("host:1").fixed == ("host:1",)
    assert target_of("unix:/run/a.sock").fixed == ("unix:/run/a.sock",)
    assert target_of("ipv4:127.0.0.1:1,127.0.0.1:2").fixed == ("127.0.0.1:1", "127.0.0.1:2")
    assert target_of("ipv6:///%5B::1%5D:1,%5B::2%5D:2").fixed == ("[::1]:1", "[::2]:2")
    assert target_of("dns://8.8.8.8/name:1").fixed == ("dns://8.8.8.8/name:1",), "its own DNS server is gRPC's to ask"
    assert target_of(["a:1", "b:2"]).fixed == ("a:1", "b:2")
    assert target_of(lambda: ["a:1"]).look_up is not None
    named = target_of("dns:///attnserve.example:8001")
    assert named.fixed == ()
    assert named.authority == "attnserve.example"

    def three(host: str, port: int, **options: Any) -> list[Any]:
        assert (host, port) == ("attnserve.example", 8001)
        places = [("10.0.0.2", port), ("10.0.0.1", port), ("10.0.0.1", port), ("fd00::1", port, 0, 0)]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

    monkeypatch.setattr(socket, "getaddrinfo", three)
    assert named.look_up is not None
    assert named.look_up() == ["10.0.0.1:8001", "10.0.0.2:8001", "[fd00::1]:8001"]
    for wrong in ("", [], ["a:1", ""]):
        with pytest.raises(ValueError, match="address"):
            target_of(wrong)


def test_localhost_is_looked_up() -> None:
    assert "127.0.0.1:5" in look_up("localhost", 5)


def test_a_name_that_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*arguments: Any, **options: Any) -> list[Any]:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nothing)
    with Client("dns:///attnserve.invalid:1") as client:
        with pytest.raises(UnavailableError, match=r"attnserve\.invalid.*not known"):
            client.attend([[1.0]], [[1.0]], [[1.0]])  # type: ignore[type-var]
        with pytest.raises(UnavailableError, match="not known"):
            client.server_info()
    with Client(list) as client, pytest.raises(UnavailableError, match="no server"):
        client.server_info()


def without_a_port() -> list[str]:
    return ["localhost"]


def with_an_error() -> list[str]:
    raise KeyError("replicas")


def nothing_at_all() -> Any:
    return None


@pytest.mark.parametrize("transport", ["stream", "unary"])
@pytest.mark.parametrize(
    ("function", "text"),
    [
        (without_a_port, "without_a_port: .*address: expected host:port"),
        (with_an_error, r"with_an_error: KeyError\('replicas'\)"),
        (nothing_at_all, "nothing_at_all: TypeError"),
    ],
)
async def test_a_function_that_returns_no_addresses(transport: Any, function: Any, text: str) -> None:
    """Calls fail with an error that names it, whichever the client and the transport."""
    with Client(function, transport=transport) as client:
        for ask in (lambda: client.attend(*[np.ones((1, 1), np.float32)] * 3), client.server_info):
            with pytest.raises(UnavailableError, match=text):
                ask()
    async with AsyncClient(function, transport=transport) as in_tasks:
        with pytest.raises(UnavailableError, match=text):
            await in_tasks.attend(*[np.ones((1, 1), np.float32)] * 3)


def test_a_function_may_return_a_single_address() -> None:
    target = target_of(lambda: "host:1")
    assert target.look_up is not None
    assert target.look_up() == ("host:1",)


def test_what_was_looked_up_must_prove_to_be_who_was_meant() -> None:
    settings = Settings("dns:///attnserve.example:8001", "stream", None, 3, 1, (), TLS())
    assert dict(settings.channel_options("10.0.0.1:8001"))["grpc.ssl_target_name_override"] == "attnserve.example"
    assert "grpc.ssl_target_name_override" not in dict(settings.channel_options("pod-0.attnserve:8001"))
