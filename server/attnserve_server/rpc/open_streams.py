"""How many streams are open at a time: those of one caller, and of all. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from attnserve_server.errors import TooManyStreams


class OpenStreams:
    """Counts streams: so many of one caller at most, and so many of all if there is a bound on those."""

    def __init__(self, most_of_one: int, most_of_all: int | None = None) -> None:
        self._most_of_one = most_of_one
        self._most_of_all = most_of_all
        self._by_share: Counter[Hashable] = Counter()
        self._open = 0

    @contextmanager
    def one_more(self, share: Hashable | None) -> Iterator[None]:
        """Counts a stream of a caller for as long as it is open; None is a caller that cannot be told from others, and
        is counted among all only. Raises TooManyStreams if as many are open as may be.
        """
        if share is not None and self._by_share[share] >= self._most_of_one:
            raise TooManyStreams(self._most_of_one)
        if self._most_of_all is not None and self._open >= self._most_of_all:
            raise TooManyStreams(self._most_of_all, of_all=True)
        self._by_share[share] += 1
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            self._by_share[share] -= 1
            if not self._by_share[share]:
                del self._by_share[share]
