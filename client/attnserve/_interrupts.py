"""Keeps signal handlers out of code that an exception of theirs would leave half done, or with a lock held for ever.

In: a `with` around a few calls that do not block. Out: the same calls, and right after them the handlers of the signals
that came meanwhile.

A signal's handler in Python runs in the main thread, between any two steps of Python code, and may raise: that of
SIGINT does. gRPC holds locks of its channel while it begins or cancels a call, by `threading.Condition`, whose
`__enter__` and `__exit__` are Python code: an exception in there leaves the lock held, and no reply is read on that
channel any more. So do the standard library's events, timers and futures.

Blocking the signals in the main thread would not do: another thread would get them, and Python would still call the
handlers in the main thread. So for a moment each handler is replaced by one that takes a note.
"""

from __future__ import annotations

# The functions of `signal` look for the names of what they take and return, which takes them ten times as long.
import _signal  # type: ignore[import-not-found]
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], Any]

_NAMES: Final = "INT TERM ALRM HUP QUIT USR1 USR2 ABRT VTALRM PROF BREAK"
SIGNALS: Final = tuple(int(getattr(signal, f"SIG{name}")) for name in _NAMES.split() if hasattr(signal, f"SIG{name}"))
"""The signals that are delayed: those whose handlers end something. To look at one takes some 25 ns, at every call."""


_outermost: DelayedInterrupt | None = None
"""The one that the main thread is in."""


class DelayedInterrupt:
    """Calls the handlers of the signals that arrive meanwhile at the end, each once, in the order of their arrival.
    Without effect in other threads, within another, and for signals that have no handler in Python.
    """

    __slots__ = ("_came", "_handlers", "_holds")

    def __init__(self) -> None:
        self._holds = False

    def __enter__(self) -> None:
        global _outermost
        if threading.get_ident() != threading.main_thread().ident or _outermost is not None:
            return
        getsignal = _signal.getsignal
        if handlers := {number: handler for number in SIGNALS if callable(handler := getsignal(number))}:
            self._handlers: dict[int, Handler] = handlers
            self._came: dict[int, FrameType | None] = {}
            self._holds, _outermost = True, self
            try:
                for number in handlers:
                    _signal.signal(number, self._note)
            except BaseException as error:
                if isinstance(error, ValueError) and _is_elsewhere(number):
                    self._holds, _outermost = False, None
                    return
                self.__exit__()
                raise  # what a handler that is not replaced yet has raised

    def __exit__(self, *exception: object) -> None:
        global _outermost
        if not self._holds:
            return
        _outermost = None  # a handler that is back may begin another
        try:
            for number, handler in self._handlers.items():
                _signal.signal(number, handler)
        finally:
            self._holds = False
            if self._came:
                self._call_handlers()

    def _call_handlers(self) -> None:
        """Calls the handlers of what came, all of them, whichever raise."""
        try:
            while self._came:
                number = next(iter(self._came))
                frame = self._came.pop(number)
                self._handlers[number](number, frame)
        finally:
            if self._came:
                self._call_handlers()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal. If a handler that was back already has kept others from coming back, this goes on to stand
        in for them.
        """
        if self._holds:
            self._came.setdefault(number, frame)
        else:
            self._handlers[number](number, frame)

    def let_go(self) -> None:
        """Delays nothing any more."""
        self._holds = False


def _is_elsewhere(number: int) -> bool:
    """Whether `signal` takes another thread for the main one, as it does in an embedded Python."""
    try:
        _signal.signal(number, _signal.getsignal(number))
    except ValueError:
        return True
    return False


def _forked() -> None:
    """In a new process, which another thread may have begun, nothing ends what the main thread was in."""
    global _outermost
    if _outermost is not None:
        _outermost.let_go()
        _outermost = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
