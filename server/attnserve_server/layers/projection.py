"""Linear maps of rows, y = x W^T + b; several of the same rows as one product of matrices.

Rows are filled up with zeros, which weigh nothing, to whole multiples of WIDTH elements, where they are not that wide
already: of rows that begin anywhere in memory, some would be multiplied in another order than others.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import linear, pad

WIDTH = 16
"""Rows as wide as a multiple of this many elements are aligned alike, and so are outputs that begin at one."""


class Projection:
    """Maps of the same rows, side by side. `columns` says where each one's outputs are among those of all.

    Columns between them, up to a multiple of WIDTH, are 0.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, columns: Sequence[slice]) -> None:
        self._weight, self._bias, self.columns = weight, bias, columns

    @staticmethod
    def of(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> Projection:
        """The maps of some weights, with biases or without."""
        widths = [_whole(len(weight)) for weight in weights]
        starts = itertools.accumulate(widths, initial=0)
        columns = [slice(start, start + len(weight)) for start, weight in zip(starts, weights, strict=False)]
        weight = _joined([_filled(_widened(weight), width) for weight, width in zip(weights, widths, strict=True)])
        if all(bias is None for bias in biases):
            return Projection(weight, None, columns)
        there = [
            weight.new_zeros(width) if bias is None else _filled(bias, width)
            for bias, width in zip(biases, widths, strict=True)
        ]
        return Projection(weight, _joined(there), columns)

    @property
    def width(self) -> int:
        """The columns of all outputs."""
        return len(self._weight)

    @property
    def row_flops(self) -> int:
        """What one row costs."""
        return 2 * self._weight.numel()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, inputs] to [n, width]."""
        return apply_linear(rows, self._weight, self._bias)

    def part(self, first: int, stop: int) -> Projection:
        """Some of the maps, in the same memory."""
        begin, end = self.columns[first].start, _whole(self.columns[stop - 1].stop)
        columns = [slice(each.start - begin, each.stop - begin) for each in self.columns[first:stop]]
        return Projection(self._weight[begin:end], None if self._bias is None else self._bias[begin:end], columns)


class Linear:
    """One map."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = _widened(weight), bias

    @staticmethod
    def of(parameters: Mapping[str, torch.Tensor], name: str) -> Linear:
        """The map of the parameters `name`.weight and `name`.bias, if there is one."""
        return Linear(parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))

    @property
    def row_flops(self) -> int:
        """What one row costs."""
        return 2 * self._weight.numel()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, inputs] to [n, outputs]."""
        return apply_linear(rows, self._weight, self._bias)


def apply_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[n, inputs] to [n, outputs]; sums are float32 at least, whatever the dtype. `weight` has been widened."""
    rows = _widened(rows)
    if rows.dtype == torch.float16 and rows.device.type == "cpu":
        # Without instructions for float16 (AVX512-FP16), torch's product takes four times as long as float32's.
        return linear(rows.float(), weight.float(), None if bias is None else bias.float()).to(rows.dtype)
    return linear(rows, weight, bias)


def _whole(width: int) -> int:
    return -(-width // WIDTH) * WIDTH


def _widened(rows: torch.Tensor) -> torch.Tensor:
    """Rows with columns of 0 behind them, up to a multiple of WIDTH."""
    missing = _whole(rows.shape[1]) - rows.shape[1]
    return pad(rows, (0, missing)) if missing else rows


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _filled(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor with rows of 0 behind it, up to so many."""
    missing = rows - len(tensor)
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
