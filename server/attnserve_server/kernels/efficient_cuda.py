"""Attention by torch's memory-efficient kernel for CUDA: float32, and masks, biases and ALiBi in any precision.

The kernel's traps, which are handled here:

- Its loads want rows of queries, keys and values in multiples of 8 elements, rows of biases in multiples of 16, and all
  to begin at multiples of 16 bytes: padded.
- It gives the lse in rows of 32: cut.
- It knows no grouped heads: a group is folded into the queries where it can be, else keys are repeated.
- It multiplies masked scores by the scale: made positive.
- It takes biases only in the dtype of the queries: half precisions with a bias are computed in float32.
- It makes a product of float32 of three products of TF32, which lose the last two bits of each factor: it is given keys
  and values in two parts (`_in_parts`). So it loses these bits only of queries and weights, and is as exact as float32.
- It gives rows with nothing to attend results without meaning: set to 0 and -inf.
- It may let NaN and inf at excluded places through, but only as NaN or inf: the result says which sequences have any,
  and its reader has those computed again.

Run on a GPU with torch 2.11; for 2.13 and 2.15 written from torch's sources, and its planning tested on CPU tensors.
"""

from __future__ import annotations

import torch

from attnserve_server.kernels.band import Band
from attnserve_server.kernels.bias import add_sinks, added, exclusion, nothing_to_attend, positive_scale
from attnserve_server.kernels.call import AttentionCall, AttentionResult
from attnserve_server.kernels.ragged import (
    MAX_SEQUENCES,
    RaggedCall,
    RaggedKernel,
    RaggedResult,
    begins_aligned,
    padded,
)
from attnserve_server.requests.scores import is_fusable

NAME = "cuda_efficient"
ROW_ELEMENTS = 8
BIAS_ROW_ELEMENTS = 16
MAX_BLOCK_ELEMENTS = 1 << 28
"""The elements of a mask or bias that is made for a block of queries: 1 GiB in float32."""
MAX_BLOCK_BYTES = 1 << 28
"""The bytes of keys and values that are converted, or made in two parts, for a block of sequences; one alone may have
more.
"""
MAX_WIDTH = 1 << 16
"""The widest rows of queries, keys and values that the kernel takes; those in two parts count twice."""

_FROM_BOTTOM_RIGHT = 2  # the kernel's number for a causal mask of that kind
_efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
_efficient_ragged = torch.ops.aten._efficient_attention_forward.default


def applies(call: AttentionCall) -> bool:
    """Whether this kernel can compute a call of tensors on a CUDA device."""
    if call.query.dtype == torch.float64 or not is_fusable(call):
        return False
    if call.query.shape[1] > MAX_SEQUENCES:
        return False
    if max(call.query.shape[-1], call.value.shape[-1]) > _max_width(call.query.dtype):
        return False
    # These may leave only distant keys, whose large ALiBi biases cost float32 its precision.
    return call.alibi_slopes is None or (call.mask is None and call.bias is None)


