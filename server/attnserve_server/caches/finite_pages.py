"""Which pages of a pool are known to hold nothing but finite numbers.

In: what was written, in the order of slots. Out: pages that a kernel may read whole, weighting what it should not see
by 0; NaN would survive that. Where nobody looks (on other devices than a CPU looking would mean waiting), no page is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


class FinitePages:
    """A page is one if all that was written to it since its first slot is finite, and all slots of values behind."""

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
        """Whether all of adjacent pages are, from the first to the one before the last."""
        return self._finite.find(0, first, last) < 0

    def others(self, first: int, last: int) -> Iterator[int]:
        """Those of adjacent pages that are not."""
        page = self._finite.find(0, first, last)
        while page >= 0:
            yield page
            page = self._finite.find(0, page + 1, last)

    def leading(self, pages: NDArray[np.int32]) -> int:
        """How many pages are, from the first on without a gap."""
        unknown = (self._array[pages] == 0).nonzero()[0]
        return int(unknown[0]) if len(unknown) else len(pages)
