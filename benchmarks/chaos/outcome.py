"""What an experiment found, as it is written to a JSON file and read again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """Something that was counted or measured; and the bounds that it was promised to keep, if any."""

    name: str
    value: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def promised(self) -> bool:
        """Whether a promise is about it."""
        return self.at_least is not None or self.at_most is not None

    @property
    def kept(self) -> bool:
        """Whether it is within its bounds. NaN is not."""
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)

    @property
    def bound(self) -> str:
        """Its bounds in words: `0`, `at most 5`, `1 to 3`."""
        if self.at_least == self.at_most:
            return "" if self.at_least is None else f"{self.at_least:.6g}"
        if self.at_least is None:
            return f"at most {self.at_most:.6g}"
        return f"at least {self.at_least:.6g}" if self.at_most is None else f"{self.at_least:.6g} to {self.at_most:.6g}"


def exactly(name: str, value: float, expected: float, unit: str = "") -> Figure:
    """A figure that is promised to be exactly this number."""
    return Figure(name, value, unit, expected, expected)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One experiment: what is promised, and what was found."""

    experiment: str
    """Its name."""
    promise: str
    """What it tries to break."""
    machine: dict[str, str | int]
    """The machine that it was made on, as `machine.describe` has it."""
    begun: str
    """When it began, as ISO 8601."""
    minutes: float
    """The `minutes` that it was given."""
    seconds: float
    """How long it took in all."""
    load: tuple[float, float] | None
    """The load averages of the last minute, before and after; None if they are unknown."""
    figures: list[Figure]
    """What was counted and measured."""

    @property
    def kept(self) -> bool:
        """Whether the promise was kept."""
        return all(figure.kept for figure in self.figures)


@dataclass(frozen=True, slots=True)
class Result:
    """The last outcome of each experiment."""

    outcomes: list[Outcome]

    def write(self, path: Path) -> None:
        """Writes the JSON file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")

    @staticmethod
    def read(path: Path) -> Result:
        """Reads the JSON file."""
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return Result([_outcome(**outcome) for outcome in content["outcomes"]])


def _outcome(figures: list[dict[str, Any]], load: list[float] | None, **content: Any) -> Outcome:
    before_and_after = None if load is None else (load[0], load[1])
    return Outcome(figures=[Figure(**figure) for figure in figures], load=before_and_after, **content)
