"""What layers and caches need of a device: row-wise functions and attention, on tensors that are there already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from attnserve_server.devices.native_compute import NativeCompute
from attnserve_server.kernels import AttentionCall, AttentionResult, RaggedResult, ScatteredCall

Item = TypeVar("Item")
Result = TypeVar("Result")
Rows = TypeVar("Rows", torch.Tensor, tuple[torch.Tensor, ...])
RowFunction: TypeAlias = Callable[..., Rows]
"""Tensors of n rows in, tensors of n rows out; each output row depends only on the same row of the inputs."""

ROWS = 16
"""Row counts are multiples of this, except in layers that need no padding (`layers/rows.multiple_of`). The padding rows
at the end have no meaning.

On a CPU, torch multiplies matrices in another order for some row counts, and computes the elements after an array's
last whole vector with other instructions. With multiples of 16 rows, at most MAX_ROWS of them and packed, a row's bits
depend neither on its position nor on the other rows, provided that the widths of matrix products, and of functions like
exp and tanh, are multiples of 16 too. Products of some dtypes divide the rows further (`layers/product.py`).
"""
MAX_ROWS = 512

ALONE_FLOPS = 4_000_000
"""The native library finishes less work than this sooner than another thread could take the GIL and give it back."""


class Scattering(Protocol):
    """A device with a ragged kernel for keys that lie anywhere in memory."""

    def attend_scattered(self, call: ScatteredCall) -> RaggedResult:
        """The result of a call."""

    def send(self, array: NDArray[np.int32]) -> torch.Tensor:
        """Integers on the device, for what is computed from now on, without waiting for the work in flight."""

    def flagged(self, flags: torch.Tensor) -> list[int]:
        """The places of what is true in bool [n] on the device. Waits for it, unless that is done later (`share`)."""


class Compute(Protocol):
    """A device as layers and caches see it; up to `Device.depth` threads use it at once."""

    torch_device: torch.device
    """Where tensors are."""

    native: NativeCompute | None
    """What the native library computes; None where there is none."""

    @property
    def scattering(self) -> Scattering | None:
        """None where there is no kernel for keys that lie anywhere."""

    def share(
        self, compute: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item], flops: Sequence[int]
    ) -> Sequence[Result]:
        """`compute(items)`, or the joined results of several such calls for some of the items each, one per thread. An
        item's result must not depend on the other items; `flops` is the cost of each.
        """

    def rows(self, function: RowFunction[Rows], *tensors: torch.Tensor, flops: int, parallel: bool = False) -> Rows:
        """`function(*tensors)`; all tensors have the same number of rows. `flops` is its cost; `parallel` says that its
        products divide themselves among the device's threads.
        """

    def attend(self, calls: list[AttentionCall], flops: int) -> list[AttentionResult]:
        """The results of calls, in order. `flops` is their total cost."""

    def run_each(self, computations: Sequence[Callable[[], AttentionResult]], flops: int) -> list[AttentionResult]:
        """The results of computations, in order. `flops` is their total cost."""
