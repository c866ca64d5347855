"""Attention on torch tensors by the native kernel.

In: calls as all kernels take them. Out: their results; sequences whose results have NaN or infinities are left to the
other kernels, which treat such values as the contract says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from attnserve_server.kernels import AttentionCall, AttentionResult, attend_again
from attnserve_server.native.dtypes import NATIVE_FROM_TORCH
from attnserve_server.native.library import (
    NAME,
    Addresses,
    Keys,
    Library,
    Shape,
    Strides,
    Threads,
    pack_several,
    supports,
)


class Options(Protocol):
    """Queries [N, Hq, Lq, D] and the options of their attention, whatever the keys."""

    @property
    def query(self) -> torch.Tensor: ...

    @property
    def scale(self) -> float: ...

    @property
    def softcap(self) -> float: ...

    @property
    def window(self) -> tuple[int, int]: ...


def applies(call: AttentionCall) -> bool:
    """Whether the native kernel computes a call."""
    tensors = call.query, call.key, call.value
    return (
        call.return_scores is None
        and supports(
            call,
            max(call.query.shape[3], call.value.shape[3]),
            hides=call.mask is not None or call.bias is not None,
            alibi=call.alibi_slopes is not None,
        )
        and all(tensor.dtype in NATIVE_FROM_TORCH and tensor.stride(3) == 1 for tensor in tensors)
    )


def attend_all(library: Library, calls: Sequence[AttentionCall], threads: Threads | None) -> list[AttentionResult]:
    """The results of calls for which `applies` is true. `threads` as in the library."""
    packed = bytearray()
    results, alive = [], []  # `alive` is kept until the kernel has read it
    for call in calls:
        (count, heads, length, _), dtype = call.query.shape, torch.float32
        # Length first, as layers use it next: adjacent heads then form one row.
        output = call.query.new_empty(count, length, heads, call.value.shape[3]).transpose(1, 2)
        lse = call.query.new_empty(count, heads, length, dtype=dtype) if call.return_lse else None
        results.append(AttentionResult(output, lse, None, NAME))
        alive.append(_add(packed, call, output, lse))
    places = [
        (call, result, place) for call, result in zip(calls, results, strict=True) for place in range(len(call.query))
    ]
    for call, result, place in (places[at] for at in library.attend(packed, threads)):
        other = attend_again(call.sequences(place, place + 1))
        result.output[place] = other.output[0]
        if result.lse is not None and other.lse is not None:
            result.lse[place] = other.lse[0]
    return results


def _add(packed: bytearray, call: AttentionCall, output: torch.Tensor, lse: torch.Tensor | None) -> object:
    """Packs each sequence of a call. Returns the tensors that it may have copied."""
    query, key, value = call.query, call.key, call.value
    mask, bias = (
        None if each is None else broadcast(each, (*query.shape[:3], key.shape[2])) for each in (call.mask, call.bias)
    )
    keys = Keys(key.shape[2], call.offset, NATIVE_FROM_TORCH[key.dtype], 0, strides_of(key), strides_of(value))
    shape = shape_of(call, key.shape[1], output, mask, bias, keys)
    bases = query, key, value, output, lse, mask, bias
    starts = [0 if tensor is None else tensor.data_ptr() for tensor in bases]
    steps = [0 if tensor is None else tensor.stride(0) * tensor.itemsize for tensor in bases]
    constant = [0 if tensor is None else tensor.data_ptr() for tensor in (call.alibi_slopes, call.sinks)]
    addresses: Addresses = (*starts, *constant)  # type: ignore[assignment]
    packed += pack_several(addresses, steps, shape, query.shape[0])
    return mask, bias


def shape_of(
    call: Options,
    kv_heads: int,
    output: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    keys: Keys,
) -> bytes:
    """The packed shape of the call that attends from queries to some keys and writes output [N, Hq, Lq, Dv]; mask and
    bias are as `broadcast` returns them.
    """
    _, heads, length, width = call.query.shape
    return Shape(
        query_length=length,
        kv_length=keys.length,
        offset=keys.offset,
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        value_dim=output.shape[3],
        query_dtype=NATIVE_FROM_TORCH[call.query.dtype],
        kv_dtype=keys.dtype,
        page_tokens=keys.page_tokens,
        query=strides_of(call.query),
        key=keys.key,
        value=keys.value,
        output=strides_of(output),
        lse_head=length,
        mask=(0, 0, 0) if mask is None else mask.stride()[1:],
        bias=(0, 0, 0) if bias is None else bias.stride()[1:],
        left=call.window[0],
        right=call.window[1],
        scale=call.scale,
        softcap=call.softcap,
    ).packed()


def strides_of(tensor: torch.Tensor) -> Strides:
    """The strides of a tensor [N, H, L, width]."""
    return Strides(tensor.stride(2), tensor.stride(1))


def broadcast(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A mask or bias of rank 4 as [N, Hq, Lq, S], whose strides are 0 where it is broadcast, and 1 from key to key."""
    if tensor.stride(3) != 1 and tensor.shape[3] > 1:
        tensor = tensor.contiguous()
    return tensor.expand(shape)
