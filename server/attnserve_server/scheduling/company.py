"""Who computes on a device at the same time: batches beside each other, or one of them alone.

A device that has several batches has the memory of several, too. What there was no room for beside others is computed
once more when they are done, and nothing else begins before: so nobody fails for the company that it was in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class Company:
    """The threads that compute on one device. Nobody who is within may ask to be within again."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._within = 0
        self._want_to_be_alone = 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within, others compute too; nobody who wants to be alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._want_to_be_alone)
            self._within += 1
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within, nobody else computes."""
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
