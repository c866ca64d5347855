"""Attention by torch's flash kernel for the CPU: dot-product scores with any mask and bias.

The kernel's traps are handled here: it kills the process at Lq = 0 or S = 0 (never called so), wants D = Dv (padded
with zeros, which changes no sum), gives rows with nothing to attend an lse of 0 (set to -inf), lets NaN and inf at
excluded places through and swallows NaN in queries (such heads are done again by the math kernel), scales what it has
masked (scales are made positive), and its bits depend on the alignment of the rows modulo 16 bytes (rows are padded to
16 elements) and on the number of threads (one, always: parallelism is across calls).
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

import torch
from torch.nn.functional import pad

from attnserve_server.kernels import math
from attnserve_server.kernels.band import Band
from attnserve_server.kernels.bias import add_sinks, added, exclusion, nothing_to_attend, positive_scale
from attnserve_server.kernels.call import AttentionCall, AttentionResult

NAME = "cpu_flash"
ROW_ELEMENTS = 16

MAX_BLOCK_ELEMENTS = 1 << 24
"""The elements of a mask or bias that is made for a block of queries."""
WINDOW_BLOCK = 256
"""The queries of a block where a window or offset excludes keys: fewer reach fewer keys, more run faster."""
MIN_BLOCK = 16
MAX_SCALE = 1e30
"""A scale from about here on is infinite in the kernel's float32."""


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def applies(call: AttentionCall) -> bool:
    """Whether this kernel can compute a call."""
    if call.query.device.type != "cpu" or call.score is not None or call.softcap > 0 or call.return_scores is not None:
        return False
    if abs(call.scale) > MAX_SCALE:
        return False
    # A mask may leave only distant keys, whose large ALiBi biases cost float32 its precision.
    return call.alibi_slopes is None or call.mask is None


