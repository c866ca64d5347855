"""What is known of pages, against sets of pages."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attnserve_server.caches.finite_pages import FinitePages

PAGES = 6
PAGE = st.integers(0, PAGES - 1)
WRITTEN = st.tuples(PAGE, st.integers(0, 2), st.booleans())
COPIED = st.tuples(PAGE, PAGE)


@given(st.lists(WRITTEN | COPIED, max_size=30), st.lists(PAGE, max_size=8))
def test_a_page_is_finite_as_long_as_all_that_is_written_to_it_is(
    events: list[tuple[int, int, bool] | tuple[int, int]], read: list[int]
) -> None:
    pages, finite = FinitePages(PAGES), set[int]()
    for event in events:
        if len(event) == 3:
            page, slot, is_finite = event
            pages.know(page, slot, finite=is_finite)
            stays = is_finite and (slot == 0 or page in finite)
        else:
            source, page = event
            pages.copied(source, page)
            stays = source in finite
        finite = finite | {page} if stays else finite - {page}
    assert {page for page in range(PAGES) if page in pages} == finite
    for first in range(PAGES):
        for last in range(first, PAGES + 1):
            assert pages.all(first, last) == (set(range(first, last)) <= finite)
            assert list(pages.others(first, last)) == [page for page in range(first, last) if page not in finite]
    leading = next((place for place, page in enumerate(read) if page not in finite), len(read))
    assert pages.leading(np.array(read, np.int32)) == leading
