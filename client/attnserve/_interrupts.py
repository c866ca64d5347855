"""Delays signal handlers, such as that of Ctrl-C, while code runs that must not be broken off halfway.

In: a `with` around a few calls that do not block. Out: the same calls; after them, the handlers of the signals that
came meanwhile.

**Why.** Python calls a signal's handler in the main thread, between any two steps of Python code. A handler may raise,
as that of SIGINT does (KeyboardInterrupt), and the code that it interrupts is then left half done. That is worst in
`threading.Condition`, whose `__enter__` and `__exit__` are Python code: an exception in there leaves its lock held for
ever. gRPC uses such locks. It holds those of a channel while it begins or cancels a call; once one stays held, no reply
is read on that channel any more. The standard library's events, timers and futures use them, too.

**How.** For a moment, each handler is replaced by one that only takes a note. It would not do to block the signals in
the main thread: another thread would get them, and Python would still call the handlers in the main thread.

**Event loops.** The handlers of asyncio and uvloop are left in place: they never raise. To replace them would also undo
`signal.siginterrupt`, by which both have the system restart the calls that their signals interrupt.
"""

from __future__ import annotations

# The functions of `signal` turn numbers into members of enums and back, which takes ten times as long.
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
"""The signals that are delayed: those whose handlers end something. Not all, since every `with` looks up the handler of
each, which takes some 25 ns.
"""

_OF_LOOPS: Final = ("asyncio.unix_events", "uvloop.loop")
"""The modules of the handlers that event loops set. These do nothing that could raise: a loop learns of its signals by
`signal.set_wakeup_fd`.
"""


def _delays(handler: object) -> bool:
    """Whether a handler is to be delayed: it is in Python and may raise."""
    return callable(handler) and getattr(handler, "__module__", None) not in _OF_LOOPS


_outermost: DelayedInterrupt | None = None
"""The `with` that the main thread is in; others inside it have no effect."""


class DelayedInterrupt:
    """A context manager that only notes signals while it is entered. At its end, it calls the handler of each signal
    that came, once, in the order of arrival.

    It has no effect in threads other than the main one, inside another `DelayedInterrupt`, and on signals that have no
    handler in Python, or one of an event loop's.
    """

    __slots__ = ("_came", "_handlers", "_holds")

    def __init__(self) -> None:
        self._holds = False

    def __enter__(self) -> None:
        global _outermost
        if threading.get_ident() != threading.main_thread().ident or _outermost is not None:
            return
        getsignal = _signal.getsignal
        if handlers := {number: handler for number in SIGNALS if _delays(handler := getsignal(number))}:
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
                raise  # a handler that was not replaced yet has raised this

    def __exit__(self, *exception: object) -> None:
        global _outermost
        if not self._holds:
            return
        _outermost = None  # first: a handler that is back may enter another
        try:
            for number, handler in self._handlers.items():
                _signal.signal(number, handler)
        finally:
            self._holds = False
            if self._came:
                self._call_handlers()

    def _call_handlers(self) -> None:
        """Calls the handlers of the signals that came: all of them, even if some raise."""
        try:
            while self._came:
                number = next(iter(self._came))
                frame = self._came.pop(number)
                self._handlers[number](number, frame)
        finally:
            if self._came:
                self._call_handlers()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Stands in for the handlers. It notes a signal until the end of the `with`, and calls the real handler after
        that. It may still be in place then: the first handlers that are put back may raise, and so keep others out.
        """
        if self._holds:
            self._came.setdefault(number, frame)
        else:
            self._handlers[number](number, frame)

    def let_go(self) -> None:
        """Delays nothing any more."""
        self._holds = False


def _is_elsewhere(number: int) -> bool:
    """Whether `signal` refuses to set handlers here: in an embedded Python, it may take another thread for the main
    one than `threading` does.
    """
    try:
        _signal.signal(number, _signal.getsignal(number))
    except ValueError:
        return True
    return False


def _forked() -> None:
    """Ends, in a forked child, the delay that the main thread was in. If another thread forked, the main thread is not
    in the child, and would never end it.
    """
    global _outermost
    if _outermost is not None:
        _outermost.let_go()
        _outermost = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
