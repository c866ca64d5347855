"""Requests whose answers are known: small attentions of many shapes, each with its number in its values.

Every row of the values begins with the number, so that every row of the answer does, whatever the weights are. This
tells an answer that was meant for another caller from one that is merely wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Self, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]

TOLERANCE: Final = 2e-6
"""How far an answer may be from the exact one (unit-normal inputs, float32)."""
FINGERPRINTS: Final = 1 << 22
"""Numbers repeat beyond this many: a float32 must hold them."""


class Verdict(Enum):
    """What an answer is."""

    RIGHT = "right"
    WRONG = "wrong"
    ANOTHERS = "another's"


@dataclass(frozen=True, slots=True)
class Question:
    """An attention [H, L, D] to S keys, and its number."""

    number: int
    query: Array
    key: Array
    value: Array
    causal: bool

    @classmethod
    def numbered(cls, number: int, shape: int | None = None) -> Self:
        """The question with this number, always the same. `shape`: the number of a question with the same shape."""
        random = np.random.default_rng(number if shape is None else shape)
        heads, length, keys = (int(random.integers(1, most)) for most in (4, 17, 33))
        causal = bool(random.integers(2))
        random = np.random.default_rng((number, 1))
        query, key, value = (
            random.standard_normal((heads, rows, 8), dtype=np.float32) for rows in (length, keys, keys)
        )
        value[..., 0] = number % FINGERPRINTS
        return cls(number, query, key, value, causal)

    def judge(self, output: Array) -> Verdict:
        """Whether an answer to it is right."""
        if output.shape != self.query.shape:
            return Verdict.ANOTHERS
        fingerprint = self.number % FINGERPRINTS
        if not np.allclose(output[..., 0], fingerprint, rtol=1e-5, atol=1e-3):
            return Verdict.ANOTHERS
        expected = exact(self.query, self.key, self.value[..., 1:], self.causal)
        return Verdict.RIGHT if np.abs(output[..., 1:] - expected).max() <= TOLERANCE else Verdict.WRONG


def exact(query: Array, key: Array, value: Array, causal: bool) -> Array:
    """Attention of [H, L, D] to [H, S, D] by the definition, in float64. Causal is top left."""
    scores = query.astype(np.float64) @ key.astype(np.float64).swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    if causal:
        scores[..., np.arange(key.shape[-2]) > np.arange(query.shape[-2])[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ value)
