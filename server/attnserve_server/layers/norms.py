"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019) of rows, computed in at least float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import torch
from torch.nn.functional import layer_norm

from attnserve_server.layers.specification import Norm

NormFunction: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""[n, width] to [n, width], of the same dtype."""


def build_norm(norm: Norm, parameters: Mapping[str, torch.Tensor], prefix: str) -> NormFunction:
    """The norm with the parameters `prefix`weight and `prefix`bias, if there are any."""
    weight, bias = parameters.get(f"{prefix}weight"), parameters.get(f"{prefix}bias")
    if weight is not None:
        # Few numbers, kept in the dtype of the computation: adding 1 would cost half precision most of its digits.
        weight = weight.to(_wide(weight.dtype))
        weight = weight + 1 if norm.unit_offset else weight
    bias = None if bias is None else bias.to(_wide(bias.dtype))
    return partial(_layer_norm if norm.kind == "layer" else _rms_norm, weight=weight, bias=bias, epsilon=norm.epsilon)


def _layer_norm(
    rows: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """Of x, (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias."""
    return layer_norm(rows.to(_wide(rows.dtype)), rows.shape[-1:], weight, bias, epsilon).to(rows.dtype)


def _rms_norm(
    rows: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """Of x, x / sqrt(mean(x^2) + epsilon) * weight + bias."""
    wide = rows.to(_wide(rows.dtype))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    if weight is not None:
        wide = wide * weight
    if bias is not None:
        wide = wide + bias
    return wide.to(rows.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
