"""Ways to compute attention on torch tensors, and the table that chooses among them."""

from attnserve_server.kernels.call import AdditiveScore, AttentionCall, AttentionResult, GeneralScore, Scores
from attnserve_server.kernels.table import KERNELS, Kernel, attend

__all__ = [
    "KERNELS",
    "AdditiveScore",
    "AttentionCall",
    "AttentionResult",
    "GeneralScore",
    "Kernel",
    "Scores",
    "attend",
]
