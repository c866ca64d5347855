"""How definitions and presets refer to tensors, before it is known which file has them and how long they are.

In: a reference, such as to the first of three equal parts of `h.{n}.attn.c_attn.weight`, transposed. Out: a
`ParameterSource` with row numbers, and the shape that it has in a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from attnserve_server.layers.specification import ParameterSource


class TensorInfo(NamedTuple):
    """A tensor's dtype (`float32`, `float16`, `bfloat16`, `float64`; others as safetensors writes them) and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """A tensor, transposed or not, then its rows from `rows[0]` to `rows[1]`, or part `part[0]` of `part[1]` equal
    parts, or all rows.
    """

    tensor: str
    transposed: bool = False
    rows: tuple[int, int] | None = None
    part: tuple[int, int] | None = None

    def numbered(self, number: int) -> Reference:
        """The same with a number for each `{n}` in the tensor's name."""
        return replace(self, tensor=numbered(self.tensor, number))

    def behind(self, prefix: str) -> Reference:
        """The same with a prefix before the tensor's name."""
        return replace(self, tensor=prefix + self.tensor)

    def source(self, tensors: Mapping[str, TensorInfo]) -> ParameterSource:
        """The source in a file with these tensors. Raises ValueError if the rows cannot be divided into equal parts."""
        start, stop = self.rows or (None, None)
        if self.part is not None and self.tensor in tensors:
            index, count = self.part
            rows = _turned(tensors[self.tensor].shape, self.transposed)[:1] or (1,)
            if rows[0] % count:
                raise ValueError(f"{rows[0]} rows")
            start, stop = rows[0] // count * index, rows[0] // count * (index + 1)
        return ParameterSource(tensor=self.tensor, transposed=self.transposed, start=start, stop=stop)


def numbered(name: str, number: int) -> str:
    """A name with a number for each `{n}`."""
    return name.replace("{n}", str(number))


def shape_of(source: ParameterSource, tensor: TensorInfo) -> tuple[int, ...]:
    """The shape of what a source takes from a tensor. Rows beyond the tensor's end are not there."""
    shape = _turned(tensor.shape, source.transposed)
    if not shape or (source.start is None and source.stop is None):
        return shape
    start, stop, _ = slice(source.start, source.stop).indices(shape[0])
    return (max(0, stop - start), *shape[1:])


def matrix_of(shape: Iterable[int]) -> tuple[int, ...]:
    """A shape without axes of length 1 beyond rank 2: a convolution's `[out, in, 1]` is a linear map."""
    axes = list(shape)
    while len(axes) > 2 and 1 in axes:
        axes.remove(1)
    return tuple(axes)


def _turned(shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    matrix = matrix_of(shape)
    return matrix[::-1] if transposed else matrix
