"""A lock that several threads hold together, or one alone: for batches on one device, which are computed concurrently.

Concurrent batches share the device's memory. A request that found no room beside another batch is computed again by
itself: the running batches finish first, and no other begins. So no request fails because of what ran beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class SharedLock:
    """Shared or exclusive; who wants it exclusively goes before those that come later. Not reentrant."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._holders = 0
        self._exclusive = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Within, other threads may hold it shared, too."""
        with self._changed:
            self._changed.wait_for(lambda: not self._exclusive)
            self._holders += 1
        try:
            yield
        finally:
            self._release()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Within, no other thread holds it."""
        with self._changed:
            self._exclusive += 1
            self._changed.wait_for(lambda: not self._holders)
            self._holders += 1
        try:
            yield
        finally:
            self._release(exclusive=1)

    def try_share(self) -> bool:
        """Holds it shared until `unshare` is called, by any thread, and returns True. Returns False, without waiting,
        if a thread holds it exclusively or waits for that.
        """
        with self._changed:
            if not self._exclusive:
                self._holders += 1
            return not self._exclusive

    def unshare(self) -> None:
        """Ends what `try_share` began."""
        self._release()

    def _release(self, exclusive: int = 0) -> None:
        with self._changed:
            self._holders -= 1
            self._exclusive -= exclusive
            self._changed.notify_all()
