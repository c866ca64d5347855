"""Stand-ins for torch's CUDA kernels, in plain torch on CPU tensors: as exact as possible, with the kernels' traps.

They reject what the kernels reject, and get wrong what the kernels get wrong: rows with nothing to attend to, scales
that are not positive, excluded NaN, window bounds beyond the longest sequence, rows that are not aligned. Code that
gets right results from them prepares calls and reads results correctly; the kernels themselves are for `tests/gpu`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

Tensor = torch.Tensor


def _attend(
    query: Tensor, key: Tensor, value: Tensor, excluded: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and lse of query [..., L, D]; scores are masked before scaling, as in the kernels, and NaN propagates."""
    assert query.shape[-1] == key.shape[-1]
    s = (query.double() @ key.double().mT).masked_fill(excluded, -math.inf) * scale
    if bias is not None:
        s = s + bias.double()
    weights = torch.exp(s - s.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    lse = (s.amax(-1, keepdim=True) + total.log()).squeeze(-1)
    return (weights / total @ value.double()).to(query.dtype), lse.float()


def _online(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same without masks, as the flash kernel has it: its maximum passes NaN over and counts as 0 if it is -inf,
    and where the sum of weights is 0 or NaN, it divides by 1 and the lse is +inf. So a row whose scores are all -inf,
    from keys that are not finite or products that overflow, has output 0 like one without keys.
    """
    s = query.double() @ key.double().mT * scale
    top = s.nan_to_num(-math.inf, math.inf, -math.inf).amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0)
    weights = torch.exp(s - top)
    total = weights.sum(-1, keepdim=True)
    nothing = (total == 0) | total.isnan()
    output = weights / total.masked_fill(nothing, 1) @ value.double()
    return output.to(query.dtype), (top + total.log()).masked_fill(nothing, math.inf).squeeze(-1).float()


def _is_aligned(tensor: Tensor, elements: int) -> bool:
    """Whether 16-byte loads are all aligned: at the start of the tensor and of each of its rows."""
    rows = all(stride % elements == 0 for stride in tensor.stride()[:-1])
    return tensor.data_ptr() % 16 == 0 and tensor.stride(-1) == 1 and rows


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_lse: bool,
    dropout: float,
    causal: bool,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`aten::_scaled_dot_product_efficient_attention`."""
    assert compute_lse
    assert dropout == 0
    assert query.dtype in (torch.float32, torch.float16, torch.bfloat16)
    assert query.dtype == key.dtype == value.dtype
    assert query.shape[:2] == key.shape[:2] == value.shape[:2]
    assert 0 < query.shape[0] <= 65535
    assert query.shape[1] <= 65535
    assert query.shape[2]
    assert key.shape[2] == value.shape[2] > 0
    assert all(_is_aligned(tensor, 8) and tensor.shape[-1] % 8 == 0 for tensor in (query, key, value))
    length, kv_length = query.shape[2], key.shape[2]
    if bias is not None:
        assert bias.dtype == query.dtype
        assert bias.shape == (*query.shape[:3], kv_length)
        assert _is_aligned(bias, 16)
    excluded = torch.zeros(length, kv_length, dtype=torch.bool)
    if causal:
        excluded = torch.ones(length, kv_length, dtype=torch.bool).triu(1)
    output, lse = _attend(query, key, value, excluded, bias, scale)
    rows = torch.full((*lse.shape[:2], -(-length // 32) * 32), math.nan)
    rows[..., :length] = lse
    return output, rows, torch.empty(0), torch.empty(0)


def efficient_ragged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    query_starts: Tensor,
    kv_starts: Tensor,
    longest_query: int,
    longest_kv: int,
    dropout: float,
    mask: int,
    compute_lse: bool,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    """`aten::_efficient_attention_forward` with sequences packed end to end."""
    assert bias is None
    assert dropout == 0
    assert mask in (0, 2)  # none, or causal aligned to the bottom right
    assert query.dtype == torch.float32
    assert query.shape[0] == key.shape[0] == value.shape[0] == 1
    assert query.shape[2] == key.shape[2] == value.shape[2]
    assert all(_is_aligned(tensor, 8) and tensor.shape[-1] % 8 == 0 for tensor in (query, key, value))
    window = (-1, 0) if mask else (-1, -1)
    output, lse = _ragged(
        query[0], key[0], value[0], query_starts, kv_starts, longest_query, longest_kv, scale, window, math.nan
    )
    if not compute_lse:
        return output[None], torch.empty(0)
    rows = torch.full((len(query_starts) - 1, query.shape[2], -(-longest_query // 32) * 32), math.nan)
    for n, (start, stop) in enumerate(zip(query_starts.tolist(), query_starts[1:].tolist(), strict=False)):
        rows[n, :, : stop - start] = lse[:, start:stop]
    return output[None], rows


def _ragged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    kv_starts: Tensor,
    longest_query: int,
    longest_kv: int,
    scale: float,
    window: tuple[int, int],
    empty_lse: float,
) -> tuple[Tensor, Tensor]:
    """Output [T, H, Dv] and lse [H, T]; rows without keys have output 0, or NaN if `empty_lse` is NaN."""
    assert query_starts.dtype == kv_starts.dtype == torch.int32
    assert 1 < len(query_starts) == len(kv_starts) <= 65536
    assert query_starts[0] == kv_starts[0] == 0
    assert query_starts[-1] == len(query)
    assert kv_starts[-1] == len(key) == len(value)
    assert longest_query == query_starts.diff().max()
    assert longest_kv == kv_starts.diff().max()
    assert query_starts.diff().min() > 0
    assert kv_starts.diff().min() > 0
    assert all(tensor.is_contiguous() and _is_aligned(tensor, 8) for tensor in (query, key, value))
    left, right = (-1 if bound >= longest_kv else bound for bound in window)
    output, lse = torch.empty(len(query), query.shape[1], value.shape[-1], dtype=query.dtype), []
    group = query.shape[1] // key.shape[1]
    for n in range(len(query_starts) - 1):
        queries, keys = slice(*query_starts[n : n + 2].tolist()), slice(*kv_starts[n : n + 2].tolist())
        length, kv_length = queries.stop - queries.start, keys.stop - keys.start
        position, j = torch.arange(length)[:, None] + kv_length - length, torch.arange(kv_length)
        excluded = torch.zeros(length, kv_length, dtype=torch.bool)
        if left >= 0:
            excluded |= j < position - left
        if right >= 0:
            excluded |= j > position + right
        k, v = (tensor[keys].repeat_interleave(group, 1).transpose(0, 1) for tensor in (key, value))
        own, own_lse = _attend(query[queries].transpose(0, 1), k, v, excluded, None, scale)
        empty = excluded.all(-1)
        own[:, empty] = math.nan if math.isnan(empty_lse) else 0
        own_lse[:, empty] = empty_lse
        output[queries] = own.transpose(0, 1)
        lse.append(own_lse)
    return output, torch.cat(lse, 1)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    kv_starts: Tensor,
    longest_query: int,
    longest_kv: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
    seqused_k: Tensor | None,
) -> tuple[Tensor, ...]:
    """`aten::_flash_attention_forward` of torch 2.11. It divides the keys of single queries of grouped heads, unless
    there is a window.
    """
    window = window_size_left, window_size_right
    assert longest_query > 1 or window != (-1, -1) or query.shape[1] == key.shape[1]
    assert query.dtype == key.dtype == value.dtype in (torch.float16, torch.bfloat16)
    assert query.shape[1] <= 65535
    assert query.shape[1] % key.shape[1] == 0
    assert key.shape[1] == value.shape[1]
    assert query.shape[2] == key.shape[2] == value.shape[2] <= 256
    assert query.shape[2] % 8 == 0
    assert dropout == 0
    assert scale > 0
    assert causal == (window == (-1, 0))
    assert not debug
    starts = query_starts, kv_starts
    if seqused_k is None:
        output, lse = _ragged(query, key, value, *starts, longest_query, longest_kv, scale, window, math.inf)
    else:
        assert window == (-1, -1)
        output, lse = _scattered(query, key, value, *starts, longest_query, longest_kv, scale, seqused_k)
    return output, lse, torch.empty(0), torch.empty(0), torch.empty(0)


def newest_flash(*arguments: Any, num_splits: int, **options: Any) -> tuple[Tensor, ...]:
    """The same of torch 2.13, which divides keys unless told not to."""
    assert num_splits == 1
    tensors, rest = arguments[:5], arguments[5:]
    if options["seqused_k"] is None and (options["window_size_left"], options["window_size_right"]) == (-1, -1):
        key, value = (each.repeat_interleave(tensors[0].shape[1] // each.shape[1], 1) for each in tensors[1:3])
        tensors = (tensors[0], key, value, *tensors[3:])
    return flash(*tensors, *rest, **options)


def _scattered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    kv_starts: Tensor,
    longest_query: int,
    longest_kv: int,
    scale: float,
    seqused_k: Tensor,
) -> tuple[Tensor, Tensor]:
    """Told how many keys each sequence has, the kernel takes them from where they begin, row by row, and reads no
    others.
    """
    assert query.shape[1] == key.shape[1]
    assert query.is_contiguous()
    assert all(_is_aligned(tensor, 8) for tensor in (query, key, value))
    assert key.shape[0] == value.shape[0]
    assert query_starts.dtype == kv_starts.dtype == seqused_k.dtype == torch.int32
    assert all(tensor.is_contiguous() for tensor in (query_starts, kv_starts, seqused_k))
    assert 1 < len(query_starts) == len(kv_starts) == len(seqused_k) + 1 <= 65536
    assert query_starts[0] == 0
    assert query_starts[-1] == len(query)
    assert longest_query == query_starts.diff().max()
    assert longest_kv == seqused_k.max()
    assert query_starts.diff().min() > 0
    assert seqused_k.min() > 0
    assert kv_starts[:-1].min() >= 0
    output, lse = torch.empty_like(query), torch.empty(query.shape[1], len(query))
    for n, length in enumerate(seqused_k.tolist()):
        queries, start = slice(*query_starts[n : n + 2].tolist()), int(kv_starts[n])
        assert start + length <= len(key)
        k, v = (tensor[start : start + length].transpose(0, 1) for tensor in (key, value))
        own, own_lse = _online(query[queries].transpose(0, 1), k, v, scale)
        output[queries] = own.transpose(0, 1)
        lse[:, queries] = own_lse
    return output, lse