def attend(call: AttentionCall) -> AttentionResult:
    """Computes a call with Lq > 0 and S > 0, in blocks of sequences and of queries so that memory stays bounded."""
    sequences, query_length = call.query.shape[0], call.query.shape[2]
    planes = max(_planes(call.mask), _planes(call.bias), 1 if call.alibi_slopes is None else call.query.shape[1])
    rows = max(1, MAX_BLOCK_ELEMENTS // (planes * call.key.shape[2]))
    size = max(1, min(MAX_SEQUENCES, MAX_BLOCK_BYTES // max(1, _copied_bytes(call))))
    blocks = []
    for first in range(0, sequences, size):
        some = call if sequences <= size else call.sequences(first, min(first + size, sequences))
        parts = [some.queries(start, min(start + rows, query_length)) for start in range(0, query_length, rows)]
        blocks.append(AttentionResult.joined([_attend_block(part) for part in parts], 2))
    return AttentionResult.joined(blocks, 0)


def _max_width(dtype: torch.dtype) -> int:
    """The widest queries, keys and values of a dtype."""
    return MAX_WIDTH // 2 if dtype == torch.float32 else MAX_WIDTH


def _copied_bytes(call: AttentionCall) -> int:
    """How much the copies of one sequence's keys and values take: in two parts, converted, or repeated for a group of
    heads. Others are read where they are.
    """
    (_, query_heads, query_length, _), (_, heads, length, width) = call.query.shape, call.key.shape
    in_parts = call.query.dtype == torch.float32
    converted = call.mask is not None or call.bias is not None or call.alibi_slopes is not None
    plain = not (converted or call.window != (-1, -1))
    repeated = query_heads > heads and query_length > 1 and not plain
    if not (in_parts or converted or repeated):
        return 0
    itemsize = torch.float32.itemsize if converted else call.query.dtype.itemsize
    copied_heads = query_heads if repeated else heads
    return (2 if in_parts else 1) * copied_heads * length * (width + call.value.shape[-1]) * itemsize


def _planes(tensor: torch.Tensor | None) -> int:
    return 1 if tensor is None else tensor.shape[0] * tensor.shape[1]


def _attend_block(call: AttentionCall) -> AttentionResult:
    width = call.value.shape[-1]
    band, begin, end = call.band.narrowed()
    if begin == end:
        result = nothing_to_attend(call, NAME)
        result.suspect = torch.zeros(call.query.shape[0], dtype=torch.bool, device=call.query.device)
        return result
    key, value = call.key[:, :, begin:end], call.value[:, :, begin:end]
    causal = band.is_lower_triangle and not band.is_everything and call.mask is None and call.bias is None
    bias, shift = added(call, band, begin, end)
    dtype = call.query.dtype if bias is None else torch.float32
    excluded = exclusion(call, band, begin, end, causal)
    if excluded is not None:
        bias = excluded.new_zeros((), dtype=dtype) if bias is None else bias
        bias = bias.masked_fill(excluded, -torch.inf)
    query, scale = positive_scale(call.query.to(dtype), call.scale)
    key, value = key.to(dtype), value.to(dtype)
    if call.query.dtype == torch.float32:
        query, key, value = _in_parts(query, key, value)
    output, lse = _run(query, key, value, bias, causal, scale)
    output = _joined_parts(output, width) if call.query.dtype == torch.float32 else output[..., :width]
    output = output.to(call.query.dtype)
    finite = torch.isfinite(lse)
    if bias is not None and (excluded is not None or call.bias is not None):
        empty = (bias == -torch.inf).all(-1).expand(lse.shape)
        output = output.masked_fill(empty.unsqueeze(-1), 0)
        lse = lse.masked_fill(empty, -torch.inf)
        finite = finite | empty
    # Inputs are not looked at: that would take longer than few queries do, and whatever is not finite shows here.
    suspect = ~(finite.flatten(1).all(1) & torch.isfinite(output.sum((1, 2, 3), dtype=torch.float32)))
    if shift is not None:
        lse = lse + shift
    if call.sinks is not None:
        output, lse = add_sinks(output, lse, call.sinks[None, :, None])
    return AttentionResult(output, lse if call.return_lse else None, None, NAME, suspect)


def _run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [N, Hq, Lq, >= Dv] and lse [N, Hq, Lq] of the kernel itself."""
    (count, heads, length, _), kv_heads, kv_length = query.shape, key.shape[1], key.shape[2]
    query = padded(query, _rounded(query.shape[-1], ROW_ELEMENTS))
    key, value = _readable(key), _readable(value)
    group = heads // kv_heads
    uniform = bias is None or length == 1 or bias.shape[1] == bias.shape[2] == 1
    folded = group > 1 and not causal and uniform
    if folded:
        # Query heads that share a key head become queries of that head, which the kernel reads once for all of them.
        query = query.reshape(count, kv_heads, group * length, query.shape[-1])
        if bias is not None and bias.shape[1] > 1:
            bias = bias.reshape(bias.shape[0], kv_heads, group, bias.shape[-1])
    elif group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    if bias is not None:
        bias = padded(bias.expand(*bias.shape[:-1], kv_length), _rounded(kv_length, BIAS_ROW_ELEMENTS))
        bias = bias[..., :kv_length].expand(count, query.shape[1], query.shape[2], kv_length)
    output, lse, _, _ = _efficient(query, key, value, bias, True, 0.0, causal, scale=scale)
    lse = lse[..., : query.shape[2]]
    if folded:
        output = output.reshape(count, heads, length, output.shape[-1])
        lse = lse.reshape(count, heads, length)
    return output, lse


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Keys or values as the kernel can read them: in place, in pages or wider rows, if possible, else padded."""
    *lengths, width = tensor.shape
    *strides, element = tensor.stride()
    strides = [stride if length > 1 else width for length, stride in zip(lengths, strides, strict=True)]
    if element == 1 and begins_aligned(tensor) and not any(each % ROW_ELEMENTS for each in (width, *strides)):
        return tensor.as_strided(tensor.shape, (*strides, 1))
    return padded(tensor, _rounded(width, ROW_ELEMENTS))


def _in_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values in float32 of twice the width: keys and values as what TF32 holds of them, and the rest.
    Products of queries and keys are the same, and an output is the sum of its halves.
    """
    return torch.cat((query, query), -1), _two_parts(key), _two_parts(value)


def _two_parts(tensor: torch.Tensor) -> torch.Tensor:
    held = (tensor.view(torch.int32) & ~0x1FFF).view(torch.float32)
    return torch.cat((held, tensor - held), -1)


def _joined_parts(output: torch.Tensor, width: int) -> torch.Tensor:
    """The output of that width."""
    return output[..., :width] + output[..., width : 2 * width]


def _rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def window(band: Band) -> tuple[int, int] | None:
    """The band counted from the bottom right, if it is causal or everything and each query reaches a key."""
    found = band.from_bottom_right()
    if found == (-1, 0) and band.kv_length < band.query_length:
        return None
    return found if found in ((-1, -1), (-1, 0)) else None


def attend_ragged(call: RaggedCall) -> RaggedResult:
    """Computes a ragged call."""
    query, scale = positive_scale(call.query, call.scale)
    group = query.shape[1] // call.key.shape[1]
    query, key, value = (
        padded(tensor, _rounded(tensor.shape[-1], ROW_ELEMENTS)) for tensor in (query, call.key, call.value)
    )
    query, key, value = _in_parts(query, key, value)
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    output, lse, *_ = _efficient_ragged(
        query[None],
        key[None],
        value[None],
        None,
        call.query_starts,
        call.kv_starts,
        call.longest_query,
        call.longest_kv,
        0.0,
        _FROM_BOTTOM_RIGHT if call.window == (-1, 0) else 0,
        call.return_lse,
        scale=scale,
    )
    output = _joined_parts(output[0], value.shape[-1] // 2)[..., : call.value.shape[-1]]
    if not call.return_lse:
        return RaggedResult(output, None)
    token = torch.arange(len(query), dtype=torch.int32, device=query.device)
    sequence = torch.searchsorted(call.query_starts[1:], token, right=True)
    return RaggedResult(output, lse.transpose(1, 2)[sequence, token - call.query_starts[sequence]])


RAGGED_KERNEL = RaggedKernel(
    NAME,
    "float32 with dot products, any lengths in one call; masks, biases and ALiBi in any precision, equal lengths",
    frozenset((torch.float32,)),
    _max_width(torch.float32),
    window,
    attend_ragged,
)
