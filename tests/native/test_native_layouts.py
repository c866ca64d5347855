"""Which requests have a layout, which is what the library can do; and how many plans are kept for all others."""

from __future__ import annotations

from typing import Any

import messages
import numpy as np
import pytest

from attnserve_server.native import library, requests
from attnserve_server.native.layouts import MOST_RESULT_BYTES, MOST_SEQUENCES, layout_of
from attnserve_server.native.requests import NativeRequests

pytestmark = pytest.mark.skipif(not library.available(), reason="no native kernel is here")


def has_layout(length: int = 1, **options: Any) -> bool:
    return layout_of(messages.read(messages.random_attend(0, length, **options))) is not None


def test_a_layout_has_as_many_sequences_as_the_library_has_room_for() -> None:
    assert [has_layout(batch=batch) for batch in (0, 1, MOST_SEQUENCES, MOST_SEQUENCES + 1)] == [
        False,
        True,
        True,
        False,
    ]


def test_a_layout_has_results_that_the_library_has_room_for() -> None:
    queries = MOST_RESULT_BYTES // (4 * 64)
    asked = {"kv_length": 1, "heads": 1, "width": 64}
    assert [has_layout(length, **asked) for length in (0, queries, queries + 1)] == [False, True, False]


@pytest.fixture
def native() -> NativeRequests:
    kernel = library.best("auto")
    assert kernel is not None
    return NativeRequests(kernel)


def output(native: NativeRequests, **options: Any) -> bytes:
    (result,), broken = native.run([messages.read(messages.random_attend(0, 3, batch=2, **options))], None)
    assert result is not None
    assert not broken
    return bytes(result.output)


def test_sequences_of_other_lengths_than_before_have_a_plan_of_their_own(native: NativeRequests) -> None:
    """Equal headers have one problem; the lengths are no part of it."""
    lengths = [np.array(each, np.int64) for each in ((3, 3), (1, 2), (2, 2), (3, 3))]
    together = [output(native, kv_lengths=each) for each in lengths]
    assert together == [output(NativeRequests(native._library), kv_lengths=each) for each in lengths]
    assert len(set(together)) == 3


def test_plans_are_forgotten_when_they_are_too_many(native: NativeRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_KEPT", 3)
    found = []
    for width in range(1, 9):
        output(native, width=width)
        found.append(len(native._plans))
    assert found == [1, 2, 3, 1, 2, 3, 1, 2]
