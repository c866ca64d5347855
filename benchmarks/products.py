"""`python -m benchmarks.products`: the matrix products of resident layers, on one core.

In: nothing; `--document docs/layers.md` writes the table there as well, between its markers. Out: a table in markdown;
for each dtype, widths of models in use and some numbers of rows, the CPU time of one product by torch's `linear`, as
layers compute it without the native library, and as they do with it; and the ratio of the first to the last. They take
turns; the quickest of many calls counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from time import thread_time
from typing import Final

import torch
from torch.nn.functional import linear

from attnserve_server.devices.compute import MAX_ROWS, ROWS
from attnserve_server.layers.product import is_native, packs, product_of
from attnserve_server.native.library import Threads, best
from attnserve_server.native.products import Products
from benchmarks.document import with_text
from benchmarks.machine import cpu_model, load_average

DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS: Final = ((512, 512), (512, 1536), (384, 1536), (2048, 2048))
"""Input and output widths: of the resident workloads, of MiniLM, and of a larger model."""
NUMBERS_OF_ROWS: Final = (1, ROWS, 128, MAX_ROWS)
ROUNDS: Final = 30
BEGIN, END = "<!-- products -->", "<!-- /products -->"


def quickest(*ways: Callable[[], object]) -> list[float]:
    """For each way, the CPU time of the quickest of many calls, in seconds."""
    best = [float("inf")] * len(ways)
    for _ in range(ROUNDS):
        for place, way in enumerate(ways):
            begin = thread_time()
            way()
            best[place] = min(best[place], thread_time() - begin)
    return best


def measured(dtype: torch.dtype, inputs: int, outputs: int, count: int, products: Products | None) -> str:
    """The times of the product of `count` rows, in microseconds, and the ratio of the first to the last."""
    weight, bias = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype), torch.randn(outputs).to(dtype)
    rows, other, product = (
        torch.randn(count, inputs).to(dtype),
        product_of(weight, bias, None),
        product_of(weight, bias, products),
    )
    times = quickest(lambda: linear(rows, weight, bias), lambda: other(rows), lambda: product(rows))
    return f"{', '.join(f'{each * 1e6:,.0f}' for each in times)}: {times[0] / times[-1]:.2f}"


@torch.inference_mode()
def table(products: Products | None) -> str:
    """Measures everything; a table in markdown."""
    lines = [
        ["", *(f"{count} row{'s' * (count > 1)}: µs" for count in NUMBERS_OF_ROWS)],
        ["---"] * (1 + len(NUMBERS_OF_ROWS)),
    ]
    for dtype in DTYPES:
        for inputs, outputs in WIDTHS:
            cells = (measured(dtype, inputs, outputs, count, products) for count in NUMBERS_OF_ROWS)
            lines.append([f"{_name(dtype)}, {inputs} → {outputs}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table, and writes it into a document if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.products", description=__doc__)
    parser.add_argument("--document", type=Path, help="where the table goes as well, such as docs/layers.md")
    parser.add_argument("--instructions", default="auto", help="of the native library: auto, avx512 or avx2")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    library, load = best(options.instructions), load_average()[0]
    products = None if library is None else Products(library.instructions, lambda flops: Threads())
    native = [_name(dtype) for dtype in DTYPES if is_native(dtype, products)]
    packed = [_name(dtype) for dtype in DTYPES if packs(dtype)]
    instructions = "" if library is None or products is None else f" ({library.instructions}{', AMX' * products.amx})"
    how = f"the native library{instructions}: {', '.join(native) or 'none'}"
    text = (
        f"{cpu_model()}, one core; torch {torch.__version__}; load average {load:.2f} before.\n"
        f"Multiplied by {how};\nwithout it, by oneDNN with a packed weight: {', '.join(packed) or 'none'}.\n\n"
        f"{table(products)}"
    )
    print(text)
    if options.document is not None:
        options.document.write_text(with_text(options.document.read_text("utf-8"), text, BEGIN, END), "utf-8")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
