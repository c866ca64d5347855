"""What can be wrong with layers before they run: definitions, files and parameters.

In: what is wrong in a definition or a file. Out: `LayerError`, which carries all of it, one `Defect` each, so that the
author of the definitions sees everything at once. Files are named as the definitions name them, never by their path on
this machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from attnserve_server.start_errors import StartError

_UNNAMED: Final = "number "
"""Begins what a layer without a name is called: no name has a blank."""


@dataclass(frozen=True, slots=True)
class Defect:
    """One thing that is wrong: in a file, with a parameter or key of a layer ("" for the file itself)."""

    layer: str
    parameter: str
    file: str
    expected: str
    found: str

    def __str__(self) -> str:
        layer = self.layer if self.layer.startswith(_UNNAMED) else repr(self.layer)
        place = [self.file] + [f"layer {layer}"] * bool(self.layer) + [self.parameter] * bool(self.parameter)
        return f"{': '.join(place)}: expected {self.expected}, found {self.found}"


class LayerError(StartError):
    """Layers that cannot be loaded; `defects` has all that is wrong, and the message a line for each."""

    def __init__(self, defects: Iterable[Defect]) -> None:
        self.defects = tuple(defects)
        super().__init__("\n".join(map(str, self.defects)))


class NoSuchFileError(LayerError):
    """A file that is not there."""


class NoSuchLayerError(LayerError):
    """Names of no layers in a file: a defect for each."""


class Report:
    """Collects what is wrong with one layer."""

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.defects: list[Defect] = []

    def add(self, file: str, parameter: str, expected: str, found: object) -> None:
        """Adds something that is wrong in a file, with a parameter or a key."""
        self.defects.append(Defect(self.layer, parameter, file, expected, str(found)))


def unnamed(index: int) -> str:
    """What the layer at a place in the file, counted from 1, is called if it has no name."""
    return f"{_UNNAMED}{index}"


def bracketed(shape: Iterable[int]) -> str:
    """A shape as the messages write it: `[384, 1536]`."""
    return f"[{', '.join(map(str, shape))}]"


def words_of(error: Exception) -> str:
    """The text of an error; of the system's errors only the reason, because their text has the file's path."""
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
