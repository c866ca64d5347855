"""A signal whose handler raises, in any place of an operation in the main thread."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from itertools import count
from typing import Any

import pytest


class Interrupt(KeyboardInterrupt):
    """What a handler raises. Not an Exception: `concurrent.futures` takes those for a callback's."""


@pytest.fixture
def handled() -> Iterator[None]:
    """A handler of SIGINT that raises."""

    def handler(*arguments: Any) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGINT, handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted_at(place: int, operation: Callable[[], object]) -> bool:
    """Has a signal arrive in an operation where Python would call its handler: as a function begins, or when one in C
    has returned; in the first of these places, or so many later. Returns whether there is such a place.
    """
    left = place

    def visit(frame: Any, event: str, argument: object) -> None:
        nonlocal left
        if event in ("call", "c_return"):
            left -= 1
            if left == -1:
                signal.raise_signal(signal.SIGINT)

    before = sys.getprofile()
    gc.disable()  # its callbacks (Hypothesis has one) are no place of the operation
    try:
        with suppress(Interrupt, TimeoutError, CancelledError):
            sys.setprofile(visit)
            try:
                operation()
            finally:
                sys.setprofile(before)
    finally:
        sys.setprofile(before)
        gc.enable()
    return left < 0


def places(is_there: Callable[[int], bool]) -> int:
    """In how many places an operation can be interrupted, each of which is tried: `is_there` does, as `interrupted_at`
    does, and says whether there is the place.
    """
    return next(place for place in count() if not is_there(place))
