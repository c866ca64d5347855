"""Whose turn it is: what needs the same thing runs in the order in which it came, whatever else runs meanwhile.

Plain data in, plain data out. Who enters stands behind all who need one of the same things and entered before; it
stands in all its lines from the beginning, so that no two can wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Turns(Generic[T]):
    """Lines in front of things."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[T]] = {}
        self._needs: dict[T, tuple[Hashable, ...]] = {}
        self._ahead: dict[T, int] = {}

    @property
    def waiting(self) -> int:
        """How many are not first in all their lines."""
        return len(self._ahead)

    def everyone(self) -> list[T]:
        """All who have entered and not left, whether it is their turn or not."""
        return list(self._needs)

    def enter(self, who: T, needs: Sequence[Hashable]) -> bool:
        """Lines up for some things, all different; whether it is its turn already."""
        self._needs[who] = tuple(needs)
        ahead = 0
        for need in needs:
            line = self._lines.setdefault(need, deque())
            line.append(who)
            ahead += len(line) > 1
        if ahead:
            self._ahead[who] = ahead
        return not ahead

    def waits(self, who: T) -> bool:
        """Whether it has entered, and its turn has not come."""
        return who in self._ahead

    def leave(self, who: T) -> list[T]:
        """Is done, at its turn or before; those whose turn it is now."""
        next_ones = []
        self._ahead.pop(who, None)
        for need in self._needs.pop(who):
            line = self._lines[need]
            was_first = line[0] == who
            line.remove(who)
            if not line:
                del self._lines[need]
            if not line or not was_first:
                continue
            first = line[0]
            self._ahead[first] -= 1
            if not self._ahead[first]:
                del self._ahead[first]
                next_ones.append(first)
        return next_ones
