"""Calls that wait to be sent, by their priorities and ages. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

from attnserve._transports.in_flight import Call

T = TypeVar("T")

SPARE: Final = 64
"""How many entries of calls that have gone are kept at least, beside as many as there are calls."""


class Line(Generic[T]):
    """A queue of calls, of which any may leave."""

    def __init__(self) -> None:
        self._calls: dict[int, Call[T]] = {}
        self._order: list[tuple[int, int]] = []
        """A heap of those that wait, and of some that have left: negative priorities, and ids, which grow with time."""

    def __len__(self) -> int:
        """How many calls wait."""
        return len(self._calls)

    def __contains__(self, call: Call[T]) -> bool:
        """Whether a call waits."""
        return call.id in self._calls

    @property
    def calls(self) -> Collection[Call[T]]:
        """Those that wait, in any order."""
        return self._calls.values()

    def join(self, call: Call[T]) -> None:
        """A call waits from now on."""
        self._calls[call.id] = call
        heappush(self._order, (-call.priority, call.id))
        if len(self._order) > 2 * len(self._calls) + SPARE:
            self._order = [(-each.priority, each.id) for each in self._calls.values()]
            heapify(self._order)

    def leave(self, call: Call[T]) -> None:
        """A call waits no more, if it did."""
        self._calls.pop(call.id, None)

    def next(self) -> Call[T]:
        """The oldest call of the highest priority, which waits no more. There must be one."""
        while True:
            if (call := self._calls.pop(heappop(self._order)[1], None)) is not None:
                return call

    def clear(self) -> None:
        """Nothing waits any more."""
        self._calls.clear()
        self._order.clear()
