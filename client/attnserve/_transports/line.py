"""Calls in order: those that wait to be sent by priority and age, those with a deadline or another time by that.

No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, Final, Generic, TypeVar

from attnserve._transports.in_flight import Call

T = TypeVar("T")

SPARE: Final = 64
"""The heap is rebuilt when it has more entries of calls that have left than there are calls, by more than so many."""


def by_priority(call: Call[Any]) -> float:
    """The rank of a call among those that may be sent."""
    return -call.priority


class Line(Generic[T]):
    """Calls by rank, the least first; calls of one rank by age. Any call can leave in constant time."""

    def __init__(self, rank: Callable[[Call[T]], float]) -> None:
        """`rank` of a call changes only while it is not there."""
        self._rank = rank
        self._calls: dict[int, Call[T]] = {}
        self._order: list[tuple[float, int]] = []
        """A heap of ranks and ids, of the calls and of some that have left. Ids grow with time, so that those of one
        rank are in order of age.
        """

    def __len__(self) -> int:
        """How many calls there are."""
        return len(self._calls)

    def __contains__(self, call: Call[T]) -> bool:
        """Whether a call is there."""
        return call.id in self._calls

    @property
    def calls(self) -> Collection[Call[T]]:
        """All, in any order."""
        return self._calls.values()

    @property
    def least(self) -> float:
        """The rank of the first; infinite if there is none."""
        order = self._order
        while order:
            rank, number = order[0]
            if (call := self._calls.get(number)) is not None and self._rank(call) == rank:
                return rank
            heappop(order)
        return inf

    def join(self, call: Call[T]) -> None:
        """Adds a call, which must not be there yet."""
        self._calls[call.id] = call
        heappush(self._order, (self._rank(call), call.id))
        if len(self._order) > 2 * len(self._calls) + SPARE:
            self._order = [(self._rank(each), each.id) for each in self._calls.values()]
            heapify(self._order)

    def leave(self, call: Call[T]) -> None:
        """Removes a call, if it is there."""
        self._calls.pop(call.id, None)

    def next(self) -> Call[T]:
        """Takes the first out: the oldest call of the least rank. There must be one."""
        while True:
            rank, number = heappop(self._order)
            if (call := self._calls.get(number)) is not None and self._rank(call) == rank:
                return self._calls.pop(number)

    def up_to(self, rank: float) -> list[Call[T]]:
        """Takes out all of this rank and of lesser ones, in their order."""
        taken: list[Call[T]] = []
        while self.least <= rank and self._calls:
            taken.append(self.next())
        return taken

    def clear(self) -> None:
        """Removes all."""
        self._calls.clear()
        self._order.clear()
