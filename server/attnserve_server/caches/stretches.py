"""Free pages as stretches of adjacent ones: which is the longest, and what joins when pages come back.

In: ranges of pages. Out: ranges of pages. Every operation on a stretch takes amortised logarithmic time in the number
of stretches, however long they are.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator


class FreeStretches:
    """Disjoint ranges of free pages, none of which touches another."""

    def __init__(self, pages: int) -> None:
        """All of the pages 0 to `pages` - 1, in one stretch."""
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        # (-length, start) of every stretch, and of some that have changed since: those are dropped when met.
        self._by_length: list[tuple[int, int]] = []
        self.pages = 0
        if pages:
            self.add(0, pages)

    def __iter__(self) -> Iterator[range]:
        """The stretches, in the order of their pages."""
        return (range(start, self._ends[start]) for start in sorted(self._ends))

    def add(self, start: int, end: int) -> None:
        """Pages from `start` up to `end` have become free."""
        self.pages += end - start
        if start in self._starts:
            start = self._remove(self._starts[start]).start
        if end in self._ends:
            end = self._remove(end).stop
        self._insert(start, end)

    def take_at(self, page: int, count: int) -> range:
        """Takes up to `count` pages from `page` on; none, if no stretch begins there."""
        if page not in self._ends:
            return range(page, page)
        stretch = self._remove(page)
        return self._carve(stretch, page, min(count, len(stretch)))

    def take_longest(self, count: int) -> range:
        """Takes up to `count` adjacent pages out of the middle of the longest stretch, which must exist.

        Out of the middle, because whoever has the page before the stretch may want to grow into it, and so may whoever
        takes pages now: each gets half of what is left. Where nothing lies before the stretch, its start is taken.
        """
        start, end = self._longest()
        stretch = self._remove(start)
        count = min(count, len(stretch))
        return self._carve(stretch, start + (end - start - count) // 2 if start else 0, count)

    def _carve(self, stretch: range, start: int, count: int) -> range:
        end = start + count
        if stretch.start < start:
            self._insert(stretch.start, start)
        if end < stretch.stop:
            self._insert(end, stretch.stop)
        self.pages -= count
        return range(start, end)

    def _longest(self) -> tuple[int, int]:
        while True:
            length, start = self._by_length[0]
            end = self._ends.get(start)
            if end == start - length:
                return start, end
            heapq.heappop(self._by_length)

    def _insert(self, start: int, end: int) -> None:
        self._ends[start] = end
        self._starts[end] = start
        heapq.heappush(self._by_length, (start - end, start))
        if len(self._by_length) > 4 * len(self._ends) + 64:
            self._by_length = [(start - end, start) for start, end in self._ends.items()]
            heapq.heapify(self._by_length)

    def _remove(self, start: int) -> range:
        end = self._ends.pop(start)
        del self._starts[end]
        return range(start, end)
