"""Standard output that cannot be written any more: the disk is full, or the reader of a pipe has gone. Standard streams
that were closed from the start.

In: the error. Out: a line that says so. Whoever prints catches every OSError, and decides whether that matters.
"""

from __future__ import annotations

import os
import sys
from typing import Final

_STANDARD_ERROR: Final = 2


def occupy_closed() -> None:
    """Makes those of the process's standard streams that are closed lead nowhere. Otherwise sockets would get their
    numbers: what a library writes to standard error would go to a caller, and libuv, which would have to close such a
    socket in the end, would abort the process.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        pass
    os.close(descriptor)


def give_up(error: OSError) -> str:
    """Makes everything else that is printed go nowhere: otherwise Python would fail as it ends. Returns what to tell
    people.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return f"standard output cannot be written: {error.strerror or error}"
