"""The product of rows with one weight, y = x W^T + b, by the library that is fastest at it where the process runs.

torch multiplies float32 by MKL, which takes its AVX2 path on processors that are not Intel's. oneDNN, which torch
brings too, uses all that they have: on a Zen 5 it takes 40 % of the time. It wants the weight in an order of its own,
which that is put into when a layer is loaded; it is not kept besides. `packs` says for which dtypes that is done.

What torch multiplies by itself adds up in another order where rows are many: they are not so many at once, `most_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final, TypeAlias

import torch
from torch.nn.functional import linear

from attnserve_server.cpus import is_amd
from attnserve_server.devices.compute import MAX_ROWS, ROWS

Product: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""[n, inputs] to [n, outputs]; sums are float32 at least, whatever the dtype."""

GENERATION_FLOPS: Final = 200_000_000
"""A product that costs more takes as long as generating the code for it, about a millisecond: the first may wait."""


def product_of(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """The product with a weight [outputs, inputs], each a multiple of WIDTH (`projection`). Where it is packed, the
    weight itself is not kept.
    """
    if is_packed(weight):
        return _packed(weight, bias)
    if weight.device.type != "cpu":
        return lambda rows: linear(rows, weight, bias)
    most = most_rows(weight.dtype)
    if weight.dtype == torch.float16:
        # Without instructions for float16 (AVX512-FP16), torch's product takes four times as long as float32's.
        wide = None if bias is None else bias.float()
        return lambda rows: _few_at_once(rows.float(), weight.float(), wide, most).half()
    return lambda rows: _few_at_once(rows, weight, bias, most)


def most_rows(dtype: torch.dtype) -> int:
    """How many rows torch multiplies at once on this CPU: with more, a row's bits would depend on how many there are.

    On an Intel Xeon oneDNN, with AMX, adds up bfloat16 in another order from 48 rows on, of 512 inputs and more, and
    MKL float64 from 192 rows on, of 1,536 inputs; float32 was in one order up to 8,192 inputs. With AVX2 alone MKL has
    another order for 32 rows than for 16, and within them for some rows.
    """
    if dtype == torch.bfloat16:
        return 2 * ROWS
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return ROWS
    return 4 * ROWS if dtype == torch.float64 else MAX_ROWS


def _few_at_once(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, most: int) -> torch.Tensor:
    """The product by torch, of at most so many rows at a time."""
    if len(rows) <= most:
        return linear(rows, weight, bias)
    return torch.cat([linear(part, weight, bias) for part in torch.split(rows, most)])


def is_packed(weight: torch.Tensor) -> bool:
    """Whether `product_of` packs a weight; otherwise it multiplies with it as it lies in memory."""
    return weight.device.type == "cpu" and packs(weight.dtype)


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether weights of a dtype are packed for oneDNN's products on this machine."""
    return (
        dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and is_amd()
    )


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(rows: torch.Tensor) -> torch.Tensor:
        # Tells OpenMP, in a thread that torch has not computed in yet, how many threads torch is to use: oneDNN, which
        # does not ask torch, would use all processors.
        torch.get_num_threads()
        result: torch.Tensor = multiply(rows, packed, bias, "none", [], "")
        return result

    _generate(product, weight.shape[1], weight.shape[0], bias is not None, weight.dtype)
    return product


_generated: set[tuple[int, int, bool, torch.dtype]] = set()
"""What there is code for: inputs and outputs, whether there is a bias, and the dtype."""


def _generate(product: Product, inputs: int, outputs: int, biased: bool, dtype: torch.dtype) -> None:
    """Has oneDNN generate its code, which is another for each number of rows, before the first request needs it."""
    shape = inputs, outputs, biased, dtype
    if shape not in _generated:
        for rows in range(ROWS, MAX_ROWS + 1, ROWS):
            if 2 * rows * inputs * outputs <= GENERATION_FLOPS:
                product(torch.zeros(rows, inputs, dtype=dtype))
        _generated.add(shape)
