"""One call of a ragged kernel: sequences of different lengths packed end to end, without padding; and its result.

T queries and U keys in all, N sequences, Hq query heads, Hk key/value heads, D and Dv the widths of keys and values.
Tokens come first here, as the kernels have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attnserve_server.kernels.band import Band


@dataclass(frozen=True, slots=True)
class RaggedCall:
    """Dot-product attention of N sequences, at most MAX_SEQUENCES, each with at least one query and one key.

    query [T, Hq, D], key [U, Hk, D], value [U, Hk, Dv], packed in memory. Sequence n has the queries from
    `query_starts[n]` to `query_starts[n + 1]` and the keys from `kv_starts[n]` (int32 [N + 1]). Query i of Lq stands at
    the key S - Lq + i, and `window` is (left, right) from there, -1 open.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_starts: torch.Tensor
    kv_starts: torch.Tensor
    longest_query: int
    longest_kv: int
    scale: float
    window: tuple[int, int]
    return_lse: bool


@dataclass(frozen=True, slots=True)
class ScatteredCall:
    """As a `RaggedCall` of N sequences whose keys lie anywhere in memory, and where each query attends to all of them.

    query [T, H, D], packed; key and value [U, H, D], as many heads, are views of memory in which a row follows another
    and heads are anywhere. Sequence n has the queries from `query_starts[n]` to `query_starts[n + 1]`, int32 [N + 1],
    and the `kv_lengths[n]` keys, int32 [N] and above 0, from `kv_starts[n]` on, int32 [N + 1], the last without
    meaning. D is a multiple of 8, and each row of each head begins at a multiple of 16 bytes.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_starts: torch.Tensor
    kv_starts: torch.Tensor
    kv_lengths: torch.Tensor
    longest_query: int
    longest_kv: int
    scale: float


MAX_SEQUENCES = 65535
"""Sequences are one axis of a grid of thread blocks, which can be no longer than this; heads are another."""
ALIGNMENT = 16
"""Kernels load so many bytes at a time, from addresses that are multiples of it."""


@dataclass(slots=True)
class RaggedResult:
    """output [T, Hq, Dv] and, if asked for, lse [T, Hq] in float32; queries that reach no key have 0 and -inf.

    Where queries, keys or values are not finite, both are meaningless.
    """

    output: torch.Tensor
    lse: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class RaggedKernel:
    """A kernel for ragged calls, why it is there, and what it takes: dtypes, widths up to `max_width`, and bands.

    `window` turns a band, narrowed to the keys within reach, into the window of a `RaggedCall`; None if it cannot.
    """

    name: str
    description: str
    dtypes: frozenset[torch.dtype]
    max_width: int
    window: Callable[[Band], tuple[int, int] | None]
    attend: Callable[[RaggedCall], RaggedResult]


def padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """A tensor whose last axis is widened with zeros, and packed: it and its rows are then aligned."""
    missing = width - tensor.shape[-1]
    if not missing and begins_aligned(tensor) and tensor.stride() == _packed(tensor.shape):  # nearly always
        return tensor
    if missing:
        tensor = torch.nn.functional.pad(tensor, (0, missing))
    tensor = tensor.contiguous()
    if not begins_aligned(tensor):  # a part of one row is packed, too, wherever it begins
        tensor = tensor.clone()
    # Kernels check strides; an axis of length 1 can have any, even in a packed tensor, but not in a view of a flat one.
    return tensor.view(-1).view(tensor.shape)


def _packed(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a packed tensor."""
    strides = [1]
    for length in shape[:0:-1]:
        strides.append(strides[-1] * length)
    return tuple(reversed(strides))


def begins_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor's first element is aligned; its storage is, whichever allocator it comes from."""
    return tensor.storage_offset() * tensor.element_size() % ALIGNMENT == 0
