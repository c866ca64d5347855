"""Attention on packed rows by the kernels: stacks of sequences become calls, and results become rows again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnserve_server.devices.compute import Compute
from attnserve_server.kernels import (
    AdditiveScore,
    AttentionCall,
    AttentionResult,
    GeneralScore,
    accumulation_dtype,
    widened,
)
from attnserve_server.layers.layer import LayerInput, LayerOutput
from attnserve_server.layers.rows import Batch, SequenceKind, Stack


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer scores queries and keys, whatever the request; `pair_flops` is the cost of a pair in all heads."""

    scale: float
    pair_flops: int
    score: GeneralScore | AdditiveScore | None = None
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None


@dataclass(slots=True)
class Attended:
    """rows [n, Hq Dv], and a result for each stack."""

    rows: torch.Tensor
    heads: int
    results: list[AttentionResult]


def kinds_of(
    request: LayerInput, causal: bool, window: tuple[int, int], *, alibi: bool = False, own_keys: bool = False
) -> list[SequenceKind]:
    """The kind of each sequence in an attention with this `causal` and `window`, unless the request says otherwise.

    `own_keys`: the keys are the inputs, even if there is a context, and both are at the same positions.
    """
    options = request.options
    window = options.within(causal, window)
    kv_lengths = request.lengths if own_keys or request.context_lengths is None else request.context_lengths
    offsets = None if own_keys else request.offsets
    positioned = window != (-1, -1) or alibi
    mask, bias = _broadcast_axes(request.mask), _broadcast_axes(request.bias)
    kinds = []
    for n, (length, kv_length) in enumerate(zip(request.lengths, kv_lengths, strict=True)):
        offset = 0
        if positioned and not own_keys:
            offset = offsets[n] if offsets is not None else (kv_length - length if options.bottom_right else 0)
        kinds.append(
            SequenceKind(length, kv_length, offset, window, options.return_lse, options.return_scores, mask, bias)
        )
    return kinds


def _broadcast_axes(tensor: torch.Tensor | None) -> tuple[int, bool, bool] | None:
    return None if tensor is None else (tensor.shape[1], tensor.shape[2] == 1, tensor.shape[3] == 1)


def attend_stacks(
    compute: Compute,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    stacks: Sequence[Stack],
    scoring: Scoring,
) -> Attended:
    """Attention of query [n, Hq, D] over key [m, Hk, Dk] and value [m, Hk, Dv]; stacks are ranges of these rows."""
    calls = [
        AttentionCall(
            query=_of_sequences(query, stack.query_start, stack.count, stack.kind.query_length),
            key=_of_sequences(key, stack.kv_start, stack.count, stack.kind.kv_length),
            value=_of_sequences(value, stack.kv_start, stack.count, stack.kind.kv_length),
            scale=scoring.scale,
            score=scoring.score,
            softcap=scoring.softcap,
            offset=stack.kind.offset,
            window=stack.kind.window,
            mask=stack.mask,
            bias=stack.bias,
            alibi_slopes=scoring.alibi_slopes,
            return_lse=stack.kind.return_lse,
            return_scores=stack.kind.return_scores,
        )
        for stack in stacks
    ]
    results = compute.attend(calls, scoring.pair_flops * sum(stack.pairs for stack in stacks))
    return Attended(
        _rows_of(results, stacks, len(query), query.shape[1] * value.shape[2], query), query.shape[1], results
    )


def _rows_of(
    results: Sequence[AttentionResult], stacks: Sequence[Stack], count: int, width: int, like: torch.Tensor
) -> torch.Tensor:
    """The outputs [count, width] of stacks, padded with zeros."""
    by_token = [result.output.transpose(1, 2) for result in results]
    if len(by_token) == 1 and by_token[0].is_contiguous() and by_token[0].numel() == count * width:
        return by_token[0].view(count, width)
    rows, end = like.new_empty(count, width), 0
    for stack, output in zip(stacks, by_token, strict=True):
        end = stack.query_start + stack.count * stack.kind.query_length
        rows[stack.query_start : end].view(output.shape).copy_(output)
    rows[end:] = 0
    return rows


def _of_sequences(rows: torch.Tensor, start: int, count: int, length: int) -> torch.Tensor:
    """A view [count, H, length, D] of rows [n, H, D]."""
    return rows[start : start + count * length].view(count, length, *rows.shape[1:]).transpose(1, 2)


def replies(
    batch: Batch, requests: Sequence[LayerInput], output: torch.Tensor, attended: Attended
) -> list[LayerOutput]:
    """What each request gets: its rows of the output, and what else it asked for."""
    outputs = batch.outputs(output)
    if not any(each.options.return_lse or each.options.return_scores for each in requests):
        return outputs
    lses = [None if each.lse is None else each.lse[n] for each in attended.results for n in range(len(each.output))]
    scores = [
        None if each.scores is None else each.scores[n] for each in attended.results for n in range(len(each.output))
    ]
    returned = zip(requests, outputs, batch.by_request(lses), batch.by_request(scores), strict=True)
    for request, reply, own_lses, own_scores in returned:
        if request.options.return_lse:
            no_rows = output.new_zeros(attended.heads, 0, dtype=accumulation_dtype(output.dtype))
            reply.lse = torch.cat([no_rows, *(lse for lse in own_lses if lse is not None)], 1)
        if request.options.return_scores is not None:
            no_rows = output.new_zeros(attended.heads, 0, 0)
            reply.scores = _scores(request, [no_rows, *(part for part in own_scores if part is not None)])
    return outputs


def _scores(request: LayerInput, of_sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """The scores [Hq, L, S] of a request's sequences as one tensor, over the most keys; or their means over heads."""
    longest = max(part.shape[2] for part in of_sequences)
    scores = torch.cat([widened(part, longest, request.options.return_scores) for part in of_sequences], 1)
    if not request.options.average_scores:
        return scores
    # Head by head: the order in which torch sums along an axis depends on an element's position.
    total = scores[0].to(accumulation_dtype(scores.dtype))
    for head in scores[1:]:
        total = total + head
    return (total / len(scores)).to(scores.dtype)
