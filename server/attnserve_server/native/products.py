"""Products of rows with weights packed for the native library, y = x W^T + b, in float32, float16 or bfloat16.

In: tensors, or addresses. Out: rows. A row's bits depend only on itself and the weight: not on the other rows, nor on
their number, nor on the threads that compute them. Where there is AMX, it multiplies bfloat16.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Final

import torch
from torch.nn.functional import pad

from attnserve_server.native.dtypes import NATIVE_FROM_TORCH
from attnserve_server.native.library import Function, Threads, amx_permitted
from attnserve_server.native.tensors import empty

PANEL: Final = 16
"""Outputs come in multiples of this many, and can be divided there."""

AMX_INPUTS: Final = 32
"""Inputs are padded to multiples of this many where AMX multiplies."""

AMX_SPEED: Final = 6
"""About how many times as fast as vectors AMX is. One thread alone is given so much more work before others help."""

_PRODUCT: Final = struct.Struct("=2Q4q")
PRODUCT_BYTES: Final = _PRODUCT.size


class PackedWeight:
    """A weight, and a bias if there is one, as the library reads them."""

    def __init__(self, panels: torch.Tensor, bias: torch.Tensor | None, amx_inputs: int = 0) -> None:
        """Contiguous panels [outputs / PANEL, inputs, PANEL] of a dtype that the library knows, and bias [outputs],
        always of float32. For AMX: panels [outputs / PANEL, padded inputs / 2, PANEL, 2] of bfloat16, and the number of
        inputs, `amx_inputs`.

        Rows and results of the product have the dtype of the panels.
        """
        self._panels, self._bias, self._amx_inputs = panels, bias, amx_inputs
        self.amx = amx_inputs > 0
        """Whether AMX is to multiply."""
        self.outputs, self.inputs, self.dtype = len(panels) * PANEL, amx_inputs or panels.shape[1], panels.dtype
        self.struct = _PRODUCT.pack(
            panels.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            self.inputs,
            self.outputs,
            NATIVE_FROM_TORCH[panels.dtype],
            self.amx,
        )
        """The weight's `struct product` (`attention.h`), valid as long as this object lives."""

    @staticmethod
    def of(weight: torch.Tensor, bias: torch.Tensor | None, amx: bool = False) -> PackedWeight:
        """A copy of a weight [outputs, inputs], padded with outputs of 0 to a multiple of PANEL; `amx` says that AMX is
        to multiply.
        """
        outputs, inputs = weight.shape
        missing, missing_inputs = -outputs % PANEL, -inputs % AMX_INPUTS if amx else 0
        padded = pad(weight, (0, missing_inputs, 0, missing)) if missing or missing_inputs else weight
        panels = padded.reshape(-1, PANEL, padded.shape[1] // 2, 2) if amx else padded.reshape(-1, PANEL, inputs)
        bias = None if bias is None else pad(bias.float(), (0, missing))
        panels = panels.transpose(1, 2)
        return PackedWeight(empty(panels.shape, panels.dtype).copy_(panels), bias, inputs if amx else 0)

    def part(self, columns: slice) -> PackedWeight:
        """A view of some outputs, which begin and end at multiples of PANEL."""
        panels = self._panels[columns.start // PANEL : columns.stop // PANEL]
        return PackedWeight(panels, None if self._bias is None else self._bias[columns], self._amx_inputs)


class Products:
    """The library's products, for one instruction set."""

    def __init__(self, instructions: str, threads_for: Callable[[int], Threads | None]) -> None:
        """`threads_for` says with which threads the calling one computes a product of some FLOPs (`Function`). Raises
        OSError if there is no library.
        """
        self.amx: Final = instructions == "AVX-512" and amx_permitted()
        """Whether AMX multiplies bfloat16."""
        address, size = ctypes.c_void_p, ctypes.c_int64
        self._multiply = Function("multiply", instructions, ctypes.c_char_p, address, size, address, size, size)
        self._threads_for = threads_for

    def packed(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        """A copy of a weight [outputs, inputs], packed for what multiplies it fastest."""
        return PackedWeight.of(weight, bias, amx=self.amx and weight.dtype == torch.bfloat16)

    def multiply(self, weight: PackedWeight, rows: torch.Tensor) -> torch.Tensor:
        """[n, inputs] to [n, outputs], both of the weight's dtype. Raises ValueError for other rows; MemoryError."""
        if rows.dtype != weight.dtype or rows.shape[1] != weight.inputs:
            raise ValueError(
                f"rows: expected {weight.inputs} columns of {weight.dtype}, got {rows.shape[1]} of {rows.dtype}"
            )
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        count = len(rows)
        result = rows.new_empty(count, weight.outputs)
        flops = 2 * count * weight.inputs * weight.outputs
        threads = self._threads_for(flops // AMX_SPEED if weight.amx else flops)
        self._multiply(
            threads, weight.struct, rows.data_ptr(), rows.stride(0), result.data_ptr(), weight.outputs, count
        )
        return result
