"""Ragged attention in half precision by torch's flash kernel for CUDA: many sequences in one call, without padding.

What is called here is the operator below torch's `varlen_attn`, which adds operations on the host and on the device,
and in torch 2.11 hides the operator's lengths of keys. Its traps, which are handled here:

- It wants D = Dv in multiples of 8: padded with zeros, which changes no sum.
- It gives rows with nothing to attend an lse of +inf: set to -inf.
- It multiplies masked scores by the scale: made positive.
- It takes a right bound as open if it is longer than the longest sequence: it gets none where that makes a difference.
- It divides the keys of single-query batches by the batch's size: told not to, or given an equivalent window with which
  it never does.
- It has blocks of other sizes for causal batches, on some GPUs: whether a batch is told to be causal follows from its
  window alone, not from its longest sequence, so that a result does not depend on the rest of its batch.

Run on a GPU with torch 2.11; for 2.13 and 2.15 written from torch's sources, and its planning tested on CPU tensors.
"""

from __future__ import annotations

import torch

from attnserve_server.kernels.band import Band
from attnserve_server.kernels.bias import positive_scale
from attnserve_server.kernels.ragged import RaggedCall, RaggedKernel, RaggedResult, ScatteredCall, padded

NAME = "cuda_varlen"
ROW_ELEMENTS = 8
MAX_WIDTH = 256
DTYPES = frozenset((torch.float16, torch.bfloat16))

_flash = torch.ops.aten._flash_attention_forward.default
_DIVIDES = all(argument.name != "num_splits" for argument in _flash._schema.arguments)
"""Whether this torch divides the keys of batches of single queries of grouped heads without a window, and cannot be
told otherwise."""


def attend(call: RaggedCall) -> RaggedResult:
    """Computes a call on a CUDA device of capability 8.0 or later."""
    width = call.value.shape[-1]
    widest = -(-max(call.query.shape[-1], width) // ROW_ELEMENTS) * ROW_ELEMENTS
    query, scale = positive_scale(call.query, call.scale)
    query, key, value = (padded(tensor, widest) for tensor in (query, call.key, call.value))
    left, right = call.window
    if _DIVIDES and call.longest_query == 1 and call.window == (-1, -1) and query.shape[1] > call.key.shape[1]:
        left = call.longest_kv - 1
    output, lse = _run(query, key, value, call, scale, (left, right), None)
    if call.return_lse:
        lse = lse.t()
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    output = output if widest == width else output[..., :width]
    return RaggedResult(output, lse if call.return_lse else None)


def attend_scattered(call: ScatteredCall) -> RaggedResult:
    """Computes a call whose keys lie anywhere, likewise. Every sequence has keys: an lse of +inf means scores that are
    all -inf, or NaN.

    Told how many keys a sequence has, the kernel takes from `kv_starts` only where they begin, and rows of keys by
    their stride. With as many heads of queries as of keys it never divides the keys.
    """
    query, scale = positive_scale(call.query, call.scale)
    output, lse = _run(query, call.key, call.value, call, scale, (-1, -1), call.kv_lengths)
    return RaggedResult(output, lse.t())


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: RaggedCall | ScatteredCall,
    scale: float,
    window: tuple[int, int],
    kv_lengths: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, Hq, D] and lse [Hq, T] of the kernel itself."""
    left, right = window
    output, lse, *_ = _flash(
        query,
        key,
        value,
        call.query_starts,
        call.kv_starts,
        call.longest_query,
        call.longest_kv,
        0.0,
        window == (-1, 0),
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
        seqused_k=kv_lengths,
        **({} if _DIVIDES else {"num_splits": 1}),
    )
    return output, lse


KERNEL = RaggedKernel(
    NAME,
    "float16 and bfloat16 on tensor cores: dot products, causal masks and windows, any lengths in one call",
    DTYPES,
    MAX_WIDTH,
    Band.from_bottom_right,
    attend,
)
