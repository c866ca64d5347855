"""Keeps Ctrl-C out of code that an interrupt would leave with a lock held for ever.

In: a `with` around a few calls that do not block. Out: the same calls, and the interrupt right after them.

A handler of SIGINT runs in the main thread, between any two steps of Python code. gRPC holds locks of its channel while
it begins or cancels a call, by `threading.Condition`, whose `__enter__` and `__exit__` are Python code: an interrupt in
there leaves the lock held, and no reply is read on that channel any more.
"""

from __future__ import annotations

# The functions of `signal` look for the names of what they take and return, which takes them ten times as long.
import _signal  # type: ignore[import-not-found]
import threading
from collections.abc import Callable
from signal import SIGINT
from types import FrameType
from typing import Any


class DelayedInterrupt:
    """Calls the handler of SIGINT, if one arrives meanwhile, at the end. Without effect in other threads, and where
    SIGINT has no handler in Python.
    """

    __slots__ = ("_came", "_frame", "_handler")

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._came = False
        self._frame: FrameType | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(SIGINT)
            if callable(handler):
                try:
                    _signal.signal(SIGINT, self._note)
                except ValueError:  # an embedded Python's idea of the main thread is not that of signals
                    return
                self._handler = handler

    def __exit__(self, *exception: object) -> None:
        if self._handler is not None:
            _signal.signal(SIGINT, self._handler)
            if self._came:
                self._handler(SIGINT, self._frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came, self._frame = True, frame
