"""Room for several requests at once that are computed before they are admitted."""

from __future__ import annotations

from contextlib import suppress

import pytest
from engines import OpenAdmission
from hypothesis import assume, given
from hypothesis import strategies as st

from attnserve_server.errors import Overloaded

ME, OTHER = "me", "another"


@given(
    st.lists(st.tuples(st.sampled_from([ME, OTHER]), st.integers(0, 60)), max_size=12),
    st.lists(st.integers(0, 60), min_size=1, max_size=8),
)
def test_where_there_is_room_for_several_each_of_them_is_admitted(
    before: list[tuple[str, int]], sizes: list[int]
) -> None:
    admission = OpenAdmission(max_requests=14, max_bytes=400, max_flops=1000)
    for caller, size in before:
        with suppress(Overloaded):
            admission.admit(caller, size, 1)
            admission.computed(caller, size, 1)
    assume(admission.has_room_for(ME, sum(sizes), len(sizes)))
    requests, held = admission.requests, admission.bytes
    for size in sizes:
        admission.admit(ME, size, 1)
        admission.computed(ME, size, 1)
        admission.release(ME, size)
        admission.admit_computed(ME, size, 1)
    assert (admission.requests, admission.bytes) == (requests + len(sizes), held + sum(sizes))
    admission.release(ME, sum(sizes), len(sizes))
    assert (admission.requests, admission.bytes) == (requests, held)


@pytest.mark.parametrize(
    ("size", "requests", "there_is"),
    [(10, 1, True), (100, 8, True), (100, 9, False), (889, 1, False), (880, 1, True), (1001, 1, False)],
)
def test_there_is_room_for_a_share_of_requests_and_bytes(size: int, requests: int, there_is: bool) -> None:
    admission = OpenAdmission(max_requests=9, max_bytes=1000, max_flops=1000)
    assert admission.has_room_for(ME, size, requests) == there_is


def test_there_is_no_room_for_several_while_something_waits_or_was_refused() -> None:
    admission = OpenAdmission(max_requests=4, max_bytes=1000, max_flops=1000)
    admission.admit(OTHER, 10, 10)
    assert not admission.has_room_for(ME, 10, 1)
    admission.computed(OTHER, 10, 10)
    assert admission.has_room_for(ME, 10, 1)
    with pytest.raises(Overloaded):
        admission.check(ME, 1000)
    assert not admission.has_room_for(ME, 10, 1)  # a refused caller is told the same again until something changes
    admission.release(OTHER, 10)
    assert admission.has_room_for(ME, 10, 1)
