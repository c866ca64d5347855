"""Bounds on open streams, of one caller and of all."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from attnserve_server.errors import Overloaded
from attnserve_server.rpc.open_rpcs import OpenRpcs


def test_one_caller_has_so_many_and_another_as_many() -> None:
    streams = OpenRpcs(2)
    with ExitStack() as stack:
        for share in ("a", "b", "a", "b"):
            stack.enter_context(streams.one_more(share))
        for share in ("a", "b"):
            with pytest.raises(Overloaded, match="the caller has as many streams as one may have: 2"):
                stack.enter_context(streams.one_more(share))
    with streams.one_more("a"), streams.one_more("a"):
        pass


def test_callers_that_cannot_be_told_apart_are_bounded_together_only() -> None:
    streams = OpenRpcs(1, 3)
    with ExitStack() as stack:
        for share in (None, None, "a"):
            stack.enter_context(streams.one_more(share))
        with pytest.raises(Overloaded, match="all callers together have as many streams as they may have: 3") as caught:
            stack.enter_context(streams.one_more("b"))
    assert (caught.value.reason, caught.value.rejection) == ("TOO_MANY_STREAMS", "caller_streams")


def test_of_all_there_are_as_many_as_before_when_some_have_ended() -> None:
    streams = OpenRpcs(2, 2)
    for _ in range(3):
        with streams.one_more("a"), streams.one_more(None), pytest.raises(Overloaded, match="all callers together"):
            streams.begin("b")


def test_a_stream_that_breaks_is_counted_no_longer() -> None:
    streams = OpenRpcs(1, 1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), streams.one_more("a"):
            raise ZeroDivisionError
