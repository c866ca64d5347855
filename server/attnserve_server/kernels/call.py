"""One call of a kernel: sequences of equal lengths on one device, in torch tensors; and its result.

N sequences (of one request or of several), Hq query heads, Hk key/value heads, Lq queries, S keys, D, Dk and Dv the
widths of queries, keys and values. Heads come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, overload

import torch
from torch.nn.functional import pad

from attnserve_server.kernels.band import Band

if TYPE_CHECKING:
    from attnserve_server.requests.options import ScoreStage


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, lse, biases and parameters: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def excluded_score(stage: ScoreStage | None) -> float:
    """What scores of that stage are for a key that is excluded."""
    return 0.0 if stage == "weights" else -torch.inf


def widened(scores: torch.Tensor, keys: int, stage: ScoreStage | None) -> torch.Tensor:
    """Scores [..., S] of that stage over the first keys as scores over so many, of which the others are excluded."""
    missing = keys - scores.shape[-1]
    return pad(scores, (0, missing), value=excluded_score(stage)) if missing else scores


@dataclass(frozen=True, slots=True)
class GeneralScore:
    """`scale * q W k` (Luong et al. 2015), W [D, Dk]."""

    weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class AdditiveScore:
    """`scale * w tanh(Wq q + Wk k + b)` (Bahdanau et al. 2015), Wq [U, D], Wk [U, Dk], b [U] or None, w [U] or None."""

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    bias: torch.Tensor | None = None
    output_weight: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Attention of N sequences that have everything in common but their elements.

    query [N, Hq, Lq, D], key [N, Hk, S, Dk], value [N, Hk, S, Dv]; Hq a multiple of Hk. `score` None is the dot
    product. Query i has position `offset + i`. `window` is (left, right), -1 open: (-1, 0) is a causal mask. `mask`
    (bool) and `bias` (of the accumulation dtype) have rank 4 and broadcast to [N, Hq, Lq, S]; `alibi_slopes` and
    `sinks` [Hq] are of the accumulation dtype. The shapes are not checked here: they were when the request came in.

    Keys and values may have another dtype, both the same, if the queries' can represent all of its values: they are
    converted where the call is computed. `finite` says that queries, keys and values are known to hold neither NaN nor
    infinities.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    score: GeneralScore | AdditiveScore | None = None
    softcap: float = 0.0
    offset: int = 0
    window: tuple[int, int] = (-1, -1)
    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    return_lse: bool = False
    return_scores: ScoreStage | None = None
    finite: bool = False

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """The dtype of lse, bias and sums: float64 for float64 queries, else float32."""
        return accumulation_dtype(self.query.dtype)

    @property
    def band(self) -> Band:
        """Which keys the queries reach by their positions."""
        return Band(self.query.shape[2], self.key.shape[2], self.offset, *self.window)

    def sequences(self, start: int, stop: int) -> AttentionCall:
        """The call for some of the sequences."""
        return replace(
            self,
            query=self.query[start:stop],
            key=self.key[start:stop],
            value=self.value[start:stop],
            mask=part_of(self.mask, 0, start, stop),
            bias=part_of(self.bias, 0, start, stop),
        )

    def queries(self, start: int, stop: int) -> AttentionCall:
        """The call for some of the queries."""
        return replace(
            self,
            query=self.query[:, :, start:stop],
            offset=self.offset + start,
            mask=part_of(self.mask, 2, start, stop),
            bias=part_of(self.bias, 2, start, stop),
        )

    def kv_heads(self, start: int, stop: int) -> AttentionCall:
        """The call for some of the key/value heads and the query heads that read them."""
        group = self.query.shape[1] // self.key.shape[1]
        first, last = start * group, stop * group
        return replace(
            self,
            query=self.query[:, first:last],
            key=self.key[:, start:stop],
            value=self.value[:, start:stop],
            mask=part_of(self.mask, 1, first, last),
            bias=part_of(self.bias, 1, first, last),
            alibi_slopes=None if self.alibi_slopes is None else self.alibi_slopes[first:last],
            sinks=None if self.sinks is None else self.sinks[first:last],
        )


@dataclass(slots=True)
class AttentionResult:
    """output [N, Hq, Lq, Dv]; lse [N, Hq, Lq] and scores [N, Hq, Lq, S] if asked for; the name of the kernel that ran.

    The dtype of output and scores is that of the queries, of lse the accumulation dtype. The layout in memory is
    whatever the kernel left. `suspect`, if there, is bool [N] on the device: where it is true, an input or a result
    is not finite, and the sequence is to be computed again by `written_out.attend_each`.
    """

    output: torch.Tensor
    lse: torch.Tensor | None
    scores: torch.Tensor | None
    kernel: str
    suspect: torch.Tensor | None = None

    @staticmethod
    def joined(parts: Sequence[AttentionResult], axis: int) -> AttentionResult:
        """The result of a call from those of calls for its sequences (axis 0), heads (1) or queries (2)."""
        if len(parts) == 1:
            return parts[0]
        suspects = [part.suspect for part in parts if part.suspect is not None]
        suspect = None
        if suspects:
            suspect = torch.cat(suspects) if axis == 0 else torch.stack(suspects).any(0)
        return AttentionResult(
            torch.cat([part.output for part in parts], axis),
            _concatenated([part.lse for part in parts], axis),
            _concatenated([part.scores for part in parts], axis),
            parts[0].kernel,
            suspect,
        )


def _concatenated(parts: Sequence[torch.Tensor | None], axis: int) -> torch.Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there, axis) if there else None


@overload
def part_of(tensor: torch.Tensor, axis: int, start: int, stop: int) -> torch.Tensor: ...


@overload
def part_of(tensor: torch.Tensor | None, axis: int, start: int, stop: int) -> torch.Tensor | None: ...


def part_of(tensor: torch.Tensor | None, axis: int, start: int, stop: int) -> torch.Tensor | None:
    """A mask or bias for a range along an axis: a slice, or all of it where the axis is broadcast."""
    if tensor is None or tensor.shape[axis] == 1:
        return tensor
    return tensor.narrow(axis, start, stop - start)
