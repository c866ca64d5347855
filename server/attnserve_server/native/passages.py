"""What a stack of blocks computes from one attention to the next, in one call of the library.

In: rows, and what an attention made of them, as tensors. Out: the rows behind the parts in between, and their
projection for the next attention. A row's bits depend only on itself and the weights: not on the other rows, nor on
their number, nor on the threads that compute them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

import torch

from attnserve_server.native.dtypes import NATIVE_FROM_TORCH
from attnserve_server.native.library import Function, Threads
from attnserve_server.native.products import PRODUCT_BYTES, PackedWeight

NORM_CODES: Final = {"rms": 1, "layer": 2}
ACTIVATION_CODES: Final = {"relu": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3}
"""Norms and activations, as the library encodes them."""

READING: Final = 8
"""FLOPs that take as long as reading a byte of a weight: with few rows, that is what takes the time."""

_SHAPE: Final = struct.Struct("=2q")
_NORM: Final = struct.Struct("=2Qqd")
_TURNING: Final = struct.Struct("=5q")
_PASSED: Final = struct.Struct("=5Qq")


class Norm(NamedTuple):
    """A norm of rows. weight and bias, if there are any, are float32 [width]."""

    kind: Literal["layer", "rms"]
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    epsilon: float


class Turning(NamedTuple):
    """Heads that are rotated in place: where the first one begins in a projected row, and how many there are; the width
    of a head, how many of its first elements are rotated, and whether pairs are adjacent.
    """

    column: int
    heads: int
    head_dim: int
    width: int
    interleaved: bool


class Forward(NamedTuple):
    """A feed-forward part with its norms: down(activation(up)), or gated, down(activation(first half of up) * rest)."""

    before: Norm | None
    up: PackedWeight
    activation: str
    gated: bool
    down: PackedWeight
    behind: Norm | None


class Passage:
    """A passage packed for the library (`struct`), which is valid as long as this object lives.

    It begins with the attention's output projection, if it has one, its residual connection, and the norm `behind` it.
    It ends with `following`, the projection for the next attention, after the norm `before`; without `following`, the
    stack ends.
    """

    def __init__(
        self,
        *,
        width: int,
        dtype: torch.dtype,
        output: PackedWeight | None = None,
        behind: Norm | None = None,
        forward: Forward | None = None,
        before: Norm | None = None,
        following: PackedWeight | None = None,
        turnings: tuple[Turning | None, Turning | None] = (None, None),
    ) -> None:
        """`turnings` are those of queries and keys, which have the same width of rotations."""
        self.width, self.dtype = width, dtype
        self.attended = width if output is None else output.inputs
        self.next = None if following is None else following.outputs
        self.is_normed = before is not None
        self.turned = max((each.width for each in turnings if each is not None), default=0)
        up, down = (None, None) if forward is None else (forward.up, forward.down)
        self._alive = output, behind, forward, before, following  # `struct` has the addresses of their tensors
        weights = [each for each in (output, up, down, following) if each is not None]
        self.elements = sum(each.inputs * each.outputs for each in weights)
        """The number of elements of all weights."""
        self.struct = b"".join(
            (
                _SHAPE.pack(NATIVE_FROM_TORCH[dtype], width),
                _product(output),
                _norm(behind),
                _norm(None if forward is None else forward.before),
                _product(up),
                _product(down),
                _SHAPE.pack(*((0, 0) if forward is None else (forward.gated, ACTIVATION_CODES[forward.activation]))),
                _norm(None if forward is None else forward.behind),
                _norm(before),
                _product(following),
                *(_TURNING.pack(*(each or (0,) * 5)) for each in turnings),
            )
        )

    def check(self, rows: torch.Tensor, attended: torch.Tensor | None, rotations: torch.Tensor | None) -> None:
        """Raises ValueError if tensors are not as it takes them: the library could not tell."""
        count = len(rows)
        _check("rows", rows, self.dtype, count, self.width)
        if attended is not None:
            _check("attended", attended, self.dtype, count, self.attended)
        if self.turned:
            _check("rotations", rotations, torch.float32, count, self.turned)


def _product(weight: PackedWeight | None) -> bytes:
    return bytes(PRODUCT_BYTES) if weight is None else weight.struct


def _norm(norm: Norm | None) -> bytes:
    if norm is None:
        return bytes(_NORM.size)
    addresses = (0 if each is None else each.data_ptr() for each in (norm.weight, norm.bias))
    return _NORM.pack(*addresses, NORM_CODES[norm.kind], norm.epsilon)


class Passages:
    """The library's passages, for one instruction set."""

    def __init__(self, instructions: str, threads_for: Callable[[int], Threads | None]) -> None:
        """`threads_for` says with which threads the calling one computes what takes as long as this many FLOPs
        (`Function`). Raises OSError if there is no library.
        """
        self._pass = Function("pass", instructions, ctypes.c_char_p, ctypes.c_char_p)
        self._threads_for = threads_for

    def run(
        self,
        passage: Passage,
        rows: torch.Tensor,
        attended: torch.Tensor | None,
        rotations: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a passage makes of rows [n, width]: the rows behind its parts, and what it ends with, projections
        [n, outputs] or, at the end of a stack, rows [n, width].

        `attended` [n, Hq Dv] is what the attention gives for them; None if the passage begins the stack. `rotations`
        [n, width of rotations], float32, cosines before sines, if it has any. Raises ValueError if tensors do not fit,
        or are not contiguous; MemoryError.
        """
        passage.check(rows, attended, rotations)
        count = len(rows)
        behind = rows if attended is None else torch.empty_like(rows)
        ready = behind
        if passage.next is not None or passage.is_normed:
            ready = rows.new_empty(count, passage.width if passage.next is None else passage.next)
        passed = _PASSED.pack(
            rows.data_ptr(),
            0 if attended is None else attended.data_ptr(),
            0 if rotations is None else rotations.data_ptr(),
            0 if attended is None else behind.data_ptr(),
            0 if ready is behind else ready.data_ptr(),
            count,
        )
        threads = self._threads_for(effort_of(count, rows.itemsize, passage.elements))
        self._pass(threads, passage.struct, passed)
        return behind, ready


def effort_of(rows: int, itemsize: int, elements: int) -> int:
    """What it costs to multiply rows by weights of so many elements, in FLOPs or what takes as long."""
    return max(2 * rows, READING * itemsize) * elements


def _check(name: str, rows: torch.Tensor | None, dtype: torch.dtype, count: int, width: int) -> None:
    """Raises ValueError if rows are not contiguous [count, width] of a dtype."""
    if rows is None or rows.shape != (count, width) or rows.dtype != dtype or not rows.is_contiguous():
        came = "none" if rows is None else f"{list(rows.shape)} of {rows.dtype}"
        raise ValueError(f"{name}: expected contiguous [{count}, {width}] of {dtype}, got {came}")
