"""The product of rows with one weight, y = x W^T + b, by what is fastest at it where the process runs.

float32, float16 and mostly bfloat16 are multiplied by the native library, where there is one. For few rows it is faster
than MKL, for which torch packs the weight anew each time. And with it, a row's bits depend on nothing but the row and
the weight. It reads the weight in a format of its own, made when a layer is loaded; the original is not kept. Half
precision takes it up to a fifth longer than float32, and less where reading the weight is most of the work (`python -m
benchmarks.products`). bfloat16 is left to oneDNN on AMD with AVX-512, and where there is AMX that the native library
cannot use.

torch multiplies with MKL, which takes its AVX2 path on non-Intel processors. oneDNN, which torch includes too, uses all
their instructions: on a Zen 5 it takes 40 % of the time. It also wants the weight in its own format; `packs` says for
which dtypes that is done, where the native library does not multiply them.

torch's own products sum in another order when there are many rows, so rows are limited to `most_rows` at a time.
"""

from __future__ import annotations

from functools import cache
from typing import Final, Protocol

import torch
from torch.nn.functional import linear

from attnserve_server.devices.compute import MAX_ROWS, ROWS, Compute
from attnserve_server.host.cpus import has_amx, is_amd
from attnserve_server.native.dtypes import NATIVE_FROM_TORCH
from attnserve_server.native.products import PackedWeight, Products


class Product(Protocol):
    """[n, inputs] to [n, outputs]; sums are at least float32, whatever the dtype."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...

    def part(self, columns: slice) -> Product:
        """The product for some of the outputs, sharing memory. These begin and end at multiples of WIDTH
        (`projection`). Only if `divides` is true of the weight.
        """
        ...


GENERATION_FLOPS: Final = 200_000_000
"""Code for costlier products is generated at first use: that takes no longer than the product, about a millisecond."""


def products_of(compute: Compute) -> Products | None:
    """The native library's products on a device; None where there is none."""
    return None if compute.native is None else compute.native.products


def product_of(weight: torch.Tensor, bias: torch.Tensor | None, products: Products | None) -> Product:
    """The product with a weight [outputs, inputs], whose inputs are a multiple of WIDTH (`projection`), by `products`
    if they support it. If the weight is packed, the original is not kept.
    """
    if products is not None and is_native(weight.dtype, products):
        return NativeProduct(products, products.packed(weight, bias), len(weight))
    if _is_packed(weight):
        return _OneDnnProduct(weight, bias)
    return _TorchProduct(weight, bias)


def divides(weight: torch.Tensor, products: Products | None) -> bool:
    """Whether the product with a weight can be divided by `part`; otherwise the weight is packed for one product."""
    return is_native(weight.dtype, products) or not _is_packed(weight)


def is_native(dtype: torch.dtype, products: Products | None) -> bool:
    """Whether `products` multiply weights of a dtype."""
    if products is None or dtype not in NATIVE_FROM_TORCH:
        return False
    return dtype != torch.bfloat16 or products.amx or not (packs(dtype) or has_amx())


class NativeProduct:
    """A product by the native library, divided among the device's threads if the calling one has their help."""

    def __init__(self, products: Products, weight: PackedWeight, outputs: int) -> None:
        self._products, self.weight, self._outputs = products, weight, outputs

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        result = self._products.multiply(self.weight, rows)
        return result if self._outputs == self.weight.outputs else result[:, : self._outputs].contiguous()

    def part(self, columns: slice) -> Product:
        """Some of the outputs."""
        return NativeProduct(self._products, self.weight.part(columns), columns.stop - columns.start)


class _TorchProduct:
    """A product by torch, which reads the weight as it lies in memory."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        # Without float16 instructions (AVX512-FP16), torch's float16 product takes four times as long as float32.
        self._widens = weight.dtype == torch.float16 and weight.device.type == "cpu"
        self._most = most_rows(weight.dtype) if weight.device.type == "cpu" else None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if not self._widens:
            return self._multiply(rows, self._weight, self._bias)
        bias = None if self._bias is None else self._bias.float()
        return self._multiply(rows.float(), self._weight.float(), bias).half()

    def _multiply(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._most is None or len(rows) <= self._most:
            return linear(rows, weight, bias)
        return torch.cat([linear(part, weight, bias) for part in torch.split(rows, self._most)])

    def part(self, columns: slice) -> Product:
        """Some of the outputs."""
        return _TorchProduct(self._weight[columns], None if self._bias is None else self._bias[columns])


def most_rows(dtype: torch.dtype) -> int:
    """How many rows torch multiplies at once on this CPU: with more, a row's bits would depend on their number.

    On an Intel Xeon, oneDNN with AMX sums bfloat16 in another order from 48 rows of 512 or more inputs on, and MKL
    float64 from 192 rows of 1,536 inputs on; float32 kept one order up to 8,192 inputs. With AVX2 alone, MKL's order
    for 32 rows differs from that for 16, and among those 32 for some rows.
    """
    if dtype == torch.bfloat16:
        return 2 * ROWS
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return ROWS
    return 4 * ROWS if dtype == torch.float64 else MAX_ROWS


def _is_packed(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and packs(weight.dtype)


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether weights of a dtype are packed for oneDNN on this machine, if the native library has no product for it."""
    return (
        dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and is_amd()
    )


class _OneDnnProduct:
    """A product by oneDNN, with a packed weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        _generate(self, weight.shape[1], weight.shape[0], bias is not None, weight.dtype)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        # In a thread where torch has not computed yet, this tells OpenMP how many threads torch may use: oneDNN, which
        # does not ask torch, would use all processors.
        torch.get_num_threads()
        result: torch.Tensor = self._linear(rows, self._packed, self._bias, "none", [], "")
        return result

    def part(self, columns: slice) -> Product:
        """Raises TypeError: a packed weight has no parts."""
        raise TypeError("a packed weight is for one product")


_generated: set[tuple[int, int, bool, torch.dtype]] = set()
"""What code exists for: inputs and outputs, whether there is a bias, and the dtype."""


def _generate(product: Product, inputs: int, outputs: int, biased: bool, dtype: torch.dtype) -> None:
    """Makes oneDNN generate its code, which differs for each number of rows, before the first request needs it."""
    shape = inputs, outputs, biased, dtype
    if shape not in _generated:
        for rows in range(ROWS, MAX_ROWS + 1, ROWS):
            if 2 * rows * inputs * outputs <= GENERATION_FLOPS:
                product(torch.zeros(rows, inputs, dtype=dtype))
        _generated.add(shape)
