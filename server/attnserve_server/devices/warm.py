"""Calls that load the kernels of a CUDA device, so that the first requests need not."""

from __future__ import annotations

import sys
from typing import Final

import torch

from attnserve import _wire
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from attnserve_server.kernels import (
    RAGGED_KERNELS,
    AttentionCall,
    RaggedCall,
    ScatteredCall,
    accumulation_dtype,
    attend,
    varlen_cuda,
)
from attnserve_server.requests.limits import RequestLimits
from attnserve_server.requests.request import Request, request_of
from attnserve_server.requests.tensors import MAX_LENGTH, MAX_RANK

MANY_TOKENS: Final = 1024
"""So many tokens, with 16 heads, are looked at and rearranged on the device, and not on the host (`packed_calls.py`).
"""
WIDTHS: Final = (64, 128)
"""The kernels of the ragged kinds differ by width; others than these are loaded when first needed, in milliseconds."""
_UNLIMITED: Final = RequestLimits(
    max_rank=MAX_RANK, max_elements=MAX_LENGTH, max_sequences=MAX_LENGTH, max_request_flops=sys.maxsize
)
"""The requests are the server's own: what it is configured to refuse to callers does not matter."""


def load_kernels(device: torch.device) -> None:
    """Loads the kernels that compute what others do not take, and the ragged ones."""
    for call in warm_calls(device):
        attend(call)
    for width in WIDTHS:
        for kernel in RAGGED_KERNELS:
            for dtype in kernel.dtypes:
                kernel.attend(warm_ragged_call(device, dtype, width))


def load_scattered(device: torch.device) -> None:
    """Loads the kernel for keys that lie anywhere. Raises what torch raises if it does not take such calls."""
    for width in WIDTHS:
        for dtype in varlen_cuda.DTYPES:
            varlen_cuda.attend_scattered(warm_scattered_call(device, dtype, width))


def warm_calls(device: torch.device) -> list[AttentionCall]:
    """Calls that load the kernels other than ragged ones."""
    calls = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        query = torch.randn(2, 4, 16, 64, device=device).to(dtype)
        bias = torch.zeros(1, 1, 16, 16, dtype=accumulation_dtype(dtype), device=device)
        calls += [
            AttentionCall(query, query, query, 0.125, mask=bias == 0),
            AttentionCall(query, query, query, 0.125, bias=bias, return_lse=True),
            AttentionCall(query, query, query, 0.125, window=(-1, 0), softcap=1.0, return_scores="weights"),
        ]
    return calls


def warm_ragged_call(device: torch.device, dtype: torch.dtype, width: int) -> RaggedCall:
    """A call of a ragged kernel: two causal sequences."""
    query = torch.randn(32, 4, width, device=device).to(dtype)
    starts = torch.tensor([0, 12, 32], dtype=torch.int32, device=device)
    return RaggedCall(query, query, query, starts, starts, 20, 20, 0.125, (-1, 0), True)


def warm_scattered_call(device: torch.device, dtype: torch.dtype, width: int) -> ScatteredCall:
    """A call over keys that lie anywhere: two sequences of 4 queries to the same 16 keys."""
    query = torch.randn(8, 4, width, device=device).to(dtype)
    keys = torch.randn(16, 4, width, device=device).to(dtype)
    query_starts = torch.tensor([0, 4, 8], dtype=torch.int32, device=device)
    kv_starts, kv_lengths = torch.zeros_like(query_starts), torch.full_like(query_starts[1:], 16)
    return ScatteredCall(query, keys, keys, query_starts, kv_starts, kv_lengths, 4, 16, 0.125)


def warm_requests() -> list[Request]:
    """Requests whose batches load what surrounds the ragged kernels: for each dtype one with few tokens, and one with
    many.
    """
    return [
        _request(tokens, dtype, sinks=tokens == 8)
        for dtype in (tensor_pb2.DATA_TYPE_FLOAT32, tensor_pb2.DATA_TYPE_FLOAT16, tensor_pb2.DATA_TYPE_BFLOAT16)
        for tokens in (8, MANY_TOKENS)
    ]


def _request(tokens: int, dtype: tensor_pb2.DataType, *, sinks: bool) -> Request:
    """Causal self-attention of zeros, with 16 heads of 64."""
    shape = (16, tokens, 64)
    size = (4 if dtype == tensor_pb2.DATA_TYPE_FLOAT32 else 2) * 16 * tokens * 64
    tensor = tensor_pb2.Tensor(dtype=dtype, shape=shape, data=bytes(size))
    message = pb.AttendRequest(query=tensor, key=tensor, value=tensor, causal=True, return_lse=True)
    if sinks:
        message.sinks.CopyFrom(tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[16], data=bytes(64)))
    data = message.SerializeToString()
    header, payloads = _wire.find(pb.AttendRequest, data, 0, len(data))
    return request_of(header, payloads, len(data), _UNLIMITED)
