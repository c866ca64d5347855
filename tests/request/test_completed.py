"""Results that were found, completed by those that were not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnserve_server.requests.work import completed


@given(st.lists(st.none() | st.integers()))
def test_each_item_gets_its_own_result(found: list[int | None]) -> None:
    items = [str(place) for place in range(len(found))]
    asked: list[list[str]] = []

    def compute(lacking: list[str]) -> list[int]:
        asked.append(lacking)
        return [-int(item) for item in lacking]

    expected = [-place if result is None else result for place, result in enumerate(found)]
    assert completed(items, found, compute) == expected
    assert asked == ([lacking] if (lacking := [items[n] for n, each in enumerate(found) if each is None]) else [])


def test_as_many_results_as_items() -> None:
    with pytest.raises(ValueError, match="shorter"):
        completed([1, 2], [None], lambda items: items)
