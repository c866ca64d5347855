"""Ways to compute attention on torch tensors, and the table that chooses among them."""

from attnserve_server.kernels.call import (
    AdditiveScore,
    AttentionCall,
    AttentionResult,
    GeneralScore,
    accumulation_dtype,
    excluded_score,
    part_of,
    widened,
)
from attnserve_server.kernels.ragged import RaggedCall, RaggedKernel, RaggedResult, ScatteredCall
from attnserve_server.kernels.table import KERNELS, RAGGED_KERNELS, Kernel, attend, attend_again, kernel_for

__all__ = [
    "KERNELS",
    "RAGGED_KERNELS",
    "AdditiveScore",
    "AttentionCall",
    "AttentionResult",
    "GeneralScore",
    "Kernel",
    "RaggedCall",
    "RaggedKernel",
    "RaggedResult",
    "ScatteredCall",
    "accumulation_dtype",
    "attend",
    "attend_again",
    "excluded_score",
    "kernel_for",
    "part_of",
    "widened",
]
