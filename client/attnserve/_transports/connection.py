"""A connection to one server, except for its I/O: its streams, its unary methods, and how many calls are in flight.

In: a server, and what the client knows of all servers. Out: the stream or method that a call travels on.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, ClassVar, Final, Generic, Protocol, Self, TypeVar

import grpc

from attnserve._errors import ClientClosedError
from attnserve._requests.call import EncodedCall
from attnserve._servers.replicas import Replica
from attnserve._servers.servers import Servers
from attnserve._settings.config import ANYHOW, Settings
from attnserve._settings.credentials import Bearer
from attnserve._settings.retry import RetryPolicy
from attnserve._tracing import CallSpan
from attnserve._transports.in_flight import Call
from attnserve._transports.multiplexer import Multiplexer


@dataclass(frozen=True, slots=True)
class Others:
    """The other servers of a client, as one of its connections sees them."""

    exist: Callable[[], bool]
    """Whether there are any that could answer."""
    answer: Callable[[], bool]
    """Whether there is one that should answer, by all that is known."""
    excess: Callable[[], int]
    """How many of the connection's calls they would answer sooner."""
    move: Callable[[Call[Any]], object]
    """Moves a call to one of them."""


class Waiter(Protocol):
    """The future of a call on a stream."""

    span: CallSpan | None

    def settle(self, outcome: Any, /) -> None:
        """Takes the outcome of the call."""


W = TypeVar("W", bound=Waiter)


class BaseStream(ABC, Generic[W]):
    """Calls over one stream at a time, with any number in flight."""

    def __init__(self, policy: RetryPolicy, bearer: Bearer, replica: Replica, others: Others) -> None:
        self._bearer: Final = bearer
        self._multiplexer: Final[Multiplexer[W]] = Multiplexer(policy, replica, others)
        self._others: Final = others
        self._watched = inf
        """When `Multiplexer.tick` is going to be called, by what is scheduled."""
        self._closed = False

    def __len__(self) -> int:
        """How many calls are in flight."""
        return len(self._multiplexer)

    @property
    def holds(self) -> bool:
        """Whether calls wait here until the server has room."""
        return self._multiplexer.holds

    def submit(self, future: W, encoded: EncodedCall[Any], *, pinned: bool) -> None:
        """Sends a call; if pinned, no other server can answer it. The future is settled when the outcome is known."""
        self.adopt(Call.of(future, encoded, time.monotonic(), span=future.span, pinned=pinned))

    @abstractmethod
    def adopt(self, call: Call[W]) -> None:
        """Takes over a call, and sends it. It may have been tried elsewhere; it is not sent if its caller gave it up in
        between. ClientClosedError if this stream is closed.
        """

    @abstractmethod
    def leave(self) -> None:
        """Moves unsent calls to other servers, and ends the stream once all replies are in."""

    def _part_with(self, calls: Iterable[Call[W]]) -> None:
        """Moves calls to other servers. No lock may be held: their streams have locks of their own."""
        for call in calls:
            self._others.move(call)


S = TypeVar("S", bound=BaseStream[Any])
B = TypeVar("B", bound="BaseConnection[Any]")
R = TypeVar("R", covariant=True)


class Route(Protocol[R]):
    """Gives the connection for an attempt at a call."""

    def __call__(self, timeout: float | None, avoid: str | None, /) -> R:
        """Takes no more than `timeout` seconds, and avoids the server at the address `avoid` if there are others."""


def to_anyhow(route: Route[B]) -> Route[B]:
    """Turns the route of other calls into that of calls which a server is to get even while it starts or drains."""
    return lambda timeout, avoid: route(timeout, avoid).anyhow


class BaseConnection(ABC, Generic[S]):
    """The channel to one server and the streams on it."""

    library: ClassVar[Any]
    """The gRPC module that creates the channel."""

    def __init__(
        self,
        settings: Settings,
        credentials: grpc.ChannelCredentials | None,
        bearer: Bearer,
        replica: Replica,
        others: Callable[[Self], Others],
        anyhow: bool = False,
    ) -> None:
        """`others` returns the other servers, as the connection that it is given sees them. `anyhow` makes a connection
        like the one that the property `anyhow` describes.
        """
        self._options: Final = [*settings.channel_options(replica.address), *((ANYHOW,) if anyhow else ())]
        self._credentials: Final = credentials
        self.replica: Final = replica
        """The server."""
        self._others_of: Final[Callable[..., Others]] = others
        self.unary: set[object] = set()
        """The unary calls that it has not answered."""
        kind: Callable[..., Self] = type(self)
        self.for_work: Final = not anyhow
        """Whether a reply on it means that the server takes calls."""
        self._another: Final = partial(kind, settings, credentials, bearer, replica, others, True)
        self._anyhow: Self | None = None
        self._closed = False
        self._lock: Final = threading.Lock()
        self._channel = self._new_channel()
        self._methods: dict[str, Any] = {}
        self._streams: Sequence[S] = [
            self._new_stream(settings.policy, bearer, replica, self.others)
            for _ in range(settings.streams if settings.transport == "stream" and not anyhow else 0)
        ]

    @abstractmethod
    def _new_stream(self, policy: RetryPolicy, bearer: Bearer, replica: Replica, others: Others) -> S:
        """A stream on the channel; nothing is sent yet."""

    def _new_channel(self) -> Any:
        address, options = self.replica.address, self._options
        if self._credentials is None:
            return self.library.insecure_channel(address, options=options)
        return self.library.secure_channel(address, self._credentials, options=options)

    @property
    def anyhow(self) -> Self:
        """Another connection to the same server, for unary calls that it is to get even while it starts or drains. It
        is made when first asked for, since most clients never need it. ClientClosedError if this connection is closed:
        nobody would close the other.
        """
        with self._lock:
            if self._closed:
                raise ClientClosedError
            if self._anyhow is None:
                self._anyhow = self._another()
                self._anyhow.unary = self.unary
            return self._anyhow

    def _end(self) -> Self | None:
        """Notes that this connection is closed. Returns the one in `anyhow`, if it was made, to be closed as well."""
        with self._lock:
            self._closed = True
            return self._anyhow

    @property
    def others(self) -> Others:
        """The other servers, as this connection sees them."""
        return self._others_of(self)

    @property
    def in_flight(self) -> int:
        """How many calls the server has not answered."""
        return sum(map(len, self._streams)) + len(self.unary)

    @property
    def holds(self) -> bool:
        """Whether calls wait here until the server has room."""
        return any(stream.holds for stream in self._streams)

    def stream(self) -> S:
        """The stream with the fewest calls in flight."""
        return self._streams[0] if len(self._streams) == 1 else min(self._streams, key=len)

    def method(self, path: str) -> Any:
        """A unary method."""
        method = self._methods.get(path)
        if method is None:
            method = self._methods[path] = self._channel.unary_unary(path, None, None)
        return method

    def leave(self) -> None:
        """Moves the unsent calls of its streams to other servers."""
        for stream in self._streams:
            stream.leave()


def others_of(servers: Servers[B], connection: B) -> Others:
    """The other servers of a client, for one of its connections. What it returns must not keep the client alive."""

    def move(call: Call[Any]) -> None:
        try:
            servers.connection(avoid=call.avoid).stream().adopt(call)
        except Exception as error:  # any error: nothing else would tell the caller
            call.owner.settle(error)

    return Others(
        partial(servers.others, connection),
        partial(servers.others_answer, connection),
        partial(servers.excess, connection),
        move,
    )
