"""The overload of `overload.py`, by callers each of whose calls is an RPC."""

from __future__ import annotations

from typing import Final

from benchmarks.chaos import overload
from benchmarks.chaos.outcome import Figure
from benchmarks.chaos.ways import Unary

PROMISE: Final = (
    "The same by unary calls, of which refusing one takes more of the event loop's time: the rest is told "
    "RESOURCE_EXHAUSTED with a delay, and gRPC itself cancels none."
)


def run(minutes: float) -> list[Figure]:
    """Does it, for a minute of overload at most."""
    return overload.run(minutes, Unary)
