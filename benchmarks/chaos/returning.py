"""The overload of `overload.py`, by callers who come back: the SDK sends again what a full server has refused."""

from __future__ import annotations

from typing import Final

from benchmarks.chaos import overload
from benchmarks.chaos.outcome import Figure
from benchmarks.chaos.ways import Sdk

PROMISE: Final = (
    "The same with the SDK, which retries refused calls three times at most: it retries no more calls than are "
    "answered, and while the server says that it is full, begins no more; others are told without it. How long calls "
    "take that were retried is not promised."
)


def run(minutes: float) -> list[Figure]:
    """Does it, for a minute of overload at most."""
    return overload.run(minutes, Sdk)
