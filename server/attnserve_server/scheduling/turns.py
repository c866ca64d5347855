"""Whose turn it is: requests that need the same thing run in order of arrival, whatever else runs meanwhile.

Plain data in, plain data out. There is a line for each thing, and an entrant stands behind all that are in its lines
already. But those that leave a thing unchanged can share it: if they are next to each other in its line, they have it
at the same time. An entrant joins all its lines at once, so that no two can wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)


class _Entered(NamedTuple):
    needs: tuple[Hashable, ...]
    shares: bool


@dataclass(slots=True)
class _Line(Generic[T]):
    """Those that have a thing (several share it), and those that wait for it."""

    having: set[T]
    shared: bool
    waiting: deque[T] = field(default_factory=deque)


class Turns(Generic[T]):
    """The lines, one for each thing."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line[T]] = {}
        self._entered: dict[T, _Entered] = {}
        self._ahead: dict[T, int] = {}
        """In how many lines each waits; those that wait in none are not in here."""

    @property
    def waiting(self) -> Collection[T]:
        """Those that do not have all that they need yet."""
        return self._ahead.keys()

    def everyone(self) -> list[T]:
        """All that have entered and not left, whether it is their turn or not."""
        return list(self._entered)

    def enter(self, who: T, needs: Sequence[Hashable], shares: bool) -> bool:
        """Lines up for `needs`, which are all different, to share them or to have them alone. Returns whether its turn
        has come already.
        """
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
        """Leaves all its lines, at its turn or before; returns those whose turn it is now."""
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
        """Gives the thing to the next in line; yields those that now have it."""
        while line.waiting:
            shares = self._entered[line.waiting[0]].shares
            if line.having and not (line.shared and shares):
                return
            line.shared = shares
            first = line.waiting.popleft()
            line.having.add(first)
            yield first
