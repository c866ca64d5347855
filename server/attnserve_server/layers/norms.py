"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019) of rows, computed in at least float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import layer_norm

from attnserve_server.kernels import accumulation_dtype
from attnserve_server.layers.specification import Norm, NormKind


@dataclass(frozen=True, slots=True)
class NormRows:
    """A norm with its parameters [width], which have the dtype of the computation, or None."""

    kind: NormKind
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    epsilon: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, width] to [n, width], of the same dtype.

        Of x, `layer` is (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias, and `rms` is
        x / sqrt(mean(x^2) + epsilon) * weight + bias.
        """
        wide = rows.to(accumulation_dtype(rows.dtype))
        if self.kind == "layer":
            return layer_norm(wide, rows.shape[-1:], self.weight, self.bias, self.epsilon).to(rows.dtype)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        if self.weight is not None:
            wide = wide * self.weight
        if self.bias is not None:
            wide = wide + self.bias
        return wide.to(rows.dtype)


def build_norm(norm: Norm, parameters: Mapping[str, torch.Tensor], prefix: str) -> NormRows:
    """The norm with the parameters `prefix`weight and `prefix`bias, if there are any."""
    weight, bias = parameters.get(f"{prefix}weight"), parameters.get(f"{prefix}bias")
    if weight is not None:
        # Few numbers, kept in the dtype of the computation: adding 1 would cost half precision most of its digits.
        weight = weight.to(accumulation_dtype(weight.dtype))
        weight = weight + 1 if norm.unit_offset else weight
    bias = None if bias is None else bias.to(accumulation_dtype(bias.dtype))
    return NormRows(norm.kind, weight, bias, norm.epsilon)
