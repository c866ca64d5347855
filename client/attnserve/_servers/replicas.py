"""Several equivalent servers: which one a call goes to.

In: the current addresses, and the successes and failures of each server. Out: the connection for the next call.

- A call goes to the server with the fewest calls in flight; if several have equally few, they take turns.
- While there is another, a server that has just failed gets no calls: it rests. Nor does one that has just refused a
  call, until it should have room.
- A server whose pool was full gets new caches only if there is no other.
- A call on a cache goes to the server that holds the cache.

No I/O, but a lock: the owner provides the functions that open and close connections.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from attnserve._errors import ClientClosedError
from attnserve._servers.room import Room

FIRST_REST: Final = 0.5
LONGEST_REST: Final = 30.0
"""How long a server that failed is left alone, in seconds: twice as long every time, from the first to the longest."""

FORGET_AFTER: Final = 60.0
"""For how many seconds an unused connection is kept once its server is no longer listed: the server may hold caches. A
connection that was replaced by a new one is kept as long, for callers who have just been given it.
"""


class Replica:
    """The observed state of one server."""

    __slots__ = (
        "_failed_at",
        "_failures",
        "_leaves_until",
        "_look",
        "_was_silent",
        "address",
        "heard",
        "rests_until",
        "room",
        "used",
    )

    def __init__(self, address: str, look_up: Callable[[], object]) -> None:
        """`look_up` is called when there may be other servers now."""
        self.address: Final = address
        self._look = look_up
        self._failures = 0
        """How many rests it has begun since it last answered; each is twice as long as the one before."""
        self._failed_at = 0.0
        self._leaves_until = 0.0
        """Until when it is left alone because it asked for that."""
        self._was_silent = False
        """Whether its last failure was silence: it may be there, and only slow for a moment."""
        self.heard = 0.0
        """When the last call to it ended, in seconds of `time.monotonic`, as far as that was noted."""
        self.rests_until = 0.0
        """Until when other servers are preferred, in seconds of `time.monotonic`."""
        self.room: Final = Room()
        """What it says of its room. Of the servers that do not rest, those that may have room are preferred: a full one
        refuses calls so fast that it would seem to be the least busy.
        """
        self.used = 0
        """The number of the last call that it was chosen for; numbers grow from call to call."""

    def failed(self, now: float) -> None:
        """Notes that the server is unreachable, or takes no calls."""
        self._failed_at = now
        self._was_silent = False
        self._begin_rest(now)

    def _begin_rest(self, now: float) -> None:
        self.heard = now
        if now < self.rests_until:  # all calls that were in flight report the same failure
            return
        self.rests_until = now + min(LONGEST_REST, FIRST_REST * 2.0 ** min(self._failures, 30))
        self._failures += 1
        self._look()

    def asks_to_leave(self, now: float) -> None:
        """Notes that the server takes calls, but prefers not to get any."""
        self._leaves_until = now + FIRST_REST
        self.rests_until = max(self.rests_until, self._leaves_until)
        self._look()

    def was_silent(self, now: float, begin: float) -> None:
        """Notes that a call that began at `begin` has had no reply in its time. If the server has answered nothing else
        since then, it may hang, and rests.
        """
        if self.heard < begin:
            self._was_silent = self._was_silent or now >= self.rests_until
            self._begin_rest(now)

    def rest(self, now: float) -> int:
        """How much others are preferred: 0 if not at all, 1 because it was silent, 2 because it failed otherwise or
        asks to be left alone. There are two degrees of rest because a server that is out of reach fails so fast that,
        among those that rest, it would always seem to be the least busy.
        """
        if self.rests_until <= now:
            return 0
        return 1 if self._was_silent and self._leaves_until <= now else 2

    @property
    def is_failing(self) -> bool:
        """Whether it failed, and has not answered since."""
        return self._failures > 0

    def worked(self, now: float, begin: float) -> None:
        """Notes that the server has answered on a stream, or to a unary call, that began at `begin`. If that was after
        its last failure, or if the failure was silence, it is there again and rests no longer. Otherwise, while it
        rests, this changes nothing: the reply may have been on its way already when the server failed.
        """
        self.heard = now
        if self._failures and (self._was_silent or begin > self._failed_at or now >= self.rests_until):
            self._failures = 0
            self._was_silent = False
            self.rests_until = self._leaves_until


class Connection(Protocol):
    """The connection to one server."""

    @property
    def replica(self) -> Replica:
        """The server."""

    @property
    def in_flight(self) -> int:
        """How many calls the server has not answered."""

    @property
    def holds(self) -> bool:
        """Whether calls wait here until the server has room."""

    def leave(self) -> None:
        """Moves its calls to other servers, except those that have been sent or that only this server can answer."""


C = TypeVar("C", bound=Connection)


def _nowhere() -> None:
    """For addresses that are not looked up."""


class Replicas(Generic[C]):
    """The servers of one client. Any thread may use this; connections are opened in the calling thread."""

    def __init__(self, connect: Callable[[Replica], C], dispose: Callable[[C], object]) -> None:
        """`connect` makes a connection; `dispose` closes one that is no longer used."""
        self._connect = connect
        self._dispose = dispose
        self._lock = threading.Lock()
        self._rotation: list[C] = []
        self.only: C | None = None
        """The connection for every call, if there is only one server."""
        self._connections: dict[str, C] = {}
        self._last_used: dict[str, float] = {}
        self._replaced: list[tuple[float, C]] = []
        self._calls = itertools.count(1)
        self._closed = False
        self.look_up: Callable[[], object] = _nowhere
        """Has the addresses looked up soon, because there may be other servers now."""

    @property
    def addresses(self) -> list[str]:
        """The addresses of the current servers."""
        return [connection.replica.address for connection in self._rotation]

    def others(self, connection: C) -> bool:
        """Whether a call could be made on another connection."""
        return any(other is not connection for other in self._rotation)

    def others_answer(self, connection: C, now: float) -> bool:
        """Whether one of the other servers should answer, by all that is known."""
        return any(
            other.replica.address != connection.replica.address and _should_answer(other, now)
            for other in self._rotation
        )

    def excess(self, connection: C, now: float) -> int:
        """How many calls of a connection other servers would answer sooner, as far as is known: half of the calls that
        it has more in flight than the least busy server that should answer.
        """
        free = [other.in_flight for other in self._rotation if _should_answer(other, now)]
        return max(0, connection.in_flight - min(free)) // 2 if free else 0

    def update(self, addresses: Iterable[str], now: float) -> None:
        """Takes over the current list of servers. An empty list is ignored."""
        wanted = list(dict.fromkeys(addresses))
        if not wanted:
            return
        with self._lock:
            before = self._rotation
            self._rotation = [self._open(address) for address in wanted]
            self.only = self._rotation[0] if len(wanted) == 1 else None
            gone = [connection for connection in before if connection.replica.address not in wanted]
            for connection in gone:
                self._last_used[connection.replica.address] = now
            forgotten = self._forget(now)
        for connection in gone:
            connection.leave()
        for connection in forgotten:
            self._dispose(connection)

    def renew(self, now: float) -> None:
        """Replaces every connection with a new one. Calls in flight finish on the old ones, which `retire` closes."""
        with self._lock:
            if self._closed:
                return
            replaced = list(self._connections.values())
            self._replaced += [(now, connection) for connection in replaced]
            self._connections = {}
            self._rotation = [self._open(connection.replica.address) for connection in self._rotation]
            self.only = self._rotation[0] if len(self._rotation) == 1 else None
        for connection in replaced:
            connection.leave()

    @property
    def lingering(self) -> bool:
        """Whether there are connections that were replaced, or that only calls on caches use: `retire` closes them."""
        return bool(self._replaced) or len(self._connections) > len(self._rotation)

    def retire(self, now: float) -> bool:
        """Closes lingering connections that no caller can still hold. Returns whether any are left."""
        with self._lock:
            forgotten = self._forget(now)
            left = self.lingering
        for connection in forgotten:
            self._dispose(connection)
        return left

    def _forget(self, now: float) -> list[C]:
        """Takes out the lingering connections that have not been used for long; they are to be closed. The lock must be
        held.
        """
        listed = set(self.addresses)
        unlisted = [
            (max(self._last_used.get(address, now), connection.replica.heard), connection)
            for address, connection in self._connections.items()
            if address not in listed
        ]
        forgotten = [
            connection
            for since, connection in (*self._replaced, *unlisted)
            if now - since >= FORGET_AFTER and not connection.in_flight
        ]
        self._replaced = [(since, each) for since, each in self._replaced if each not in forgotten]
        self._connections = {address: each for address, each in self._connections.items() if each not in forgotten}
        self._last_used = {address: at for address, at in self._last_used.items() if address in self._connections}
        return forgotten

    def choose(self, now: float, avoid: str | None) -> C:
        """The connection for a call that any server can answer. It is not the one at `avoid`, unless that is the only
        one, or the only one that does not rest. There must be at least one.
        """
        with self._lock:
            chosen = min(self._rotation, key=lambda connection: self._preference(connection, now, avoid))
            chosen.replica.used = next(self._calls)
        return chosen

    def choose_for_cache(self, tried: Collection[str], now: float) -> C | None:
        """The connection for making a cache that the servers at some addresses have not made; None if those are all."""
        with self._lock:
            others = [connection for connection in self._rotation if connection.replica.address not in tried]
            if not others:
                return None
            chosen = min(others, key=lambda connection: self._preference_for_cache(connection, now))
            chosen.replica.used = next(self._calls)
        return chosen

    def at(self, address: str, now: float) -> C:
        """The connection to one server. ClientClosedError if it would have to be opened, but the client is closed."""
        with self._lock:
            self._last_used[address] = now
            return self._open(address)

    def close(self) -> Sequence[C]:
        """All connections, to be closed. No other is opened any more."""
        with self._lock:
            self._closed = True
        return self.all()

    def all(self) -> Sequence[C]:
        """All connections, replaced ones included."""
        with self._lock:
            return [*self._connections.values(), *(connection for _, connection in self._replaced)]

    def _open(self, address: str) -> C:
        connection = self._connections.get(address)
        if connection is None:
            if self._closed:
                raise ClientClosedError
            replica = Replica(address, lambda: self.look_up())
            connection = self._connections[address] = self._connect(replica)
        return connection

    @staticmethod
    def _preference(connection: C, now: float, avoid: str | None = None) -> tuple[int, bool, bool, bool, int, int]:
        """The connection with the least of these is preferred. A server that has failed, and has not answered since,
        may get a new call, which finds out whether it is there again. A call that has failed itself (at `avoid`) rather
        goes to a server that is known to answer.
        """
        replica = connection.replica
        return (
            replica.rest(now),
            replica.address == avoid,
            avoid is not None and replica.is_failing,
            _is_full(connection, now),
            connection.in_flight,
            replica.used,
        )

    @staticmethod
    def _preference_for_cache(connection: C, now: float) -> tuple[object, ...]:
        """The same for a new cache. A server whose pool is full comes last of those that rest as much: it would make a
        cache, and refuse what is appended to it.
        """
        rests, *others = Replicas._preference(connection, now)
        return rests, connection.replica.room.pool_until > now, *others


def _should_answer(connection: Connection, now: float) -> bool:
    """Whether a server should answer, by all that is known: it neither rests, nor has failed and not answered since,
    nor is full.
    """
    replica = connection.replica
    return not (replica.rests_until > now or replica.is_failing or _is_full(connection, now))


def _is_full(connection: Connection, now: float) -> bool:
    """Whether a server has no room, as far as is known."""
    return connection.replica.room.until > now or connection.holds
