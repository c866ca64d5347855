"""Acquires locks without waiting, for code that may interrupt anything: finalizers and signal handlers.

Python's garbage collector runs finalizers in whatever thread allocates an object, and signal handlers run between any
two steps of the main thread. What they interrupt, further up the same stack, may hold the lock that they need: waiting
for it would deadlock.

In: a lock. Out: the lock, acquired, or `LockHeld`; the caller then leaves its work to another thread, which may wait.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class LockHeld(Exception):
    """A lock is held, perhaps by this thread."""


@contextmanager
def at_once(lock: threading.Lock) -> Iterator[None]:
    """Holds a lock, if it can be acquired without waiting."""
    if not lock.acquire(blocking=False):
        raise LockHeld
    try:
        yield
    finally:
        lock.release()
