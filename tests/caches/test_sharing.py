"""Which queries read the same first pages, and so are computed together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnserve_server.caches.sharing import Group, groups

FORKS = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=12)


def grouped(pages: list[list[int]], largest: int = 64) -> list[Group]:
    """Groups with their members in order, in order."""
    found = groups([np.array(own, np.int32) for own in pages], largest)
    return sorted(Group(sorted(members), shared) for members, shared in found)


def saved(found: list[Group]) -> int:
    """How many pages need not be read."""
    return sum((len(members) - 1) * shared for members, shared in found)


@given(pages=FORKS, largest=st.integers(1, 5))
def test_groups_hold_everybody_once_and_what_they_share(pages: list[list[int]], largest: int) -> None:
    found = grouped(pages, largest)
    assert sorted(member for group in found for member in group.members) == list(range(len(pages)))
    for members, shared in found:
        assert 1 <= len(members) <= largest
        assert (shared > 0) == (len(members) > 1)
        assert len({tuple(pages[member][:shared]) for member in members}) == 1
        assert all(len(pages[member]) >= shared for member in members)


@given(pages=FORKS)
def test_no_beginning_that_some_have_in_common_would_have_saved_more(pages: list[list[int]]) -> None:
    for own in pages:
        for length in range(1, len(own) + 1):
            sharers = sum(other[:length] == own[:length] for other in pages)
            assert saved(grouped(pages)) >= (sharers - 1) * length


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ([[1, 2], [3, 4], []], [([0], 0), ([1], 0), ([2], 0)]),
        ([[7, 8, 9], [5], [7, 8, 4]], [([0, 2], 2), ([1], 0)]),
        # One that diverges early is not worth the many pages that the others have in common.
        ([[1, *range(10, 20)], [1, *range(10, 20)], [1, 5]], [([0, 1], 11), ([2], 0)]),
        ([[1, 2, 3], [1, 2, 4], [1, 2, 5], [1, 2, 3]], [([0, 1, 2, 3], 2)]),
    ],
)
def test_groups(pages: list[list[int]], expected: list[tuple[list[int], int]]) -> None:
    assert grouped(pages) == [Group(*each) for each in expected]


def test_many_are_divided_evenly() -> None:
    assert sorted(len(members) for members, _ in grouped([[3, 4]] * 130, 64)) == [43, 43, 44]
    chain = [list(range(length)) for length in range(300)]
    assert len(grouped(chain, 128)) < 300
