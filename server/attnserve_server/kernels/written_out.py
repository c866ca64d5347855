"""Attention written out: every option, every value, on any device; the kernel that all others fall back on.

Scores are made for blocks of queries, so that memory stays bounded. On a CPU, float32 is computed in float64: what
comes here is rare (softcaps, learned scores, requested scores, infinities and NaNs), and exact beats fast. Half
precisions are computed in float32, which takes a half to a quarter of the time. So is float32 on CUDA, unless scores
are learned: their sums add to the error. Where scores have left the range of float32, they are computed again in
float64. On CUDA, whether they have, and whether values are finite, is reported (`suspect`), not waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import NamedTuple

import torch

from attnserve_server.kernels.band import Band
from attnserve_server.kernels.call import (
    AdditiveScore,
    AttentionCall,
    AttentionResult,
    GeneralScore,
    accumulation_dtype,
    part_of,
)
from attnserve_server.requests.scores import needs_float64

NAME = "math"
BLOCK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""The scores (or hidden units of the additive score) that one block of queries may have in all its heads."""
LARGE = 1e37
"""Scores up to this are certain not to overflow in float32, exponent and all."""


def attend(call: AttentionCall) -> AttentionResult:
    """Computes a call; on a CPU sequence by sequence, elsewhere together, and with `suspect` set."""
    return attend_each(call) if call.query.device.type == "cpu" else attend_together(call)


def attend_each(call: AttentionCall) -> AttentionResult:
    """Computes the sequences one by one: a sequence's bits do not depend on the others. Waits for the device."""
    results = []
    for n in range(call.query.shape[0]):
        sequence = call.sequences(n, n + 1)
        finite, exact = bool(torch.isfinite(sequence.value).all()), _dtype_for(sequence)
        result = _attend(sequence, finite, exact)
        if exact != torch.float64 and not result.in_range.item():
            result = _attend(sequence, finite, torch.float64)
        results.append(result)
    return _joined(call, results, None)


def attend_heads(call: AttentionCall, heads: list[list[int]], output: torch.Tensor, lse: torch.Tensor) -> None:
    """Computes some [sequence, key head] of a call, and puts them in the place of another kernel's results."""
    group = call.query.shape[1] // call.key.shape[1]
    for n, head in heads:
        exact = attend(replace(call.sequences(n, n + 1).kv_heads(head, head + 1), return_lse=True))
        assert exact.lse is not None
        mine = n, slice(head * group, (head + 1) * group)
        output[mine], lse[mine] = exact.output[0], exact.lse[0]