def attend(call: AttentionCall) -> AttentionResult:
    """Computes a call with Lq > 0 and S > 0.

    Masks and biases are made for blocks of queries: memory stays bounded, and a window costs what it reaches.
    """
    query_length, kv_length = call.query.shape[2], call.key.shape[2]
    band = Band.of(query_length, kv_length, call.offset, call.causal, call.window)
    if call.finite and _is_plain(call):
        if band.is_everything:
            return _attend_plain(call, False)
        if band.is_lower_triangle and query_length >= kv_length:
            return _attend_plain(call, True)
    rows = query_length
    if call.alibi_slopes is not None:
        rows = max(MIN_BLOCK, MAX_BLOCK_ELEMENTS // (kv_length * call.query.shape[1]))
    elif not (band.is_everything or band.is_lower_triangle):
        rows = max(MIN_BLOCK, min(WINDOW_BLOCK, MAX_BLOCK_ELEMENTS // kv_length))
    if rows >= query_length:
        return _attend_block(call)
    blocks = [
        _attend_block(call.queries(start, min(start + rows, query_length))) for start in range(0, query_length, rows)
    ]
    return AttentionResult(
        torch.cat([block.output for block in blocks], 2),
        torch.cat([block.lse for block in blocks if block.lse is not None], 2) if call.return_lse else None,
        None,
        NAME,
    )


def _is_plain(call: AttentionCall) -> bool:
    """Whether scores are what queries and keys make them, and nothing else."""
    return call.mask is None and call.bias is None and call.alibi_slopes is None and call.sinks is None


def _attend_plain(call: AttentionCall, causal: bool) -> AttentionResult:
    """A plain call of queries that reach all keys, or those up to their own, everything being finite: what most are."""
    query, scale = positive_scale(call.query, call.scale)
    output, lse = _run(query, call.key, call.value, None, causal, scale)
    width = call.value.shape[-1]
    if output.shape[-1] != width:
        output = output[..., :width]
    return AttentionResult(output, lse if call.return_lse else None, None, NAME)


def _attend_block(call: AttentionCall) -> AttentionResult:
    query_length, width = call.query.shape[2], call.value.shape[-1]
    band, begin, end = Band.of(query_length, call.key.shape[2], call.offset, call.causal, call.window).narrowed()
    if begin == end:
        return nothing_to_attend(call, NAME)
    key, value = call.key[:, :, begin:end], call.value[:, :, begin:end]

    causal = band.is_lower_triangle and call.mask is None and not band.is_everything
    excluded = exclusion(call, band, begin, end, causal)
    bias, shift = added(call, band, begin, end)
    if excluded is not None:
        bias = excluded.new_zeros((), dtype=call.accumulation_dtype) if bias is None else bias
        bias = bias.masked_fill(excluded, -torch.inf)

    query, scale = positive_scale(call.query, call.scale)
    output, lse = _run(query, key, value, bias, causal, scale)
    output = output[..., :width]
    if shift is not None:
        lse = lse + shift
    if excluded is not None:
        empty = excluded.all(-1).expand(lse.shape)
        output = output.masked_fill(empty.unsqueeze(-1), 0)
        lse = lse.masked_fill(empty, -torch.inf)
    if call.sinks is not None:
        output, lse = add_sinks(output, lse, call.sinks[None, :, None])

    inputs = () if call.finite else (call.query, key, value)
    if not _is_finite(*inputs, call.bias):
        output, lse = output.contiguous(), lse.contiguous()
        group = call.query.shape[1] // key.shape[1]
        for n, head in _non_finite_heads(call.query, key, value, call.bias):
            exact = math.attend(replace(call.sequences(n, n + 1).kv_heads(head, head + 1), return_lse=True))
            output[n, head * group : (head + 1) * group] = exact.output[0]
            lse[n, head * group : (head + 1) * group] = exact.lse[0]  # type: ignore[index]
    return AttentionResult(output, lse if call.return_lse else None, None, NAME)


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [N, Hq, Lq, >= Dv] and lse [N, Hq, Lq] of the kernel itself."""
    (count, heads, length, _), kv_heads, dtype = query.shape, key.shape[1], query.dtype
    if length == 1 and dtype in (torch.float16, torch.bfloat16):
        # One query a sequence reads every key once; in half precision the kernel is several times slower at that.
        query = query.float()
    if key.dtype != query.dtype:
        key, value = key.to(query.dtype), value.to(query.dtype)
    widest = max(query.shape[-1], value.shape[-1])
    width = -(-widest // ROW_ELEMENTS) * ROW_ELEMENTS
    query, key, value = (
        tensor if tensor.shape[-1] == width else pad(tensor, (0, width - tensor.shape[-1]))
        for tensor in (query, key, value)
    )
    group = heads // kv_heads
    folded = group > 1 and not causal and (bias is None or length == 1)
    if folded:
        # Query heads that share a key head become queries of that head, which the kernel reads once for all of them.
        query = query.reshape(count, kv_heads, group * length, width)
        if bias is not None and bias.dim() == 4 and bias.shape[1] > 1:
            bias = bias.reshape(bias.shape[0], kv_heads, group, bias.shape[-1])
    if bias is not None:
        bias = bias.expand(count, query.shape[1], query.shape[2], key.shape[2])
    output, lse = _flash(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
    if folded:
        output = output.reshape(count, heads, length, width)
        lse = lse.reshape(count, heads, length)
    return output if output.dtype == dtype else output.to(dtype), lse


def _is_finite(*tensors: torch.Tensor | None) -> bool:
    """Whether all is certainly finite: a sum is only if all that it adds up is; one that is not may have overflowed."""
    return all(isfinite(tensor.sum().item()) for tensor in tensors if tensor is not None)


def _non_finite_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
) -> list[list[int]]:
    """The [sequence, key head] whose queries, keys, values or biases are not all finite."""
    count, kv_heads = key.shape[:2]
    finite = torch.isfinite(query).flatten(2).all(2).view(count, kv_heads, -1).all(2)
    for tensor in (key, value):
        finite &= torch.isfinite(tensor).flatten(2).all(2)
    if bias is not None:
        finite_bias = torch.isfinite(bias).flatten(2).all(2)
        if finite_bias.shape[1] > 1:
            finite_bias = finite_bias.view(-1, kv_heads, query.shape[1] // kv_heads).all(2)
        finite = finite & finite_bias
    return torch.nonzero(~finite).tolist()
