"""The overload of `overload.py`, by callers with the SDK: it sends refused calls again when the server has room."""

from __future__ import annotations

from typing import Final

from benchmarks.chaos import overload
from benchmarks.chaos.outcome import Figure
from benchmarks.chaos.ways import Sdk

PROMISE: Final = (
    "The same with the SDK, which sends no more calls than the server has room for: others wait within their timeout, "
    "or are told at once that it does not suffice. How long calls take that have waited is not promised."
)


def run(minutes: float) -> list[Figure]:
    """Runs the experiment, with a minute of overload at most."""
    return overload.run(minutes, Sdk)
