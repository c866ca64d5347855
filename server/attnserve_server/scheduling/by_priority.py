"""Items of several priorities in one order, although what a priority is worth changes while they wait.

In: items, each with a time at which it begins. Out: the one that comes first. Each level of its priority makes an item
earlier by what a level is worth at the moment; of equal items, the one with the lower number comes first. So the order
among items of one priority never changes, and each priority can have a heap of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Placed(NamedTuple, Generic[T]):
    """An item in its place: when it begins, its number, and how long it should take, if that is of interest."""

    begin: float
    number: int
    item: T
    seconds: float = 0.0


class ByPriority(Generic[T]):
    """A heap for each priority that any item has."""

    def __init__(self) -> None:
        self._heaps: dict[int, list[Placed[T]]] = {}

    def __bool__(self) -> bool:
        return bool(self._heaps)

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values()))

    def __iter__(self) -> Iterator[tuple[int, Placed[T]]]:
        """All items and their priorities, in no order."""
        return ((priority, placed) for priority, heap in self._heaps.items() for placed in heap)

    def push(self, priority: int, placed: Placed[T]) -> bool:
        """Takes an item. Returns whether it is now the first of its priority."""
        heap = self._heaps.setdefault(priority, [])
        heapq.heappush(heap, placed)
        return heap[0] is placed

    def first_priority(self, level: float) -> int:
        """The priority of the first item, if a level of priority is worth so much time. There must be an item."""
        heaps = self._heaps
        if len(heaps) == 1:
            return next(iter(heaps))
        return min(heaps, key=lambda priority: (heaps[priority][0].begin - priority * level, heaps[priority][0].number))

    def head(self, priority: int) -> Placed[T] | None:
        """The first item of a priority."""
        heap = self._heaps.get(priority)
        return heap[0] if heap else None

    def heads(self) -> Iterator[tuple[int, Placed[T]]]:
        """All priorities, and the first item of each."""
        return ((priority, heap[0]) for priority, heap in self._heaps.items())

    def pop(self, priority: int) -> Placed[T]:
        """Takes out the first item of a priority."""
        heap = self._heaps[priority]
        placed = heapq.heappop(heap)
        if not heap:
            del self._heaps[priority]
        return placed

    def clear(self) -> None:
        """Takes out everything."""
        self._heaps.clear()
