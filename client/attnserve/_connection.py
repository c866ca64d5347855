"""A connection to one server, all but its I/O: the streams on it, its unary methods, and how many calls are in flight.

In: a server and gRPC's channel to it, and what makes a stream. Out: what a call travels on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from attnserve._config import Settings
from attnserve._replicas import Replica


class Stream(Protocol):
    """What a connection must know of a stream on it."""

    def __len__(self) -> int:
        """How many calls are in flight."""

    def leave(self) -> None:
        """Has the calls that have not been sent made elsewhere."""


S = TypeVar("S", bound=Stream)


class BaseConnection(Generic[S]):
    """The channel to one server and the streams on it."""

    def __init__(self, settings: Settings, replica: Replica, channel: Any, open_stream: Callable[[], S]) -> None:
        self.replica: Final = replica
        """The server."""
        self.unary: Final[set[object]] = set()
        """The calls by themselves that it has not answered."""
        self._channel = channel
        self._methods: dict[str, Any] = {}
        self._streams: Sequence[S] = [
            open_stream() for _ in range(settings.streams if settings.transport == "stream" else 0)
        ]

    @property
    def in_flight(self) -> int:
        """How many calls the server has not answered."""
        return sum(map(len, self._streams)) + len(self.unary)

    def stream(self) -> S:
        """What a call travels on."""
        return self._streams[0] if len(self._streams) == 1 else min(self._streams, key=len)

    def method(self, path: str) -> Any:
        """A unary method."""
        method = self._methods.get(path)
        if method is None:
            method = self._methods[path] = self._channel.unary_unary(path, None, None)
        return method

    def leave(self) -> None:
        """Has calls on streams made elsewhere, as far as they have not been sent."""
        for stream in self._streams:
            stream.leave()
