"""What layers of checkpoints are applied to, and what their modules make of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from checkpoints import VOCABULARY, Checkpoint

LENGTHS = [7, 1, 12, 3, 0]
CONTEXT_LENGTHS = [5, 9, 1, 30, 2]

FLOAT32 = 2e-6
"""The float32 layers' error, relative to the largest element."""


def sequences(layer: Checkpoint, lengths: list[int] = LENGTHS) -> list[torch.Tensor]:
    if layer.width == 0:
        return [torch.randint(VOCABULARY, (length,)) for length in lengths]
    return [torch.randn(length, layer.width, dtype=torch.float64) for length in lengths]


def contexts(layer: Checkpoint) -> list[torch.Tensor] | None:
    if layer.context_width == 0:
        return None
    return [torch.randn(length, layer.context_width, dtype=torch.float64) for length in CONTEXT_LENGTHS]


def references(layer: Checkpoint, module: Any, xs: list[torch.Tensor], zs: list[torch.Tensor] | None) -> torch.Tensor:
    """The module's output for each sequence alone, packed."""
    alone = [layer.reference(module, x, None if zs is None else zs[n]) for n, x in enumerate(xs) if len(x)]
    return torch.cat(alone)


def typed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def packed(xs: list[torch.Tensor], zs: list[torch.Tensor] | None, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The arguments of `apply` for packed sequences."""
    options: dict[str, Any] = {"lengths": [len(x) for x in xs]}
    if zs is not None:
        options |= {"context": torch.cat(zs).to(dtype), "context_lengths": [len(z) for z in zs]}
    return typed(torch.cat(xs), dtype), options


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    bound = tolerance * max(1.0, expected.abs().max().item())
    np.testing.assert_allclose(found.double().numpy(), expected.numpy(), rtol=0, atol=bound)
