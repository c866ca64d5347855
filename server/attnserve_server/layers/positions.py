"""What depends on positions alone: rotations of queries and keys, and sinusoids.

Angles are computed in float64: float32 is not precise enough for distant positions.
"""

from __future__ import annotations

import torch

from attnserve_server.layers.specification import Rotary
from attnserve_server.native.passages import Turning


def angles(positions: torch.Tensor, base: float, width: int) -> torch.Tensor:
    """Float64 [n, ceil(width / 2)]: position times base^(-2i/width)."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
    return positions.to(torch.float64).unsqueeze(1) * torch.pow(base, -exponents)


def sinusoids(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Float64 [n, width]: sin(p / 10000^(2i/width)) at 2i, cos of the same at 2i + 1 (Vaswani et al. 2017)."""
    of_pairs = angles(positions, 10000.0, width)
    return torch.stack([of_pairs.sin(), of_pairs.cos()], -1).flatten(1)[:, :width]


class Rotation:
    """Rotary position embedding (Su et al. 2021): `of` computes the rotations of positions, `rotate` applies them."""

    def __init__(self, rotary: Rotary, dtype: torch.dtype) -> None:
        self._rotary = rotary
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def of(self, positions: torch.Tensor) -> torch.Tensor:
        """[n, width]: the cosines of all pairs, then their sines, in at least float32."""
        of_pairs = angles(positions + self._rotary.offset, self._rotary.base, self._rotary.width)
        return torch.cat([of_pairs.cos(), of_pairs.sin()], 1).to(self._dtype)

    def turning(self, columns: slice, head_dim: int) -> Turning:
        """What `rotate` does to heads of this width, for the native library; `columns` are theirs in a row."""
        heads = (columns.stop - columns.start) // head_dim
        return Turning(columns.start, heads, head_dim, self._rotary.width, self._rotary.interleaved)

    def rotate(self, heads: torch.Tensor, rotations: torch.Tensor) -> None:
        """Rotates heads [n, H, D] in place, those of row r by the rotations of row r."""
        cos, sin = rotations.unsqueeze(1).chunk(2, -1)
        turning = heads[..., : self._rotary.width]
        if self._rotary.interleaved:
            first, second = turning[..., 0::2], turning[..., 1::2]
        else:
            first, second = turning.chunk(2, -1)
        x, y = first.to(self._dtype), second.to(self._dtype)
        rotated = x * cos - y * sin, y * cos + x * sin
        first.copy_(rotated[0])
        second.copy_(rotated[1])
