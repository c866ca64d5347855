"""Lets several threads compute batches on one device at the same time, or one of them alone.

Concurrent batches share the device's memory. A request that found no room beside another batch is computed again by
itself: the running batches finish first, and no other begins. So no request fails because of what ran beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class Company:
    """The threads that compute on one device. Not reentrant."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._within = 0
        self._want_to_be_alone = 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within, other threads may compute, too, but none that wants to be alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._want_to_be_alone)
            self._within += 1
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within, no other thread computes."""
        with self._changed:
            self._want_to_be_alone += 1
            self._changed.wait_for(lambda: not self._within)
            self._within += 1
        try:
            yield
        finally:
            self._leave(1)

    def _leave(self, alone: int = 0) -> None:
        with self._changed:
            self._within -= 1
            self._want_to_be_alone -= alone
            self._changed.notify_all()
