"""Whose turn it is: what needs the same thing runs in the order in which it came, whatever else runs meanwhile.

Plain data in, plain data out. Who enters stands behind all who need one of the same things and entered before, unless
all of those and itself only share it: who leaves a thing as it is can have it together with others who do. It stands in
all its lines from the beginning, so that no two can wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)


class _Entered(NamedTuple):
    needs: tuple[Hashable, ...]
    shares: bool


@dataclass(slots=True)
class _Line(Generic[T]):
    """Who has a thing, and who waits for it. Those who have it together share it."""

    having: set[T] = field(default_factory=set)
    shared: bool = False
    waiting: deque[T] = field(default_factory=deque)


class Turns(Generic[T]):
    """Lines in front of things."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line[T]] = {}
        self._entered: dict[T, _Entered] = {}
        self._ahead: dict[T, int] = {}
        """In how many lines each waits who waits in any."""

    @property
    def waiting(self) -> int:
        """How many have not all that they need."""
        return len(self._ahead)

    def everyone(self) -> list[T]:
        """All who have entered and not left, whether it is their turn or not."""
        return list(self._entered)

    def enter(self, who: T, needs: Sequence[Hashable], shares: bool = False) -> bool:
        """Lines up for some things, all different, which it shares or wants alone; whether it is its turn already."""
        self._entered[who] = _Entered(tuple(needs), shares)
        ahead = 0
        for need in needs:
            line = self._lines.get(need)
            if line is None:
                self._lines[need] = _Line({who}, shares)
            elif shares and line.shared and not line.waiting:
                line.having.add(who)
            else:
                line.waiting.append(who)
                ahead += 1
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
        for need in self._entered.pop(who).needs:
            line = self._lines[need]
            if who in line.having:
                line.having.remove(who)
            else:
                line.waiting.remove(who)
            for other in self._advance(line):
                self._ahead[other] -= 1
                if not self._ahead[other]:
                    del self._ahead[other]
                    next_ones.append(other)
            if not line.having:
                del self._lines[need]
        return next_ones

    def _advance(self, line: _Line[T]) -> Iterator[T]:
        """Those who wait in a line and have the thing now."""
        while line.waiting:
            shares = self._entered[line.waiting[0]].shares
            if line.having and not (line.shared and shares):
                return
            line.shared = shares
            first = line.waiting.popleft()
            line.having.add(first)
            yield first
