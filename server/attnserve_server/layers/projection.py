"""Linear maps of rows, y = x W^T + b; several maps of the same rows are one matrix product.

Rows whose width is not a multiple of WIDTH are padded with zeros, which weigh nothing: among rows of arbitrary
alignment, some would be multiplied in another order than others.
"""

from __future__ import annotations

import itertools
from collections.abc import MutableMapping, Sequence

import torch
from torch.nn.functional import pad

from attnserve_server.layers.product import Product, product_of
from attnserve_server.native.products import Products
from attnserve_server.native.tensors import empty

WIDTH = 16
"""Rows whose width is a multiple of this have equal alignment, and so have outputs that begin at such a multiple."""


class Projection:
    """Maps of the same rows, side by side. `columns` says where each map's outputs are among all outputs.

    Columns between them, up to a multiple of WIDTH, are 0.
    """

    def __init__(self, product: Product, inputs: int, columns: Sequence[slice]) -> None:
        self.product, self.columns = product, columns
        self._inputs = inputs
        self.width = sum(_whole(each.stop - each.start) for each in columns)
        """The number of all columns, those between the maps included."""
        self.row_flops = 2 * inputs * self.width
        """What one row costs."""

    @staticmethod
    def of(
        weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], products: Products | None
    ) -> Projection:
        """The maps with some weights, with biases or without, by `products` if they support them."""
        widths = [_whole(len(weight)) for weight in weights]
        starts = itertools.accumulate(widths, initial=0)
        columns = [slice(start, start + len(weight)) for start, weight in zip(starts, weights, strict=False)]
        weight = _joined([_filled(_widened(weight), width) for weight, width in zip(weights, widths, strict=True)])
        if all(bias is None for bias in biases):
            return Projection(product_of(weight, None, products), weight.shape[1], columns)
        there = [
            weight.new_zeros(width) if bias is None else _filled(bias, width)
            for bias, width in zip(biases, widths, strict=True)
        ]
        return Projection(product_of(weight, _joined(there), products), weight.shape[1], columns)

    def part(self, first: int, last: int) -> Projection:
        """The maps from `first` up to `last`, sharing memory. Only if `divides` (`product`) is true of the weight."""
        begin = self.columns[first].start
        end = begin + sum(_whole(each.stop - each.start) for each in self.columns[first:last])
        columns = [slice(each.start - begin, each.stop - begin) for each in self.columns[first:last]]
        return Projection(self.product.part(slice(begin, end)), self._inputs, columns)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, inputs] to [n, all columns]."""
        return self.product(_widened(rows))


class Linear:
    """One map."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, products: Products | None) -> None:
        weight = _widened(weight)
        self.row_flops = 2 * weight.numel()
        """What one row costs."""
        self.product = product_of(weight, bias, products)

    @staticmethod
    def of(parameters: MutableMapping[str, torch.Tensor], name: str, products: Products | None) -> Linear:
        """The map with the parameters `name`.weight and, if there is one, `name`.bias, which are removed from
        `parameters`; by `products` if they support it.
        """
        return Linear(parameters.pop(f"{name}.weight"), parameters.pop(f"{name}.bias", None), products)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, inputs] to [n, outputs]."""
        return self.product(_widened(rows))


def _whole(width: int) -> int:
    return -(-width // WIDTH) * WIDTH


def _widened(rows: torch.Tensor) -> torch.Tensor:
    """Rows padded with columns of 0 to a multiple of WIDTH."""
    missing = _whole(rows.shape[1]) - rows.shape[1]
    return pad(rows, (0, missing)) if missing else rows


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first = parts[0]
    if len(parts) == 1:
        return first
    shape = sum(len(part) for part in parts), *first.shape[1:]
    return torch.cat(list(parts), out=empty(shape, first.dtype, first.device))


def _filled(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor padded with rows of 0 to `rows` rows."""
    missing = rows - len(tensor)
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
