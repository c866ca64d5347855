"""Which of several servers a call goes to."""

from __future__ import annotations

from typing import Any

import pytest
from multiplexed import full

from attnserve import Client, ClientClosedError
from attnserve._errors import error_from_status
from attnserve._servers.replicas import FIRST_REST, FORGET_AFTER, LONGEST_REST, Replica, Replicas
from attnserve._servers.room import LONGEST


class Connected:
    """A connection that records the requests made to it."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.in_flight = 0
        self.holds = False
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
        return [self.replicas.choose(now, None).replica.address for _ in range(count)]

    def at(self, address: str, now: float = 0.0) -> Connected:
        return self.replicas.at(address, now)

    def refuse(self, address: str, now: float, delay: float) -> None:
        self.at(address).replica.room.refused(now, error_from_status(full("requests", delay)), 1)

    def fill_pool(self, address: str, now: float, delay: float) -> None:
        error = error_from_status(full("cache_bytes", delay, "CACHE_FULL"))
        self.at(address).replica.room.refused(now, error, 1)

    def choose_for_cache(self, now: float, *tried: str) -> str | None:
        chosen = self.replicas.choose_for_cache(tried, now)
        return None if chosen is None else chosen.replica.address


def test_idle_servers_take_turns_and_busy_ones_get_less() -> None:
    fleet = Fleet("a", "b", "c")
    assert sorted(fleet.choose(3)) == ["a", "b", "c"]
    assert fleet.choose(6) == fleet.choose(3) * 2
    fleet.at("b").in_flight = 2
    fleet.at("c").in_flight = 1
    assert fleet.choose(4) == ["a"] * 4


def test_which_servers_should_answer() -> None:
    fleet = Fleet("a", "b", "c")
    a, b = fleet.at("a"), fleet.at("b")
    assert fleet.replicas.others_answer(a, 0.0)
    b.replica.failed(0.0)
    assert fleet.replicas.others_answer(a, 0.0)
    fleet.at("c").replica.failed(0.0)
    assert not fleet.replicas.others_answer(a, 0.0)
    assert fleet.replicas.others_answer(b, 0.0)
    assert not fleet.replicas.others_answer(a, FIRST_REST), "nobody knows"
    b.replica.worked(FIRST_REST, FIRST_REST)
    assert fleet.replicas.others_answer(a, FIRST_REST)
    fleet.refuse("b", FIRST_REST, 1.0)
    assert not fleet.replicas.others_answer(a, FIRST_REST), "both are full or away"
    lone = Fleet("a")
    assert not lone.replicas.others_answer(Connected(Replica("a", lambda: None)), 0.0), "it is the same server"


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
        replica.worked(now, now - 1.0)  # a reply that was on its way
        assert set(fleet.choose(3, now + 0.99 * rest)) == {"b"}
        now += rest
        assert "a" in fleet.choose(3, now)
        rest = min(LONGEST_REST, 2 * rest)
    replica.worked(now, 0.0)
    replica.failed(now)
    assert "a" in fleet.choose(3, now + FIRST_REST)


def test_a_server_that_is_there_again_rests_no_longer() -> None:
    fleet = Fleet("a", "b")
    replica, now = fleet.at("a").replica, 10.0
    for _ in range(5):
        replica.failed(now)
        now = replica.rests_until
    begin = replica.rests_until - 1.0  # before it has rested, because there was no other
    replica.worked(begin + 0.1, begin)
    assert "a" in fleet.choose(2, begin + 0.1)
    replica.failed(begin + 0.2)
    assert "a" in fleet.choose(2, begin + 0.2 + FIRST_REST), "for as short a time as the first time"


def test_a_server_that_said_nothing_rests_until_it_answers() -> None:
    fleet = Fleet("a", "b")
    replica = fleet.at("a").replica
    replica.was_silent(10.0, 9.0)
    assert set(fleet.choose(3, 10.1)) == {"b"}
    replica.worked(10.2, 1.0)  # on the stream that it has had all the time
    assert "a" in fleet.choose(2, 10.2)


def test_silence_does_not_make_up_for_a_failure() -> None:
    fleet = Fleet("a", "b")
    replica = fleet.at("a").replica
    replica.failed(10.0)
    replica.was_silent(10.1, 10.05)
    replica.worked(10.2, 1.0)  # a reply that was on its way
    assert set(fleet.choose(3, 10.2)) == {"b"}
    replica.was_silent(20.0, 19.0)
    replica.failed(20.1)
    replica.worked(20.2, 1.0)
    assert set(fleet.choose(3, 20.2)) == {"b"}


def test_a_server_that_said_nothing_is_preferred_to_one_out_of_reach() -> None:
    fleet = Fleet("a", "b")
    fleet.at("a").replica.was_silent(10.0, 9.0)
    fleet.at("b").replica.failed(10.0)
    fleet.at("a").in_flight = 100
    assert set(fleet.choose(3, 10.1)) == {"a"}
    fleet.at("a").replica.asks_to_leave(10.1)
    assert set(fleet.choose(3, 10.1)) == {"b"}


def test_a_server_that_asks_to_leave_rests_though_it_answers() -> None:
    fleet = Fleet("a", "b")
    replica = fleet.at("a").replica
    replica.failed(10.0)
    replica.asks_to_leave(10.2)
    replica.worked(10.3, 10.1)
    assert set(fleet.choose(3, 10.19 + FIRST_REST)) == {"b"}
    assert "a" in fleet.choose(2, 10.21 + FIRST_REST)


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


def test_a_server_that_refused_gets_no_call_until_it_should_have_room() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.at("b").in_flight = fleet.at("c").in_flight = 5
    fleet.refuse("a", 10.0, 0.5)
    fleet.refuse("a", 10.1, 0.1)
    assert set(fleet.choose(4, 10.49)) == {"b", "c"}
    assert set(fleet.choose(4, 10.5)) == {"a"}
    fleet.refuse("a", 20.0, 1e6)
    fleet.at("b").replica.failed(20.0)
    fleet.at("c").replica.failed(20.0)
    assert set(fleet.choose(4, 20.1)) == {"a"}, "the others take no calls at all"
    fleet.refuse("b", 30.0, 2.0)
    fleet.refuse("c", 30.0, 1.0)
    fleet.refuse("a", 30.0, 1.0)
    assert set(fleet.choose(4, 30.5)) == {"a"}, "all are full"
    assert set(fleet.choose(4, 20.0 + LONGEST)) == {"a"}


def test_a_server_whose_pool_is_full_gets_no_new_caches_until_it_should_have_room() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.at("b").in_flight = fleet.at("c").in_flight = 5
    assert fleet.choose_for_cache(10.0) == "a"
    fleet.fill_pool("a", 10.0, 2.0)
    fleet.fill_pool("a", 10.0, 1.0)
    assert [fleet.choose_for_cache(11.9), fleet.choose_for_cache(11.9)] == ["b", "c"]
    assert fleet.choose_for_cache(11.9, "b", "c") == "a", "there is no other"
    assert fleet.choose_for_cache(11.9, "a", "b", "c") is None
    assert set(fleet.choose(4, 11.9)) == {"a"}, "it has room for other calls"
    assert fleet.choose_for_cache(12.0) == "a"
    fleet.fill_pool("a", 20.0, 1e6)
    fleet.refuse("b", 20.0, 1.0)
    fleet.refuse("c", 20.0, 1.0)
    assert fleet.choose_for_cache(20.5) == "b", "which has room for other calls soon"
    fleet.at("b").replica.failed(20.5)
    fleet.at("c").replica.failed(20.5)
    assert fleet.choose_for_cache(20.6) == "a", "it has no room in its pool, but answers"
    assert fleet.choose_for_cache(20.0 + LONGEST) == "a"


def test_a_server_is_avoided_by_a_call_that_failed_there() -> None:
    fleet = Fleet("a", "b")
    choose = fleet.replicas.choose
    fleet.at("b").in_flight = 5
    assert choose(0.0, "a").replica.address == "b"
    assert choose(0.0, "b").replica.address == "a"
    fleet.refuse("b", 0.0, 1.0)
    assert choose(0.5, "a").replica.address == "b", "it has not refused this call"
    fleet.at("b").replica.failed(0.0)
    assert choose(0.1, "a").replica.address == "a", "it is better than none"


def test_a_call_that_failed_goes_to_a_server_that_is_known_to_answer() -> None:
    """Others that failed are asked by new calls, once they have rested."""
    fleet = Fleet("a", "b", "c")
    for address in ("a", "b"):
        fleet.at(address).replica.failed(0.0)
    fleet.at("c").in_flight = 5
    rested = 2 * FIRST_REST
    assert set(fleet.choose(2, rested)) == {"a", "b"}
    assert fleet.replicas.choose(rested, avoid="a").replica.address == "c"
    fleet.at("b").replica.worked(rested, rested)
    assert fleet.replicas.choose(rested, avoid="a").replica.address == "b"


def test_what_others_would_answer_sooner_is_half_of_what_one_has_more() -> None:
    fleet = Fleet("a", "b", "c")
    busy = fleet.at("a")
    busy.in_flight, fleet.at("b").in_flight, fleet.at("c").in_flight = 100, 40, 11
    assert fleet.replicas.excess(busy, 0.0) == 44
    assert fleet.replicas.excess(fleet.at("c"), 0.0) == 0
    fleet.refuse("c", 0.0, 2.0)
    assert fleet.replicas.excess(fleet.at("c"), 1.0) == 0, "it is full, and yet has fewer than the others"
    assert fleet.replicas.excess(busy, 1.0) == 30
    fleet.at("b").replica.failed(1.0)
    assert fleet.replicas.excess(busy, 1.0) == 0, "neither is to be preferred"
    assert fleet.replicas.excess(busy, 2.5) == 44
    fleet.at("c").holds = True
    assert fleet.replicas.excess(busy, 2.5) == 0, "one may still be away, as far as is known"
    fleet.at("b").replica.worked(2.5, 2.5)
    assert fleet.replicas.excess(busy, 2.5) == 30
    fleet.at("b").replica.asks_to_leave(2.5)
    assert fleet.replicas.excess(busy, 2.5) == 0, "one is full, and the other prefers to get no calls"


def test_where_all_rest_the_calls_go_on() -> None:
    fleet = Fleet("a", "b")
    for address in ("a", "b"):
        fleet.at(address).replica.failed(0.0)
    assert sorted(fleet.choose(2)) == ["a", "b"]
    fleet.at("a").in_flight = 5
    assert fleet.replicas.choose(0.0, "b").replica.address == "a", "a call that has just failed at the other"


def test_servers_come_and_go() -> None:
    fleet = Fleet("a", "b")
    told = []
    fleet.replicas.look_up = lambda: told.append(True)
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
    assert not fleet.replicas._last_used, "nor is it remembered when that was used"
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


def test_a_server_that_was_never_listed_is_forgotten_when_it_was_not_used_for_long() -> None:
    """Whether or not there is another list."""
    fleet = Fleet("a")
    assert not fleet.replicas.lingering
    fleet.at("a", 0.0)
    assert not fleet.replicas.lingering
    home = fleet.at("home", 10.0)
    assert fleet.replicas.lingering
    assert fleet.replicas.retire(9.0 + FORGET_AFTER)
    fleet.at("home", 11.0).in_flight = 1
    assert fleet.replicas.retire(20.0 + FORGET_AFTER)
    home.in_flight = 0
    home.replica.worked(30.0 + FORGET_AFTER, 11.0)
    assert fleet.replicas.retire(40.0 + FORGET_AFTER), "an operation may be about to take its next step"
    home.replica.failed(50.0 + FORGET_AFTER)
    assert fleet.replicas.retire(40.0 + 2 * FORGET_AFTER)
    assert fleet.disposed == []
    assert not fleet.replicas.retire(50.0 + 2 * FORGET_AFTER)
    assert fleet.disposed == ["home"]
    assert not fleet.replicas.lingering
    assert fleet.at("home", 60.0 + 2 * FORGET_AFTER) is not home
    assert fleet.replicas.addresses == ["a"]


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


def test_a_closed_client_replaces_no_connection() -> None:
    fleet = Fleet("a", "b")
    closed = fleet.replicas.close()
    fleet.replicas.renew(1.0)
    assert fleet.replicas.all() == closed
    assert not any(connection.left for connection in closed)


@pytest.mark.parametrize("opens", ["at", "renew"])
def test_a_call_that_finds_a_client_open_opens_nothing_once_it_is_closed(
    opens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would close that."""
    client = Client(["127.0.0.1:1", "127.0.0.1:2"])
    servers = client._calls.servers
    listed = servers._replicas.all()
    usual = getattr(Replicas, opens)

    def close_first(replicas: Replicas[Any], *arguments: Any) -> Any:
        client.close()
        return usual(replicas, *arguments)

    monkeypatch.setattr(Replicas, opens, close_first)
    monkeypatch.setattr(servers, "_outdated", lambda: opens == "renew")
    with pytest.raises(ClientClosedError):
        servers.connection("127.0.0.1:3")
    assert servers._replicas.all() == listed
