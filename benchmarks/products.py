"""`python -m benchmarks.products`: the matrix products of resident layers, by torch and as layers compute them.

In: nothing. Out: a table; for widths of models in use and some numbers of rows, the CPU time of one product on one core
by torch's `linear` and by `layers.product`, with and without the native library, and the ratio of `linear` to the
layer's product. All are measured in turn; the quickest of many calls counts.
"""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time
from typing import Final

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import linear

from attnserve_server.devices.compute import MAX_ROWS, ROWS
from attnserve_server.layers.product import is_native, packs, product_of
from attnserve_server.native.library import best
from attnserve_server.native.products import Products
from benchmarks.machine import cpu_model
from benchmarks.table import WIDTH

WIDTHS: Final = ((512, 512), (512, 1536), (384, 384), (384, 1152), (384, 1536), (1536, 384), (2048, 2048))
"""Input and output widths: of the resident workloads, of MiniLM, and of a larger model."""
NUMBERS_OF_ROWS: Final = (ROWS, 128, MAX_ROWS)
ROUNDS: Final = 30


def quickest(*ways: Callable[[], object]) -> list[float]:
    """For each way, the CPU time of the quickest of many calls, in seconds."""
    best = [float("inf")] * len(ways)
    for _ in range(ROUNDS):
        for place, way in enumerate(ways):
            begin = thread_time()
            way()
            best[place] = min(best[place], thread_time() - begin)
    return best


@torch.inference_mode()
def measured(dtype: torch.dtype) -> Table:
    """Measures all widths in a dtype; a table."""
    library = best()
    products = Products(library.instructions) if library is not None and is_native(dtype) else None
    others = "oneDNN, weight packed" if packs(dtype) else "torch's own"
    how = f"native ({library.instructions}), without it {others}" if library is not None and products else others
    headings = ("inputs → outputs", *(f"{rows} rows\nlinear, without, layer: µs, ratio" for rows in NUMBERS_OF_ROWS))
    table = Table(*headings, title=f"{str(dtype).removeprefix('torch.')}; the layer's product: {how}")
    for inputs, outputs in WIDTHS:
        weight, bias = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype), torch.randn(outputs).to(dtype)
        product, other, cells = product_of(weight, bias, products), product_of(weight, bias), []
        for count in NUMBERS_OF_ROWS:
            rows = torch.randn(count, inputs).to(dtype)
            by_torch, by_other, by_layer = quickest(
                lambda rows=rows, weight=weight, bias=bias: linear(rows, weight, bias),
                lambda rows=rows, other=other: other(rows),
                lambda rows=rows, product=product: product(rows),
            )
            times = ", ".join(f"{each * 1e6:,.0f}" for each in (by_torch, by_other, by_layer))
            cells.append(f"{times}: {by_torch / by_layer:.2f}")
        table.add_row(f"{inputs} → {outputs}", *cells)
    return table


def main() -> None:
    """Prints the tables."""
    torch.set_num_threads(1)
    console = Console(width=WIDTH)
    console.print(f"{cpu_model()}, one core; torch {torch.__version__}")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        console.print(measured(dtype))


if __name__ == "__main__":
    main()
