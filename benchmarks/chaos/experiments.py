"""The experiments, in the order in which they are made."""

from __future__ import annotations

from importlib import import_module
from typing import Final, Protocol, cast

from benchmarks.chaos.outcome import Figure

OVERLOADS: Final = ("overload", "unary", "returning", "returning_unary", "large")
NAMES: Final = ("guilt", "device", "drain", "rolling", "kill", "network", *OVERLOADS, "greedy", "soak")
"""Each is a module of this package."""


class Experiment(Protocol):
    """What an experiment's module has."""

    PROMISE: str
    """What is promised."""

    def run(self, minutes: float) -> list[Figure]:
        """Runs the experiment; for `minutes`, if it has no end of its own."""


def experiment(name: str) -> Experiment:
    """An experiment by its name. It is imported only now: some import torch, and others need none."""
    return cast(Experiment, import_module(f"benchmarks.chaos.{name}"))
