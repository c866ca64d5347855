"""Several servers that do the same: which one a call goes to.

In: the addresses that there are, and what is seen of each server. Out: the connection of the next call. The one with
the fewest calls in flight gets it, in turn where several have as few; one that has just failed rests. What a cache is
asked goes to the server that has it. Connections are opened and closed by whoever owns them: no I/O, but a lock.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, Protocol, TypeVar

FIRST_REST: Final = 0.5
LONGEST_REST: Final = 30.0
"""How long a server is left alone that failed, in seconds: twice as long every time, from the first to the longest."""

FORGET_AFTER: Final = 60.0
"""How long, in seconds, the connection of a server that is named no longer is kept without use: caches may be there.
One that has been made anew is kept as long, for who has just been given it.
"""


class Replica:
    """What is seen of one server."""

    __slots__ = ("_failures", "_told", "address", "rests_until", "used")

    def __init__(self, address: str, told: Callable[[], object] = bool) -> None:
        """`told` is called when it seems that there are other servers now."""
        self.address: Final = address
        self._told = told
        self._failures = 0
        self.rests_until = 0.0
        """Until when others are preferred, in seconds of `time.monotonic`."""
        self.used = 0
        """The number of its last call."""

    def failed(self, now: float) -> None:
        """It is not there, or takes no calls."""
        if now < self.rests_until:  # which all who were in flight say
            return
        self.rests_until = now + min(LONGEST_REST, FIRST_REST * 2.0 ** min(self._failures, 30))
        self._failures += 1
        self._told()

    def asks_to_leave(self, now: float) -> None:
        """It takes calls, but would rather not."""
        self.rests_until = max(self.rests_until, now + FIRST_REST)
        self._told()

    def worked(self, now: float) -> None:
        """It has answered."""
        if self._failures and now >= self.rests_until:
            self._failures = 0


class Connection(Protocol):
    """The connection to one server."""

    @property
    def replica(self) -> Replica:
        """The server."""

    @property
    def in_flight(self) -> int:
        """How many calls it has not answered."""

    def leave(self) -> None:
        """Has its calls made elsewhere, as far as they are not under way and not about what it alone has."""


C = TypeVar("C", bound=Connection)


class Replicas(Generic[C]):
    """The servers of one client. Any thread may use it; connections are opened in the thread that does."""

    def __init__(self, connect: Callable[[Replica], C], dispose: Callable[[C], object]) -> None:
        """`connect` makes a connection; `dispose` closes one that nobody uses any more."""
        self._connect = connect
        self._dispose = dispose
        self._lock = threading.Lock()
        self._rotation: list[C] = []
        self.only: C | None = None
        """The connection of every call, where there is one server."""
        self._connections: dict[str, C] = {}
        self._last_used: dict[str, float] = {}
        self._replaced: list[tuple[float, C]] = []
        self._calls = itertools.count(1)
        self.told: Callable[[], object] = bool
        """Called when it seems that there are other servers now."""

    @property
    def addresses(self) -> list[str]:
        """Where there are servers."""
        return [connection.replica.address for connection in self._rotation]

    def others(self, connection: C) -> bool:
        """Whether a call could be made on another connection."""
        return any(other is not connection for other in self._rotation)

    def update(self, addresses: Iterable[str], now: float) -> None:
        """Takes notice of which servers there are. That there are none is not believed."""
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
            forgotten = [
                connection
                for address, connection in self._connections.items()
                if address not in wanted
                and not connection.in_flight
                and now - self._last_used.get(address, now) > FORGET_AFTER
            ]
            for connection in forgotten:
                del self._connections[connection.replica.address]
                self._last_used.pop(connection.replica.address, None)
        for connection in gone:
            connection.leave()
        for connection in forgotten:
            self._dispose(connection)

    def renew(self, now: float) -> None:
        """Has every connection made anew. Calls in flight end on those that there are, until `retire` closes them."""
        with self._lock:
            replaced = list(self._connections.values())
            self._replaced += [(now, connection) for connection in replaced]
            self._connections = {}
            self._rotation = [self._open(connection.replica.address) for connection in self._rotation]
            self.only = self._rotation[0] if len(self._rotation) == 1 else None
        for connection in replaced:
            connection.leave()

    def retire(self, now: float) -> bool:
        """Closes connections that were made anew, if nobody can have them in hand any more. Whether some are left."""
        with self._lock:
            idle = [
                (since, each) for since, each in self._replaced if now - since >= FORGET_AFTER and not each.in_flight
            ]
            self._replaced = [each for each in self._replaced if each not in idle]
            left = bool(self._replaced)
        for _, connection in idle:
            self._dispose(connection)
        return left

    def choose(self, now: float) -> C:
        """The connection for a call that any server can answer. There must be one."""
        rotation = self._rotation
        if len(rotation) == 1:
            return rotation[0]
        with self._lock:
            chosen = min(rotation, key=lambda connection: self._preference(connection, now))
            chosen.replica.used = next(self._calls)
        return chosen

    def at(self, address: str, now: float) -> C:
        """The connection to one server."""
        with self._lock:
            self._last_used[address] = now
            return self._open(address)

    def all(self) -> Sequence[C]:
        """Every connection, to be closed."""
        with self._lock:
            return [*self._connections.values(), *(connection for _, connection in self._replaced)]

    def _open(self, address: str) -> C:
        connection = self._connections.get(address)
        if connection is None:
            replica = Replica(address, lambda: self.told())
            connection = self._connections[address] = self._connect(replica)
        return connection

    @staticmethod
    def _preference(connection: C, now: float) -> tuple[bool, int, int]:
        replica = connection.replica
        return replica.rests_until > now, connection.in_flight, replica.used
