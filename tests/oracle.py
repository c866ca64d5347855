"""What attention is: an oracle in plain NumPy float64, written to be read and to share nothing with what it checks.

In: the arguments of one attention as a caller gives them, of any dtype; each is converted to float64 exactly.
Out: `Expected`, everything that a reply may hold, in float64. It works on one sequence and one head at a time. What may
hold a NaN or an infinity is never multiplied by the weight 0 of a key that a row does not attend to: that gives NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class General:
    """The general score `scale * q W k`, with W [D, Dk]."""

    weight: Array


@dataclass(frozen=True)
class Additive:
    """The additive score `scale * w tanh(Wq q + Wk k + b)`: Wq [U, D], Wk [U, Dk], b [U] or none, w [U] or all ones."""

    query_weight: Array
    key_weight: Array
    bias: Array | None = None
    output_weight: Array | None = None


STAGES = ("raw", "capped", "masked", "weights")
"""The scores that can be asked for, in the order in which they are computed."""


@dataclass(frozen=True)
class Expected:
    """What a reply may hold, and which keys each row attends to.

    `output` has the shape of the query, but for its last axis, Dv. `lse` is [B, Hq, Lq], the others [B, Hq, Lq, S],
    without the axes that the query's rank lacks; [Hq, total] and [Hq, total, longest S] where packed.
    """

    output: Floats
    lse: Floats
    raw: Floats
    capped: Floats
    masked: Floats
    weights: Floats
    attended: NDArray[np.bool_]


@dataclass(frozen=True)
class _Sequence:
    """One sequence: query [Hq, Lq, D], key [Hk, S, Dk], value [Hk, S, Dv], and how many of its keys count."""

    query: Floats
    key: Floats
    value: Floats
    kv_length: int


def attend(
    query: Array,
    key: Array,
    value: Array,
    *,
    causal: bool | str = False,
    query_offset: Any = None,
    window: tuple[int, int] | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    kv_lengths: Any = None,
    query_lengths: Any = None,
    scale: float | None = None,
    softcap: float = 0.0,
    score: General | Additive | None = None,
    layout: str = "heads_first",
) -> Expected:
    """The attention of these arguments, which mean what those of `attnserve.Client.attend` mean."""
    rank = query.ndim
    query, key, value = (np.asarray(array).astype(np.float64) for array in (query, key, value))
    if layout == "packed":
        sequences = _split(query, key, value, query_lengths, kv_lengths)
        heads, longest_query, longest_key = query.shape[1], max(query_lengths, default=0), max(kv_lengths, default=0)
        lead: tuple[int, ...] = (heads, query.shape[0])
    else:
        query, key, value = (_heads_first(array, layout) for array in (query, key, value))
        kept = [key.shape[2]] * query.shape[0] if kv_lengths is None else kv_lengths
        sequences = [_Sequence(q, k, v, int(n)) for q, k, v, n in zip(query, key, value, kept, strict=True)]
        heads, longest_query, longest_key = query.shape[1], query.shape[2], key.shape[2]
        lead = query.shape[:3]
    grid = (len(sequences), heads, longest_query, longest_key)
    mask_grid = np.broadcast_to(True if mask is None else np.asarray(mask), grid)
    bias_grid = np.broadcast_to(0.0 if bias is None else np.asarray(bias).astype(np.float64), grid)
    offsets = None if query_offset is None else np.broadcast_to(np.asarray(query_offset), (len(sequences),))

    whole = Expected(
        output=np.zeros((*lead, value.shape[-1])),
        lse=np.zeros(lead),
        raw=np.full((*lead, longest_key), -np.inf),
        capped=np.full((*lead, longest_key), -np.inf),
        masked=np.full((*lead, longest_key), -np.inf),
        weights=np.zeros((*lead, longest_key)),
        attended=np.zeros((*lead, longest_key), dtype=np.bool_),
    )
    start = 0
    for b, sequence in enumerate(sequences):
        length, keys = sequence.query.shape[1], sequence.key.shape[1]
        if offsets is not None:
            offset = int(offsets[b])
        else:
            offset = sequence.kv_length - length if causal == "bottom_right" else 0
        position, j = offset + np.arange(length)[:, None], np.arange(keys)[None, :]
        allowed = np.broadcast_to(j < sequence.kv_length, (length, keys))
        if causal:
            allowed = allowed & (j <= position)
        if window is not None and window[0] != -1:
            allowed = allowed & (j >= position - window[0])
        if window is not None and window[1] != -1:
            allowed = allowed & (j <= position + window[1])
        for h in range(heads):
            shared = h // (heads // sequence.key.shape[0])
            added = bias_grid[b, h, :length, :keys]
            if alibi_slopes is not None:
                added = added - float(alibi_slopes[h]) * np.abs(position - j)
            part = _head(
                _raw(sequence.query[h], sequence.key[shared], score, scale),
                sequence.value[shared],
                softcap,
                added,
                allowed & mask_grid[b, h, :length, :keys],
                None if sinks is None else float(sinks[h]),
            )
            at = (h, slice(start, start + length)) if layout == "packed" else (b, h)
            whole.output[at], whole.lse[at] = part.output, part.lse
            for name in (*STAGES, "attended"):
                getattr(whole, name)[at][:, :keys] = getattr(part, name)
        start += length
    return _in_the_callers_shape(whole, rank, layout)


def _heads_first(array: Floats, layout: str) -> Floats:
    """[B, H, L, D] of an array of rank 2, 3 or 4 in a layout that is not packed."""
    if array.ndim == 2:
        return array[None, None]
    if layout == "length_first":
        array = np.swapaxes(array, -3, -2)
    return array if array.ndim == 4 else array[None]


def _split(query: Floats, key: Floats, value: Floats, query_lengths: Any, kv_lengths: Any) -> list[_Sequence]:
    """The sequences that lie end to end in arrays [total, H, D]."""
    sequences, query_at, key_at = [], 0, 0
    for length, keys in zip(query_lengths, kv_lengths, strict=True):
        own_queries, own_keys = slice(query_at, query_at + length), slice(key_at, key_at + keys)
        q, k, v = (part.swapaxes(0, 1) for part in (query[own_queries], key[own_keys], value[own_keys]))
        sequences.append(_Sequence(q, k, v, int(keys)))
        query_at, key_at = query_at + length, key_at + keys
    return sequences


def _in_the_callers_shape(whole: Expected, rank: int, layout: str) -> Expected:
    if layout == "packed":
        output, lacking = whole.output.swapaxes(0, 1), 0
    elif layout == "length_first" and rank > 2:
        output, lacking = whole.output.swapaxes(1, 2), 4 - rank
    else:
        output, lacking = whole.output, 4 - rank
    rest = (whole.lse, whole.raw, whole.capped, whole.masked, whole.weights, whole.attended)
    return Expected(*(array[(0,) * lacking] for array in (output, *rest)))


def _raw(query: Floats, key: Floats, score: General | Additive | None, scale: float | None) -> Floats:
    """The scores of queries [Lq, D] with keys [S, Dk]: [Lq, S]."""
    with np.errstate(invalid="ignore", over="ignore"):  # excluded keys may hold NaN and infinities
        if score is None:
            return (1 / np.sqrt(query.shape[1]) if scale is None else scale) * (query @ key.T)
        factor = 1.0 if scale is None else scale
        if isinstance(score, General):
            return factor * (query @ score.weight.astype(np.float64) @ key.T)
        of_query = query @ score.query_weight.astype(np.float64).T
        of_key = key @ score.key_weight.astype(np.float64).T
        hidden = of_query[:, None, :] + of_key[None, :, :]
        if score.bias is not None:
            hidden = hidden + score.bias.astype(np.float64)
        units = np.tanh(hidden)
        return factor * (
            units.sum(-1) if score.output_weight is None else units @ score.output_weight.astype(np.float64)
        )


def _head(
    raw: Floats, value: Floats, softcap: float, added: Floats, attended: NDArray[np.bool_], sink: float | None
) -> Expected:
    """Everything after the score, for one head of one sequence: raw, added, attended [Lq, S], value [S, Dv]."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        capped = softcap * np.tanh(raw / softcap) if softcap > 0 else raw
        masked = np.where(attended, capped + added, -np.inf)
        largest = masked.max(1, initial=-np.inf if sink is None else sink)[:, None]  # NaN if any is
        shift = np.where(largest == -np.inf, 0.0, largest)
        exponentials = np.where(attended, np.exp(masked - shift), 0.0)
        total = exponentials.sum(1, keepdims=True) + (0.0 if sink is None else np.exp(sink - shift))
        lse = (shift + np.log(total))[:, 0]  # -inf if there is nothing to attend to, or all of it scores -inf
        weights = np.where(total == 0, 0.0, exponentials / total)
        finite = np.isfinite(value).all(1)
        output = weights[:, finite] @ value[finite]
        for i in np.flatnonzero(attended[:, ~finite].any(1)):
            output[i] = weights[i, attended[i]] @ value[attended[i]]
    return Expected(output, lse, raw, capped, masked, weights, attended)
