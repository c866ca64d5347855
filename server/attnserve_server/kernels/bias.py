"""Masks, windows, biases, ALiBi and sinks for kernels that take one additive bias; for any device.

In: a call and the band of its queries over the keys within reach. Out: tensors of rank 4 that broadcast to the scores.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from attnserve_server.kernels.band import Band
from attnserve_server.kernels.call import AttentionCall, AttentionResult, part_of

VECTOR_ELEMENTS = 32
"""A multiple of the elements that torch computes at once on any CPU."""
LEAST_SCALE = 2.0**-60
"""Kernels scale scores in float32, where a smaller scale may make them 0."""


def exclusion(call: AttentionCall, band: Band, begin: int, end: int, causal: bool) -> torch.Tensor | None:
    """Bool of rank 4, true where a key from `begin` to `end` is excluded; None if nothing is.

    With `causal`, the kernel excludes what is outside the band by a flag of its own, so that only the mask is left.
    """
    excluded = None
    if not band.is_everything and not causal:
        excluded = ~band.tensor(call.query.device)[None, None]
    if call.mask is not None:
        masked = ~part_of(call.mask, 3, begin, end)
        excluded = masked if excluded is None else excluded | masked
    if excluded is None or excluded.shape[-1] == band.kv_length:
        return excluded
    return excluded.expand(*excluded.shape[:-1], band.kv_length)


def added(call: AttentionCall, band: Band, begin: int, end: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What to add to the scores of the keys from `begin` to `end`, and the term that the lse then lacks [1, Hq, Lq]."""
    bias = part_of(call.bias, 3, begin, end)
    if call.alibi_slopes is None:
        return bias, None
    slopes, shift = alibi(call.alibi_slopes, band)
    return (slopes if bias is None else bias + slopes), shift


def alibi(slopes: torch.Tensor, band: Band) -> tuple[torch.Tensor, torch.Tensor]:
    """The biases [1, Hq, Lq, S] of slopes [Hq], and the term that the lse then lacks [1, Hq, Lq].

    A row's ALiBi is measured from the nearest key that the row reaches, or from the farthest if the slope is negative.
    So the keys that matter have small biases. That leaves the softmax the same, and the second result corrects the lse.
    """
    device = slopes.device
    position = torch.arange(band.query_length, device=device).unsqueeze(1) + band.offset
    distance = (position - torch.arange(band.kv_length, device=device)).abs()
    within = distance
    if not band.is_everything:
        outside = ~band.tensor(device)
        distance = distance.masked_fill(outside, band.query_length + band.kv_length + abs(band.offset))
        within = within.masked_fill(outside, 0)
    slopes = slopes[None, :, None, None]
    origin = torch.where(slopes < 0, within.amax(-1, keepdim=True), distance.amin(-1, keepdim=True))
    return -slopes * (distance - origin), (-slopes * origin).squeeze(-1)


def positive_scale(query: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Queries and a scale above 0 that give the same scores.

    Kernels scale after masking: -inf times 0 (or what rounds to it) is NaN, and times a negative number +inf.
    """
    if scale >= LEAST_SCALE:
        return query, scale
    return (-query, -scale) if scale <= -LEAST_SCALE else (query * scale, 1.0)


def add_sinks(output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [..., Dv] and lse [...] with one more key, of value zero and of scores `sinks` that broadcast to lse.

    Transcendental functions give different bits in a vector and at the ragged end of an array, so that an element's
    bits would depend on its place. Hence rows are padded to whole vectors.
    """
    length = lse.shape[-1]
    missing = -length % VECTOR_ELEMENTS
    rows = pad(lse, (0, missing))
    sink = sinks if sinks.shape[-1] == 1 else pad(sinks, (0, missing))
    total = torch.logaddexp(rows, sink)
    share = torch.exp(rows - total)[..., :length]
    total = total[..., :length]
    # Without keys and sink, there is nothing to share.
    return (output * share.masked_fill(total == -torch.inf, 0).unsqueeze(-1)).to(output.dtype), total


def nothing_to_attend(call: AttentionCall, kernel: str) -> AttentionResult:
    """The result where no query reaches any key, or there is none."""
    count, heads, length = call.query.shape[:3]
    output = call.query.new_zeros(count, heads, length, call.value.shape[-1])
    lse = torch.full((count, heads, length), -torch.inf, dtype=call.accumulation_dtype, device=call.query.device)
    if call.sinks is not None:
        lse = torch.maximum(lse, call.sinks[None, :, None])
    return AttentionResult(output, lse if call.return_lse else None, None, kernel)
