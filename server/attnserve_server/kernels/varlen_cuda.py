"""Ragged attention in half precision by torch's flash kernel for CUDA: many sequences in one call, without padding.

The kernel's traps are handled here: it wants D = Dv in multiples of 8 (padded with zeros, which changes no sum), gives
rows with nothing to attend an lse of +inf (set to -inf), multiplies masked scores by the scale (made positive), takes a
right bound as open if it is longer than the longest sequence (never where that differs), and divides the keys of
single-query batches by the batch's size (told not to, or given an equivalent window with which it never does, so that a
result does not depend on the rest of its batch).

Not yet run on a GPU: written from torch's sources (2.11, 2.13 and 2.15), and its planning tested on CPU tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from attnserve_server.kernels.band import Band
from attnserve_server.kernels.bias import positive_scale
from attnserve_server.kernels.ragged import RaggedCall, RaggedKernel, RaggedResult, ScatteredCall, padded

NAME = "cuda_varlen"
ROW_ELEMENTS = 8
MAX_WIDTH = 256
DTYPES = frozenset((torch.float16, torch.bfloat16))

_flash_scattered = torch.ops.aten._flash_attention_forward.default


def window(band: Band) -> tuple[int, int] | None:
    """The band counted from the bottom right; None if it is not of that kind."""
    return band.from_bottom_right()


def attend(call: RaggedCall) -> RaggedResult:
    """Computes a call on a CUDA device of capability 8.0 or later."""
    flash, options, divides = _flash()
    from torch.nn.attention.varlen import AuxRequest

    width = call.value.shape[-1]
    widest = -(-max(call.query.shape[-1], width) // ROW_ELEMENTS) * ROW_ELEMENTS
    query, scale = positive_scale(call.query, call.scale)
    left, right = call.window
    if call.longest_query == 1 and left < 0 and right <= 0:
        # Causal or not, a single query at the last key sees all; only when not causal may the kernel divide the keys.
        right = 0 if divides else -1
    if call.key.shape[1] != call.query.shape[1] and "enable_gqa" in options:
        options["enable_gqa"] = True
    output, lse = flash(
        *(padded(tensor, widest) for tensor in (query, call.key, call.value)),
        call.query_starts,
        call.kv_starts,
        call.longest_query,
        call.longest_kv,
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=(left, right),
        **options,
    )
    if call.return_lse:
        lse = lse.t()
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    return RaggedResult(output[..., :width], lse if call.return_lse else None)


def attend_scattered(call: ScatteredCall) -> RaggedResult:
    """Computes a call whose keys lie anywhere, likewise.

    Told how many keys a sequence has, the kernel takes from `kv_starts` only where they begin, and rows of keys by
    their stride. `varlen_attn` lacks that argument in torch 2.11, the operator has it. With as many heads of queries as
    of keys it never divides the keys.
    """
    query, scale = positive_scale(call.query, call.scale)
    output, lse, *_ = _flash_scattered(
        query,
        call.key,
        call.value,
        call.query_starts,
        call.kv_starts,
        call.longest_query,
        call.longest_kv,
        0.0,
        False,
        False,
        scale=scale,
        window_size_left=-1,
        window_size_right=-1,
        seqused_k=call.kv_lengths,
    )
    lse = lse.t()
    return RaggedResult(output, lse.masked_fill(lse == torch.inf, -torch.inf))


def _flash() -> tuple[Callable[..., Any], dict[str, Any], bool]:
    """The function of torch, the options that this torch has beyond the oldest, and whether it divides keys unasked."""
    flash, parameters = _varlen()
    options: dict[str, Any] = {"enable_gqa": False} if "enable_gqa" in parameters else {}
    if "num_splits" in parameters:
        # With this, torch 2.15 stays with this kernel, too, where it would take cuDNN's for some batches only.
        options["num_splits"] = 1
    return flash, options, "num_splits" not in parameters


@cache
def _varlen() -> tuple[Callable[..., Any], frozenset[str]]:
    # Not imported with the module, because it registers operators, which servers on CPUs do not need.
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


KERNEL = RaggedKernel(
    NAME,
    "float16 and bfloat16 on tensor cores: dot products, causal masks and windows, any lengths in one call",
    DTYPES,
    MAX_WIDTH,
    window,
    attend,
)
