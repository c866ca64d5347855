"""Attention by torch's flash kernel for the CPU: dot-product scores with any mask and bias.

The kernel's traps, which are handled here:

- It kills the process at Lq = 0 or S = 0: never called so.
- It wants D = Dv: padded with zeros, which changes no sum.
- It gives rows with nothing to attend an lse of 0: set to -inf.
- It multiplies masked scores by the scale: made positive.
- Its bits depend on the alignment of rows modulo 16 bytes: padded to 16 elements.
- Its bits depend on the number of threads: one, always; parallelism is across calls.

Heads that meet one of these are computed again by the math kernel:

- It lets NaN and inf at excluded places through, be they inputs or scores that overflow.
- It swallows NaN in queries.
- It takes rows all of whose scores overflow to -inf for rows with nothing to attend.
- It sums weighted values before it divides by the sum of the weights, which overflows where values are large.

Not noticed, since that would take a look at all keys: a sum of products that is -inf on the way, and so in the end,
beside finite ones. Calls for which the native kernel has noticed it do not come here (see `table.attend_again`).
"""

from __future__ import annotations

from functools import lru_cache
from math import isfinite

import torch
from torch.nn.functional import pad

from attnserve_server.kernels import written_out
from attnserve_server.kernels.bias import add_sinks, added, exclusion, nothing_to_attend, positive_scale
from attnserve_server.kernels.call import AttentionCall, AttentionResult, accumulation_dtype
from attnserve_server.kernels.finite import surely_finite
from attnserve_server.requests.scores import is_fusable

NAME = "cpu_flash"
ROW_ELEMENTS = 16

MAX_BLOCK_ELEMENTS = 1 << 24
"""The elements of a mask or bias that is made for a block of queries."""
WINDOW_BLOCK = 256
"""The queries of a block where a window or offset excludes keys: smaller blocks reach fewer keys, larger run faster."""
MIN_BLOCK = 16
BIASED_HEADS = 16
"""The number of heads for which ALiBi's biases have MAX_BLOCK_ELEMENTS. Blocks do not depend on a call's own number of
heads, which may be a part of a request's: where blocks end shows in the bits.
"""
CAUSAL_BLOCK = 32
CAUSAL_LENGTHS = range(64, 512 + 1)
"""So many causal queries are computed in blocks of CAUSAL_BLOCK, each over the keys that it reaches: the kernel itself
skips keys only 512 at a time, and computes all others for every query. Measured on one core, 8 heads of 64: 430 us to
330 at 128 queries, 1,650 to 1,080 at 250; below 64 the calls cost what they save. The number of heads has no influence:
a call may be divided by heads.
"""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def applies(call: AttentionCall) -> bool:
    """Whether this kernel can compute a call."""
    if call.query.device.type != "cpu" or not is_fusable(call):
        return False
    # These may leave only distant keys, whose large ALiBi biases cost float32 its precision.
    return call.alibi_slopes is None or (call.mask is None and call.bias is None)


