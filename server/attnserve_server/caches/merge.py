"""Merges results over disjoint keys into one, by their log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def merge(
    outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], needs_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [1, Hq, Lq, Dv] and lse [1, Hq, Lq] of outputs [n, Hq, Lq, Dv] and lses [n, Hq, Lq], in their order.

    Without `needs_lse` every row is assumed to attend to something in at least one of them, and the lse is meaningless.
    """
    lse, output = (each[0] if len(each) == 1 else torch.cat(list(each)) for each in (lses, outputs))
    # Always the same layout in memory, because the order of a sum follows it.
    output, weights = output.contiguous().to(lse.dtype), lse.contiguous().softmax(0)
    if not needs_lse:
        return (output * weights.unsqueeze(-1)).sum(0, keepdim=True), lse
    total = lse.logsumexp(0, keepdim=True)
    weights = weights.masked_fill(total == -torch.inf, 0)
    return (output * weights.unsqueeze(-1)).sum(0, keepdim=True), total
