"""Tensors that stay for long: on the CPU, large ones are in huge pages."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import torch

from attnserve_server.host import huge_pages

LARGE_BYTES: Final = huge_pages.HUGE_PAGE
"""The size from which on a tensor has huge pages."""


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor that is to be written. On another device than the CPU it is one of torch's own. Raises RuntimeError or
    MemoryError if there is no memory.
    """
    size = prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < LARGE_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(huge_pages.empty(size)).view(dtype).view(shape)
