"""The overload of `overload.py`, with unary calls."""

from __future__ import annotations

from typing import Final

from benchmarks.chaos import overload
from benchmarks.chaos.outcome import Figure
from benchmarks.chaos.ways import Unary

PROMISE: Final = (
    "The same with unary calls, each of which takes more of the event loop's time to refuse: the rest is refused with "
    "RESOURCE_EXHAUSTED and a delay, and gRPC itself cancels none."
)


def run(minutes: float) -> list[Figure]:
    """Runs the experiment, with a minute of overload at most."""
    return overload.run(minutes, Unary)