def attend(call: AttentionCall) -> AttentionResult:
    """Computes a call with Lq > 0 and S > 0.

    Masks and biases are made for blocks of queries: memory stays bounded, and a window costs what it reaches.
    """
    query_length, kv_length = call.query.shape[2], call.key.shape[2]
    band = call.band
    if call.finite and _is_plain(call):
        if band.is_everything:
            return _attend_plain(call, False)
        if band.is_lower_triangle and query_length >= kv_length:
            return _attend_plain(call, True)
    rows = query_length
    if call.alibi_slopes is not None:
        rows = max(MIN_BLOCK, MAX_BLOCK_ELEMENTS // (kv_length * BIASED_HEADS))
    elif not (band.is_everything or band.is_lower_triangle):
        rows = max(MIN_BLOCK, min(WINDOW_BLOCK, MAX_BLOCK_ELEMENTS // kv_length))
    if rows >= query_length:
        return _attend_block(call)
    blocks = [
        _attend_block(call.queries(start, min(start + rows, query_length))) for start in range(0, query_length, rows)
    ]
    return AttentionResult.joined(blocks, 2)


def _is_plain(call: AttentionCall) -> bool:
    """Whether scores are what queries and keys make them, and nothing else."""
    return call.mask is None and call.bias is None and call.alibi_slopes is None and call.sinks is None


def _attend_plain(call: AttentionCall, causal: bool) -> AttentionResult:
    """A plain call, all finite, of queries that reach all keys, or those up to their own: most calls are such."""
    query, scale = positive_scale(call.query, call.scale)
    output, lse = _run(query, call.key, call.value, None, causal, scale)
    width = call.value.shape[-1]
    if output.shape[-1] != width:
        output = output[..., :width]
    doubtful = _doubtful(call, lse)
    if doubtful is not None or not surely_finite(output):
        output, lse = output.contiguous(), lse.contiguous()
        written_out.attend_heads(call, _suspect_heads(call.key.shape[1], output, doubtful), output, lse)
    return AttentionResult(output, lse if call.return_lse else None, None, NAME)


def _attend_block(call: AttentionCall) -> AttentionResult:
    band, begin, end = call.band.narrowed()
    if begin == end:
        return nothing_to_attend(call, NAME)
    key, value = call.key[:, :, begin:end], call.value[:, :, begin:end]

    causal = band.is_lower_triangle and call.mask is None and not band.is_everything
    excluded = exclusion(call, band, begin, end, causal)
    bias, shift = added(call, band, begin, end)
    if excluded is not None:
        barred = _barred(excluded, call.accumulation_dtype)
        bias = barred if bias is None else bias + barred

    query, scale = positive_scale(call.query, call.scale)
    output, lse = _run(query, key, value, bias, causal, scale)
    output = output[..., : call.value.shape[-1]]
    doubtful = _doubtful(call, lse)
    if shift is not None:
        lse = lse + shift
    if excluded is not None and bias is not None and not isfinite(bias.amax(-1).amin().item()):
        empty = excluded.all(-1).expand(lse.shape)
        output = output.masked_fill(empty.unsqueeze(-1), 0)
        lse = lse.masked_fill(empty, -torch.inf)
        doubtful = None if doubtful is None else doubtful.masked_fill(empty, 1)
    if call.sinks is not None:
        output, lse = add_sinks(output, lse, call.sinks[None, :, None])

    inputs = () if call.finite else (call.query, key, value)
    if not surely_finite(*inputs, call.bias, output, doubtful):
        output, lse = output.contiguous(), lse.contiguous()
        suspects = call.query, key, value, call.bias, output, doubtful
        written_out.attend_heads(call, _suspect_heads(key.shape[1], *suspects), output, lse)
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
    if causal and bias is None and length in CAUSAL_LENGTHS:
        output, lse = _run_causal(query, key, value, scale)
    else:
        output, lse = _flash(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
    if folded:
        output = output.reshape(count, heads, length, width)
        lse = lse.reshape(count, heads, length)
    return output if output.dtype == dtype else output.to(dtype), lse


def _run_causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel gives for the lower triangle, computed in blocks of queries."""
    (count, heads, length, _), kv_length = query.shape, key.shape[2]
    bars = _causal_bars(accumulation_dtype(query.dtype))
    diagonal = bars.shape[1] - CAUSAL_BLOCK
    outputs, lses = [], []
    for start in range(0, length, CAUSAL_BLOCK):
        stop = min(start + CAUSAL_BLOCK, length)
        reach, bias = min(stop, kv_length), None
        if 0 < start < kv_length:
            bias = bars[: stop - start, diagonal - start : diagonal - start + reach]
            bias = bias.expand(count, heads, stop - start, reach)
        output, lse = _flash(
            query[:, :, start:stop],
            key[:, :, :reach],
            value[:, :, :reach],
            0.0,
            start == 0,
            attn_mask=bias,
            scale=scale,
        )
        outputs.append(output)
        lses.append(lse)
    output, lse = torch.cat(outputs, 2), torch.cat(lses, 2)
    if not surely_finite(lse):
        # Large values may give an infinite score, and inf - inf is NaN where that key is excluded.
        kv_heads = key.shape[1]
        group = heads // kv_heads
        for n, head in torch.nonzero(~lse.isfinite().view(count, kv_heads, -1).all(2)).tolist():
            one = slice(n, n + 1), slice(head, head + 1)
            mine = one[0], slice(head * group, (head + 1) * group)
            output[mine], lse[mine] = _flash(query[mine], key[one], value[one], 0.0, True, scale=scale)
    return output, lse


@lru_cache(maxsize=2)
def _causal_bars(dtype: torch.dtype) -> torch.Tensor:
    """0 where a key is reached and -inf where it is not: for a block of queries that stand at the last columns, with as
    many keys before them as there may be. Each block takes a part of this.
    """
    before = torch.zeros(CAUSAL_BLOCK, CAUSAL_LENGTHS[-1], dtype=dtype)
    return torch.cat([before, torch.full((CAUSAL_BLOCK, CAUSAL_BLOCK), -torch.inf, dtype=dtype).triu(1)], 1)


def _barred(excluded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """-inf where a key is excluded and 0 elsewhere: 1 minus the reciprocals of 0 and 1, which is vectorised, unlike
    filling by a mask.
    """
    return 1 - (~excluded).view(torch.uint8).to(dtype).reciprocal_()


def _doubtful(call: AttentionCall, lse: torch.Tensor) -> torch.Tensor | None:
    """The lse, not finite for rows whose scores may have overflowed; None if there is no such row.

    The kernel gives 0 if all scores of a row are -inf. It also does so for a single key with a score of 0, such as
    padding has: hence the look at what scores there can be. An infinite score may give NaN where that key is excluded:
    inf - inf.
    """
    if surely_finite(lse / lse):
        return None
    biased = call.bias is not None or call.alibi_slopes is not None
    if not biased and written_out.stay_in_float32(call.query, call.key, call.scale):
        return None
    return lse.masked_fill(lse == 0, torch.nan)


def _suspect_heads(kv_heads: int, *suspects: torch.Tensor | None) -> list[list[int]]:
    """The [sequence, key head] of which not all elements of some tensors are finite: these have the heads of the keys
    or of the queries, or broadcast to them.
    """
    finite = torch.ones(1, kv_heads, dtype=torch.bool)
    for tensor in suspects:
        if tensor is None:
            continue
        of_heads = torch.isfinite(tensor).flatten(2).all(2)
        if of_heads.shape[1] > 1:
            of_heads = of_heads.view(len(tensor), kv_heads, -1).all(2)
        finite = finite & of_heads
    return torch.nonzero(~finite).tolist()
