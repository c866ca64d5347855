"""The pages of the pool: which are free, how many are promised, and the refcounts of the others. No memory here.

A page counts the lists of pages that hold it (`layer.py`), and is freed when the last one releases it. Pages are taken
only out of those promised before, so that every promise can be kept, whatever others do in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnserve_server.caches.free_extents import FreeExtents


class PageAllocator:
    """Counts the holders of pages 0 to `pages` - 1, and decides which free page is taken next."""

    def __init__(self, pages: int) -> None:
        """`pages` pages, all free."""
        self.pages = pages
        self.reserved = 0
        """Free pages that are promised."""
        self._holders = np.zeros(pages, np.int32)
        # True for the last page of an allocation, until its layer has others behind it. Free pages may have either.
        self._grows = np.zeros(pages, np.bool_)
        self._held = 0
        self._extents = FreeExtents(pages)

    @property
    def free(self) -> int:
        """Pages that nobody holds, promised or not."""
        return self._extents.pages

    @property
    def available(self) -> int:
        """Pages that can be promised."""
        return self.free - self.reserved

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return self.pages - self.free

    @property
    def saved(self) -> int:
        """How many more pages would be needed if nothing were shared."""
        return self._held - self.used

    def reserve(self, count: int) -> None:
        """Promises pages or, below 0, takes promises back. Raises ValueError if fewer are available, or promised."""
        if not -self.reserved <= count <= self.available:
            raise ValueError(f"{count} pages cannot be promised: {self.available} are free, {self.reserved} promised")
        self.reserved += count

    def allocate(self, count: int, behind: int | None) -> list[int]:
        """Takes promised pages for a layer whose last page is `behind`; each has one holder.

        First the free pages right behind that one, then adjacent ones out of the longest extents.
        """
        self.reserve(-count)
        if not count:
            return []
        pages: list[int] = []
        if behind is not None:
            self._grows[behind] = False
            extent = self._extents.beginning_at(behind + 1)
            if extent:
                pages.extend(self._extents.take(extent, extent.start, min(count, len(extent))))
        while len(pages) < count:
            pages.extend(self._take_longest(count - len(pages)))
        self._grows[pages] = False
        self._grows[pages[-1]] = True
        self._holders[pages] = 1
        self._held += count
        return pages

    def _take_longest(self, count: int) -> range:
        """Up to `count` adjacent pages out of the longest extent.

        If the extent lies behind the last page of a layer, which may grow into it too, each of the two gets half of
        what is left. Otherwise layers that grow at the same time would take alternate pages.
        """
        extent = self._extents.longest()
        count = min(count, len(extent))
        is_behind_a_layer = extent.start > 0 and self._grows[extent.start - 1]
        gap = (len(extent) - count) // 2 if is_behind_a_layer else 0
        return self._extents.take(extent, extent.start + gap, count)

    def share(self, pages: Sequence[int]) -> None:
        """Adds a holder to each of these pages, all different."""
        self._holders[np.asarray(pages)] += 1
        self._held += len(pages)

    def hold_again(self, pages: int) -> None:
        """Notes that one more layer has a list that holds so many pages already; below 0, that one fewer has it."""
        self._held += pages

    def release(self, pages: Sequence[int]) -> None:
        """Removes a holder from each of these pages, all different, and frees those that have none left."""
        if not pages:
            return
        held = np.asarray(pages)
        holders = self._holders[held] - 1
        self._holders[held] = holders
        self._held -= len(pages)
        freed = np.sort(held[holders == 0])
        if not freed.size:
            return
        # Where page numbers are not consecutive, one extent ends and another begins.
        breaks = np.flatnonzero(np.diff(freed) != 1)
        firsts = freed[np.concatenate(([0], breaks + 1))].tolist()
        lasts = freed[np.concatenate((breaks, [-1]))].tolist()
        for first, last in zip(firsts, lasts, strict=True):
            self._extents.add(first, last + 1)

    def is_shared(self, page: int) -> bool:
        """Whether a page has more than one holder."""
        return bool(self._holders[page] > 1)

    def shared(self, pages: Sequence[int]) -> int:
        """How many of these pages have other holders too."""
        return int(np.count_nonzero(self._holders[np.asarray(pages)] > 1))
