"""Locks for who may be called in the middle of anything: a finalizer, which Python's collector runs in whatever thread
makes an object, or a signal's handler. What holds the lock may be further up the very stack, and never let go of it.

In: a lock. Out: the lock, taken, or `Held`; who is told that has another thread wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Held(Exception):
    """A lock is held, perhaps by this thread."""


@contextmanager
def at_once(lock: threading.Lock) -> Iterator[None]:
    """Holds a lock, if that needs no waiting."""
    if not lock.acquire(blocking=False):
        raise Held
    try:
        yield
    finally:
        lock.release()
