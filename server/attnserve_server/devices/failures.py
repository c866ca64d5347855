"""What an exception of torch says about the device that raised it."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

Blame: TypeAlias = Literal["request", "memory", "device"]
"""What a computation failed for: the request itself, memory that the device has not, or the device, for good."""

CUDA_MEMORY_ALLOCATION = 2
"""cudaErrorMemoryAllocation, by which CUDA itself says that it has no memory."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether there was no memory, of the host or of the device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if getattr(error, "error_code", None) == CUDA_MEMORY_ALLOCATION:
        return True
    # The one sign that torch's allocator for the host gives: a plain RuntimeError with these words.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
