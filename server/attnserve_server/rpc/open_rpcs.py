"""How many RPCs of a kind are open at a time: those of one caller, and of all. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from attnserve_server.errors import Overloaded
from attnserve_server.no_room import NoRoom, too_many_streams


class OpenRpcs:
    """Counts RPCs, mostly streams: so many of one caller at most, and so many of all if there is a bound on those."""

    def __init__(
        self,
        most_of_one: int,
        most_of_all: int | None = None,
        too_many: Callable[[int, bool], NoRoom] = too_many_streams,
    ) -> None:
        """`too_many` says what one more is told: it has the bound, and whether that is the bound of all callers."""
        self._most_of_one = most_of_one
        self._most_of_all = most_of_all
        self._too_many = too_many
        self._by_share: dict[Hashable, int] = {}
        self._open = 0

    @contextmanager
    def one_more(self, share: Hashable | None) -> Iterator[None]:
        """Counts an RPC of a caller for as long as it is open: see `begin`."""
        self.begin(share)
        try:
            yield
        finally:
            self.end(share)

    def begin(self, share: Hashable | None) -> None:
        """Counts an RPC of a caller until its `end`; None is a caller that cannot be told from others, and is counted
        among all only. Raises Overloaded if as many are open as may be.
        """
        if share is not None and self._by_share.get(share, 0) >= self._most_of_one:
            raise Overloaded(self._too_many(self._most_of_one, False))
        if self._most_of_all is not None and self._open >= self._most_of_all:
            raise Overloaded(self._too_many(self._most_of_all, True))
        self._by_share[share] = self._by_share.get(share, 0) + 1
        self._open += 1

    def end(self, share: Hashable | None) -> None:
        """An RPC that was counted is over."""
        self._open -= 1
        if (left := self._by_share[share] - 1) > 0:
            self._by_share[share] = left
        else:
            del self._by_share[share]
