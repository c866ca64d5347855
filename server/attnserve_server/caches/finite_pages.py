"""Which pages of a pool are known to hold nothing but finite numbers.

In: what was written, in the order of slots. Out: pages that a kernel may read whole. It weights by 0 what it should not
see, and NaN would survive that. On other devices than a CPU nobody looks, since that would mean waiting: there, no page
is known to be finite.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


class FinitePages:
    """A page is known to be finite if all tokens written to it are, from its first slot on, and all values in the slots
    behind them.
    """

    def __init__(self, count: int) -> None:
        self._finite = bytearray(count)
        self._array = np.frombuffer(self._finite, np.uint8)

    def __contains__(self, page: int) -> bool:
        """Whether a page is known to be finite."""
        return bool(self._finite[page])

    def know(self, page: int, slot: int, *, finite: bool) -> None:
        """Notes whether the tokens just written to a page, from `slot` on, are finite. Slots are written in order: the
        page is known to be finite if these tokens and all before them are.
        """
        self._finite[page] = finite and (not slot or self._finite[page])

    def copied(self, source: int, copy: int) -> None:
        """Notes that a page is a copy of another."""
        self._finite[copy] = self._finite[source]

    def all(self, first: int, last: int) -> bool:
        """Whether all pages from `first` up to `last`, exclusive, are known to be finite."""
        return self._finite.find(0, first, last) < 0

    def others(self, first: int, last: int) -> Iterator[int]:
        """Those pages from `first` up to `last`, exclusive, that are not."""
        page = self._finite.find(0, first, last)
        while page >= 0:
            yield page
            page = self._finite.find(0, page + 1, last)

    def leading(self, pages: NDArray[np.int32]) -> int:
        """How many of these pages are, from the first on without a gap."""
        unknown = (self._array[pages] == 0).nonzero()[0]
        return int(unknown[0]) if len(unknown) else len(pages)
