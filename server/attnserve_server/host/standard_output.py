"""Standard output that cannot be written any more: the disk is full, or the reader of a pipe has gone.

In: the error. Out: a line that says so. Whoever prints catches every OSError, and decides whether that matters.
"""

from __future__ import annotations

import os
import sys


def give_up(error: OSError) -> str:
    """Has everything else that is printed go nowhere, or Python fails as it ends. Returns what to tell people."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return f"standard output cannot be written: {error.strerror or error}"
