"""The overload of `returning.py`, with unary calls of the SDK."""

from __future__ import annotations

from typing import Final

from benchmarks.chaos import overload
from benchmarks.chaos.outcome import Figure
from benchmarks.chaos.ways import SdkUnary

PROMISE: Final = "The same with the SDK's unary calls."


def run(minutes: float) -> list[Figure]:
    """Runs the experiment, with a minute of overload at most."""
    return overload.run(minutes, SdkUnary)
