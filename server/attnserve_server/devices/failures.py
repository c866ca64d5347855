"""What an exception of torch says about the device that raised it."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

Blame: TypeAlias = Literal["request", "memory", "device"]
"""What made a computation fail: the request itself, a lack of memory, or the device, which is lost for good."""

CUDA_MEMORY_ALLOCATION = 2
"""cudaErrorMemoryAllocation, by which CUDA itself reports that it is out of memory."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether the host or the device ran out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if getattr(error, "error_code", None) == CUDA_MEMORY_ALLOCATION:
        return True
    # The only sign that torch's host allocator gives: a plain RuntimeError with these words.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
