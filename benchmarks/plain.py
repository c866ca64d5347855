"""Requests independent of any protocol: what is sent to peers, and computed by the definition.

In: arrays. Out: the exact output in float64 NumPy, by code shared with nothing that it checks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]


class PlainAttention(NamedTuple):
    """query [H, L, D], key and value [Hk, S, D]; a mask [L, S], true where a key is attended to; scale None: 1/√D."""

    query: Array
    key: Array
    value: Array
    mask: Array | None = None
    causal: bool = False
    scale: float | None = None


class PlainLayer(NamedTuple):
    """The input [L, 512] of the resident layer."""

    input: Array


Plain: TypeAlias = PlainAttention | PlainLayer


def exact_attention(problem: PlainAttention, rows: slice = slice(None)) -> Array:
    """softmax(scale · q k) v, [H, L, D] float64, for some of the queries; causal: up to each query's own position."""
    key, value = (array.astype(np.float64)[:, None] for array in (problem.key, problem.value))
    query = problem.query[:, rows].astype(np.float64)
    # Query heads grouped by the key head that they use: [Hk, Hq / Hk, L, D].
    grouped = query.reshape(len(key), -1, *query.shape[1:])
    scale = 1 / np.sqrt(query.shape[-1]) if problem.scale is None else problem.scale
    scores = grouped @ key.swapaxes(-1, -2) * scale
    if problem.mask is not None:
        scores = np.where(problem.mask[rows], scores, -np.inf)
    if problem.causal:
        positions = np.arange(problem.query.shape[1])[rows]
        scores = np.where(np.arange(key.shape[-2]) <= positions[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    output = weights @ value / weights.sum(axis=-1, keepdims=True)
    return np.asarray(output.reshape(len(query), query.shape[1], value.shape[-1]))
