"""A resident multi-head layer whose answers are known: causal self-attention with random weights, in float64 here."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

from benchmarks.chaos.questions import Array, exact

NAME: Final = "projection"
SPARE: Final = "spare"
"""The same layer by another name, defined but not loaded at the start."""
SPARE_FILE: Final = "spare.toml"
"""The file with its definition."""
WIDTH, HEADS = 64, 4
TOLERANCE: Final = 1e-5
"""How far an output may be from the exact one: it is a sum of 64 products of such sums, in float32."""


def write(directory: Path) -> Path:
    """Writes the layer into a directory. Returns the file of definitions that the server is to load."""
    save_file({f"{name}.weight": weight for name, weight in _weights().items()}, directory / "projection.safetensors")
    for name, file in ((NAME, "layers.toml"), (SPARE, SPARE_FILE)):
        parameters = "".join(f'"{each}.weight" = "{each}.weight"\n' for each in _weights())
        definition = (
            f'[[layers]]\nname = "{name}"\nkind = "multi_head"\nfile = "projection.safetensors"\nheads = {HEADS}\n'
            f"causal = true\n[layers.parameters]\n{parameters}"
        )
        (directory / file).write_text(definition, "utf-8")
    return directory / "layers.toml"


def expected(inputs: Array) -> Array:
    """The layer's output [L, 64] by the definition, in float64."""
    weights = {name: weight.astype(np.float64) for name, weight in _weights().items()}
    query, key, value = (
        (inputs @ weights[name].T).reshape(len(inputs), HEADS, -1).swapaxes(0, 1) for name in ("query", "key", "value")
    )
    together = exact(query, key, value, True).swapaxes(0, 1).reshape(len(inputs), WIDTH)
    return np.asarray(together @ weights["output"].T)


@cache
def _weights() -> dict[str, Array]:
    """Random weights; what they are multiplied with keeps about the same size."""
    random = np.random.default_rng(0)
    normal = random.standard_normal((4, WIDTH, WIDTH), dtype=np.float32) * np.float32(WIDTH**-0.5)
    return dict(zip(("query", "key", "value", "output"), normal, strict=True))
