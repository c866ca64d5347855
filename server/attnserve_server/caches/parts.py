"""Which of a query's kernel calls covers which keys of a cache: decided by lengths, options and page size alone.

So a result depends neither on where pages lie nor on what is computed beside it. In: numbers. Out: ranges of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from attnserve_server.kernels.band import Band


class Part(NamedTuple):
    """Tokens from `begin`, a page's first, up to `end`: page by page in one call, or as one sequence."""

    begin: int
    end: int
    by_page: bool


def by_page(band: Band, reach: tuple[int, int], per_page: int) -> list[Part]:
    """Parts for few queries: the pages that every query reaches in full, page by page, and what lies at either end.

    `band` is that of the queries over the cache, and `reach` the range of keys outside of which none reaches.
    """
    begin, end = _from_page(reach, per_page)
    first = -(-max(begin, band.begin(band.query_length - 1)) // per_page) * per_page
    last = min(end, band.end(0)) // per_page * per_page
    if first >= last:
        return [Part(begin, end, False)]
    parts = [Part(begin, first, False), Part(first, last, True), Part(last, end, False)]
    return [part for part in parts if part.begin < part.end]


def as_sequences(reach: tuple[int, int], per_page: int, pages: int) -> list[Part]:
    """Parts of at most so many pages each, divided between pages."""
    begin, end = _from_page(reach, per_page)
    step = per_page * pages
    return [Part(start, min(start + step, end), False) for start in range(begin, end, step)] or [Part(0, 0, False)]


def _from_page(reach: tuple[int, int], per_page: int) -> tuple[int, int]:
    """A range of tokens, extended back to the first token of its first page."""
    begin, end = reach
    return begin // per_page * per_page, end
