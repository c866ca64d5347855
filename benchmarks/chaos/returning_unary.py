"""The overload of `returning.py`, where the SDK makes each call an RPC."""

from __future__ import annotations

from typing import Final

from benchmarks.chaos import overload
from benchmarks.chaos.outcome import Figure
from benchmarks.chaos.ways import SdkUnary

PROMISE: Final = "The same with the SDK's unary calls."


def run(minutes: float) -> list[Figure]:
    """Does it, for a minute of overload at most."""
    return overload.run(minutes, SdkUnary)
