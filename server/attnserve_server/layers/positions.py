"""What depends on positions alone: rotations of queries and keys, and sinusoids.

Angles are computed in float64: float32 is not precise enough for distant positions.
"""

from __future__ import annotations

import torch

from attnserve_server.devices.compute import Compute
from attnserve_server.kernels import accumulation_dtype
from attnserve_server.layers.specification import Rotary
from attnserve_server.native.passages import Turning


def frequencies(base: float, width: int, device: torch.device) -> torch.Tensor:
    """Float64 [ceil(width / 2)]: base^(-2i/width)."""
    return torch.pow(base, -torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)


def angles(positions: torch.Tensor, of_pairs: torch.Tensor) -> torch.Tensor:
    """Float64 [n, pairs]: positions times frequencies."""
    return positions.to(torch.float64).unsqueeze(1) * of_pairs


def sinusoids(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Float64 [n, width]: sin(p / 10000^(2i/width)) at 2i, cos of the same at 2i + 1 (Vaswani et al. 2017)."""
    of_pairs = angles(positions, frequencies(10000.0, width, positions.device))
    return torch.stack([of_pairs.sin(), of_pairs.cos()], -1).flatten(1)[:, :width]


class Rotation:
    """Rotary position embedding (Su et al. 2021): `of` computes the rotations of positions, `rotate` applies them."""

    def __init__(self, rotary: Rotary, dtype: torch.dtype, compute: Compute) -> None:
        self._rotary = rotary
        self._dtype = accumulation_dtype(dtype)
        self._frequencies = frequencies(rotary.base, rotary.width, compute.torch_device)
        native = compute.native if self._dtype == torch.float32 else None
        self._rotations = None if native is None else native.rotations
        self.elementwise = () if self._rotations is not None else (rotary.width,)
        """The widths of rows of elementwise functions by torch."""

    def of(self, positions: torch.Tensor) -> torch.Tensor:
        """[n, width]: the cosines of all pairs, then their sines, in at least float32."""
        if self._rotary.offset:
            positions = positions + self._rotary.offset
        if self._rotations is not None:
            return self._rotations.of(positions, self._frequencies)
        of_pairs = angles(positions, self._frequencies)
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
