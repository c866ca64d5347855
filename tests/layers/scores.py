"""Small layers that tests load, replace and break: scores whose weight is visible in the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

PATIENCE_S = 60.0
WIDTH = 6
DEFINITION = """
[[layers]]
name = "{name}"
kind = "general"
file = "{file}"
parameters.score.weight = "weight"
"""
ONE_OF_TWO = DEFINITION.format(name="one", file="two.safetensors")
BROKEN = {
    "no toml": ("[[layers", "broken.toml: expected"),
    "a missing tensor": (ONE_OF_TWO + 'parameters.value.weight = "v"', "value.weight"),
    "a wrong shape": (ONE_OF_TWO + "inputs = 7", r"\[7, 6\], found \[6, 6\]"),
    "no such file": (DEFINITION.format(name="one", file="nothing.safetensors"), "nothing.safetensors"),
    "not safetensors": (DEFINITION.format(name="one", file="layers.toml"), "layers.toml"),
    "an unknown key": (ONE_OF_TWO + "colour = 1", "colour"),
}
"""Definitions of `one` that cannot be loaded, and what the error names."""
X = np.random.default_rng(0).standard_normal((5, WIDTH)).astype(np.float32)


def weight(value: float, width: int = WIDTH) -> torch.Tensor:
    """A score's weight, recognisable by the layer's output."""
    return torch.eye(width) * value


def write(directory: Path) -> None:
    """Writes the definitions of `one` and `two` and their checkpoints; removes everything else."""
    for path in directory.iterdir():
        path.unlink()
    for name, value in (("one", 1.0), ("two", -1.0)):
        save_file({"weight": weight(value)}, directory / f"{name}.safetensors")
    (directory / "layers.toml").write_text(
        "".join(DEFINITION.format(name=name, file=f"{name}.safetensors") for name in ("one", "two"))
    )


def expected(x: np.ndarray[Any, Any], value: float) -> np.ndarray[Any, Any]:
    scores = value * x @ x.T
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    result: np.ndarray[Any, Any] = weights / weights.sum(-1, keepdims=True) @ x
    return result
