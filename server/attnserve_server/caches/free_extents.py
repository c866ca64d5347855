"""Free pages as extents of adjacent ones: finds the longest, and joins extents when pages come back.

In: ranges of pages. Out: ranges of pages. Every operation on an extent takes amortised logarithmic time in the number
of extents, however long they are.
"""

from __future__ import annotations

import heapq


class FreeExtents:
    """Disjoint ranges of free pages, none of which touches another."""

    def __init__(self, pages: int) -> None:
        """All of the pages 0 to `pages` - 1, in one extent."""
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        # (-length, start) of every extent, and of some that have changed since: those are dropped when met.
        self._by_length: list[tuple[int, int]] = []
        self.pages = 0
        if pages:
            self.add(0, pages)

    def add(self, start: int, end: int) -> None:
        """Adds pages from `start` up to `end`, which have become free."""
        self.pages += end - start
        if start in self._starts:
            start = self._remove(self._starts[start]).start
        if end in self._ends:
            end = self._remove(end).stop
        self._insert(start, end)

    def longest(self) -> range:
        """The longest extent, the first of equals. There must be one."""
        while True:
            length, start = self._by_length[0]
            if self._ends.get(start) == start - length:
                return range(start, start - length)
            heapq.heappop(self._by_length)

    def beginning_at(self, page: int) -> range:
        """The extent that begins at a page; an empty one if none does."""
        return range(page, self._ends.get(page, page))

    def take(self, extent: range, start: int, count: int) -> range:
        """Takes `count` pages from `start` on out of an extent that has them."""
        end = start + count
        self._remove(extent.start)
        if extent.start < start:
            self._insert(extent.start, start)
        if end < extent.stop:
            self._insert(end, extent.stop)
        self.pages -= count
        return range(start, end)

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