def attend_together(call: AttentionCall) -> AttentionResult:
    """Computes as many sequences at a time as memory allows, and waits for nothing."""
    (count, heads, query_length, _), kv_length = call.query.shape, call.key.shape[2]
    each = heads * query_length * kv_length * _units(call)
    step = max(1, BLOCK_ELEMENTS[call.query.device.type] // max(1, each))
    exact = _dtype_for(call)
    results = [_attend(call.sequences(start, min(start + step, count)), True, exact) for start in range(0, count, step)]
    sound = torch.isfinite(call.value).flatten(1).all(1)
    if exact != torch.float64:
        sound = sound & torch.cat([result.in_range for result in results])
    return _joined(call, results, ~sound)


class _Attended(NamedTuple):
    """The results of some sequences, and which of them have kept the range of the dtype they were computed in [N]."""

    output: torch.Tensor
    lse: torch.Tensor
    scores: torch.Tensor | None
    in_range: torch.Tensor


def _joined(call: AttentionCall, results: list[_Attended], suspect: torch.Tensor | None) -> AttentionResult:
    scores = [result.scores for result in results if result.scores is not None]
    return AttentionResult(
        output=torch.cat([result.output for result in results]),
        lse=torch.cat([result.lse for result in results]) if call.return_lse else None,
        scores=torch.cat(scores) if call.return_scores else None,
        kernel=NAME,
        suspect=suspect,
    )


def first_dtype(query: torch.Tensor, learned: bool) -> torch.dtype:
    """The dtype that this kernel at first computes such queries in, with a learned score or without. Parameters of
    scores that have this dtype need no conversion.
    """
    if query.dtype == torch.float32 and (learned or query.device.type == "cpu"):
        return torch.float64
    return accumulation_dtype(query.dtype)


def stay_in_float32(query: torch.Tensor, key: torch.Tensor, scale: float) -> bool:
    """Whether the scores of queries [..., D] and keys [..., D] are certain not to overflow, nor their sums of products
    before they are scaled; not where any is NaN.
    """
    return _most(query, key, scale) < LARGE


def overflow_in_float32(call: AttentionCall) -> bool:
    """Whether finite queries and keys may have scores, or sums of products, that overflow in float32."""
    return call.score is None and LARGE <= _most(call.query, call.key, call.scale) < inf


def _most(query: torch.Tensor, key: torch.Tensor, scale: float) -> float:
    """What no score and no sum of products exceeds."""
    largest = [tensor.abs().amax().item() if tensor.numel() else 0.0 for tensor in (query, key)]
    return largest[0] * largest[1] * query.shape[-1] * max(1.0, abs(scale))


def _dtype_for(call: AttentionCall) -> torch.dtype:
    """The dtype to compute a call in, at first."""
    if needs_float64(call):
        return torch.float64
    return first_dtype(call.query, call.score is not None)


def _units(call: AttentionCall) -> int:
    """The hidden units of a score."""
    return call.score.query_weight.shape[0] if isinstance(call.score, AdditiveScore) else 1


def _attend(call: AttentionCall, value_is_finite: bool, exact: torch.dtype) -> _Attended:
    """The results of sequences, together, computed in a dtype."""
    query, key, value = call.query, call.key, call.value
    (count, query_heads, query_length, _), (_, kv_heads, kv_length, _) = query.shape, key.shape
    device, width = query.device, value.shape[-1]

    output = torch.zeros(count, query_heads, query_length, width, dtype=query.dtype, device=device)
    lse = torch.full((count, query_heads, query_length), -torch.inf, dtype=call.accumulation_dtype, device=device)
    scores = None
    if call.return_scores is not None:
        scores = torch.empty(count, query_heads, query_length, kv_length, dtype=query.dtype, device=device)
    in_range = torch.ones(count, dtype=torch.bool, device=device)
    if query_length == 0:
        return _Attended(output, lse, scores, in_range)

    key, value = _aligned(key, exact), _aligned(value, exact)
    score = _score_function(call, key, exact)
    sinks = None if call.sinks is None else call.sinks.to(exact)[None, :, None, None]
    band = call.band
    row = count * query_heads * kv_length * _units(call)
    rows = max(1, BLOCK_ELEMENTS[device.type] // max(1, row))
    for start in range(0, query_length, rows):
        stop = min(start + rows, query_length)
        s = score(_aligned(query[:, :, start:stop], exact))
        capped, returned = call.softcap > 0, call.return_scores not in (None, "weights")
        if exact != torch.float64 and (call.score is None or capped or returned):
            in_range &= _are_finite(s)  # a softcap hides an infinite score, and a weight of 0 one that is -inf
        if call.return_scores == "raw" and scores is not None:
            scores[:, :, start:stop] = s
        if call.softcap > 0:
            s = call.softcap * torch.tanh(s / call.softcap)
        if call.return_scores == "capped" and scores is not None:
            scores[:, :, start:stop] = s
        if call.bias is not None:
            s = s + part_of(call.bias, 2, start, stop)
        attended = _attended(call, band.queries(start, stop), start, stop)
        if attended is not None:
            attended = attended.expand(s.shape)
        shift = None
        if call.alibi_slopes is not None and kv_length:
            slopes = call.alibi_slopes.to(exact)[None, :, None, None]
            position = torch.arange(start, stop, device=device).unsqueeze(1) + call.offset
            distance = (position - torch.arange(kv_length, device=device)).abs()
            added, shift = _alibi(slopes, distance, attended, sinks)
            s = s + added
        if attended is not None:
            s = s.masked_fill(~attended, -torch.inf)
        if call.return_scores == "masked" and scores is not None:
            scores[:, :, start:stop] = s if shift is None else s + shift
        weights, block_lse = _softmax(s, sinks if sinks is None or shift is None else sinks - shift)
        if call.return_scores == "weights" and scores is not None:
            # In a row that attends to a NaN, what is excluded has become NaN, too.
            scores[:, :, start:stop] = weights if attended is None else weights.masked_fill(~attended, 0)
        if exact != torch.float64:
            in_range &= _are_finite(block_lse if attended is None else block_lse.masked_fill(~attended.any(-1), 0))
        lse[:, :, start:stop] = block_lse if shift is None else block_lse + shift.squeeze(-1)
        grouped = weights.reshape(count, kv_heads, query_heads // kv_heads * (stop - start), kv_length)
        if value_is_finite:
            block = grouped @ value
        else:
            block = _weigh_non_finite(grouped, value, attended)
        output[:, :, start:stop] = block.reshape(count, query_heads, stop - start, width)
    return _Attended(output, lse, scores, in_range)


def _attended(call: AttentionCall, band: Band, start: int, stop: int) -> torch.Tensor | None:
    """Bool that broadcasts to the scores of some queries, true where no mask excludes; None if nothing does."""
    mask = part_of(call.mask, 2, start, stop)
    if band.is_everything:
        return mask
    reached = band.tensor(call.query.device)[None, None]
    return reached if mask is None else reached & mask


def _alibi(
    slopes: torch.Tensor, distance: torch.Tensor, attended: torch.Tensor | None, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The biases of slopes [1, Hq, 1, 1] for queries at these distances from the keys, and the term that scores and lse
    then lack, one for each row: both broadcast to the scores, as `attended` and `sinks` do.

    Measured from the nearest key that a row attends to, since the biases of keys that are all far away would leave
    float32 no digits for their scores. The softmax stays the same.
    """
    nowhere = torch.iinfo(distance.dtype).max
    nearest = (distance if attended is None else distance.masked_fill(~attended, nowhere)).amin(-1, keepdim=True)
    shift = -slopes * nearest
    # Not where inf - inf would be NaN, where there is nothing to attend, or where the sink outweighs the keys.
    shifted = slopes.isfinite() & (nearest > 0) & (nearest < nowhere)
    if sinks is not None:
        shifted = shifted & (shift >= sinks)
    return -slopes * (distance - torch.where(shifted, nearest, 0)), torch.where(shifted, shift, 0)


def _are_finite(tensor: torch.Tensor) -> torch.Tensor:
    """For each sequence, whether all is certainly finite: a sum is finite only if its terms are."""
    return tensor.flatten(1).sum(1).isfinite()


def _softmax(s: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and lse over the last axis, with sinks that broadcast to the rows; a row of nothing but -inf has weights
    0 and lse -inf.
    """
    if s.shape[-1] == 0:
        top = torch.full(s.shape[:-1], -torch.inf, dtype=s.dtype, device=s.device).unsqueeze(-1)
    else:
        top = s.amax(-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink)
    shift = top.masked_fill(top == -torch.inf, 0)
    weights = torch.exp(s - shift)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - shift)
    lse = (shift + torch.log(total)).squeeze(-1)
    return weights / total.masked_fill(total == 0, 1), lse


def _weigh_non_finite(weights: torch.Tensor, value: torch.Tensor, attended: torch.Tensor | None) -> torch.Tensor:
    """`weights @ value` where a value may be infinite or NaN, and an excluded one is skipped, not multiplied by 0.

    weights [1, Hk, R, S], value [1, Hk, S, Dv], attended None or [1, Hq, Lq, S] of as many elements as weights.
    """
    finite = torch.isfinite(value).all(-1).all(1)[0]  # [S]: keys whose value is finite in every head
    result = weights @ value.masked_fill(~finite[None, None, :, None], 0)
    if attended is not None:
        attended = attended.reshape(weights.shape)
    for key in torch.nonzero(~finite).flatten().tolist():
        contribution = weights[..., key, None] * value[:, :, None, key]
        if attended is not None:
            contribution = contribution.masked_fill(~attended[..., key, None], 0)
        result = result + contribution
    return result


def _score_function(
    call: AttentionCall, key: torch.Tensor, exact: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function from a block of queries [N, Hq, R, D] to its scores [N, Hq, R, S], scale included."""
    kv_heads, kv_length = key.shape[1], key.shape[2]

    def by_group(query: torch.Tensor) -> torch.Tensor:
        return query.reshape(len(query), kv_heads, -1, query.shape[-1])

    def dot(query: torch.Tensor) -> torch.Tensor:
        return (by_group(query) @ key.mT).reshape(*query.shape[:3], kv_length) * call.scale

    if call.score is None:
        return dot
    if isinstance(call.score, GeneralScore):
        weight = call.score.weight.to(exact)
        return lambda query: dot(query @ weight)

    parameters = call.score
    query_weight = parameters.query_weight.to(exact)
    projected_key = key @ parameters.key_weight.to(exact).mT
    if parameters.bias is not None:
        projected_key = projected_key + parameters.bias.to(exact)
    output_weight = None if parameters.output_weight is None else parameters.output_weight.to(exact)

    def additive(query: torch.Tensor) -> torch.Tensor:
        projected_query = by_group(query @ query_weight.mT)
        hidden = torch.tanh(projected_query.unsqueeze(3) + projected_key.unsqueeze(2))
        s = hidden.sum(-1) if output_weight is None else hidden @ output_weight
        return s.reshape(*query.shape[:3], kv_length) * call.scale

    return additive


def _aligned(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of the tensor in a dtype, packed and at an address that does not depend on its place in a batch.

    Axes of length 1 have the strides of a packed tensor, too, which `contiguous` may leave as they are: which product
    torch computes depends on them.
    """
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
