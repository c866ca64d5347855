"""Locks for code that may interrupt anything: a finalizer, which Python's garbage collector runs in whatever thread
allocates an object, or a signal handler. The holder may be further up the same stack, so that waiting would deadlock.

In: a lock. Out: the lock, acquired, or `LockHeld`; the caller then leaves the wait to another thread.
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
