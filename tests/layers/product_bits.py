"""Prints the dtypes in which a row's product depends on the other rows. It runs in a process of its own because the
environment tells MKL and oneDNN, before they are loaded, which CPU features to use.
"""

from __future__ import annotations

import torch

from attnserve_server.devices.compute import MAX_ROWS, ROWS
from attnserve_server.layers.product import product_of

DTYPES = torch.float32, torch.float64, torch.float16, torch.bfloat16
SHAPES = (768, 384), (384, 1536)
COUNTS = 32, 96, 192, MAX_ROWS


def depends(dtype: torch.dtype, outputs: int, inputs: int) -> bool:
    """Whether a row's product has other bits among more rows, or in another place."""
    multiply = product_of(torch.randn(outputs, inputs).to(dtype), None, None)
    rows = torch.randn(MAX_ROWS, inputs).to(dtype)
    alone = torch.cat([multiply(part.clone()) for part in torch.split(rows, ROWS)])
    return any(
        not torch.equal(multiply(rows[:count].clone()), alone[:count])
        or not torch.equal(multiply(rows[:count].flip(0)).flip(0), alone[:count])
        for count in COUNTS
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        print(*(dtype for dtype in DTYPES if any(depends(dtype, *shape) for shape in SHAPES)))
