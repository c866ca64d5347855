"""Gives callers and a server processors of their own, as they would have on machines of their own.

To send a flood of calls takes as much processor time as to refuse it. If both shared processors, the callers would take
that time from the server, and the experiment would measure its callers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.chaos.victim import Victim


@contextmanager
def apart(victim: Victim) -> Iterator[tuple[int, int]]:
    """Starts a server on half of the processors that this process may use, and keeps this process to the others. Tells
    how many each has. If there is only one processor, or no way to choose, they share.
    """
    if not hasattr(os, "sched_setaffinity"):
        with victim:
            yield os.cpu_count() or 1, os.cpu_count() or 1
        return
    usable = sorted(os.sched_getaffinity(0))
    half = len(usable) // 2
    of_callers, of_server = usable[:half] or usable, usable[half:]
    try:
        _keep_to(of_server)  # which the server inherits
        with victim:
            _keep_to(of_callers)
            yield len(of_server), len(of_callers)
    finally:
        _keep_to(usable)


def _keep_to(processors: list[int]) -> None:
    """Keeps every thread of this process, and those that they start, to some processors."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), processors)
