"""The signals that tell the process to stop, and what they do until the server serves.

In: nothing. Out: the signals, for `serving` to take over; a context in which they end the process; and how to end that
at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

STOP_SIGNALS: Final = tuple(
    number
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # as under nohup
)


def exit_at_once(status: int) -> NoReturn:
    """Ends the process without waiting for its threads, when its log is written: that takes two seconds at most."""
    try:
        if shutdown := getattr(sys.modules.get("logging"), "shutdown", None):  # else nothing has been logged yet
            shutdown()
    finally:
        os._exit(status)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Until the server serves, a signal to stop ends the process with status 0, whatever it is loading. By default the
    first process of a container would not get the signal, and be killed when its grace period is over.
    """

    def end(*_: object) -> None:
        exit_at_once(0)

    before = [signal.signal(number, end) for number in STOP_SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(STOP_SIGNALS, before, strict=True):
            if signal.getsignal(number) is end:  # not taken over by serving
                signal.signal(number, handler)
