"""How payloads of requests get into host memory, from which devices take them, and where tensors are in it.

In: payloads, shapes and layouts. Out: payloads end to end; axes and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import torch

COPIED_ASIDE: Final = 64 << 10
"""Payloads of this many bytes or more are copied without the GIL."""


def fill(raw: torch.Tensor, payloads: Sequence[memoryview]) -> None:
    """Copies payloads to host memory of as many bytes, end to end."""
    target, start = memoryview(raw.numpy()), 0  # type: ignore[arg-type]
    for payload in payloads:
        start = copy(payload, target, start)


def copy(payload: memoryview, target: memoryview, start: int) -> int:
    """Copies a payload to `target` from `start` on, a large one without the GIL: other threads go on receiving and
    launching meanwhile. Returns where the payload ends.
    """
    stop = start + len(payload)
    if len(payload) < COPIED_ASIDE:
        target[start:stop] = payload
    else:
        np.frombuffer(target[start:stop], np.uint8)[:] = np.frombuffer(payload, np.uint8)
    return stop


@lru_cache(maxsize=4096)
def arranged(
    shape: tuple[int, ...], length_first: bool, count: int
) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Axes [N, H, L, D] of packed tensors that lie end to end, and their strides in elements."""
    batch = count * shape[0] if len(shape) == 4 else count
    heads, length, width = (1, *shape) if len(shape) == 2 else shape[-3:]
    if not length_first or len(shape) == 2:
        return (batch, heads, length, width), (heads * length * width, length * width, width, 1)
    length, heads = heads, length
    return (batch, heads, length, width), (length * heads * width, width, heads * width, 1)
