"""One attention request: its arguments, what the oracle gives for them, and how to make it through the SDK.

A `Plan` is everything about a request but the contents of its tensors; `Plan.case(seed)` fills them in. So one plan
makes many requests that a server may batch, and hypothesis shrinks plans without looking at numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import oracle
from oracle import Array

import attnserve

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float64": np.dtype(np.float64),
}


BEYOND_FLOAT32: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 1e39},
    "softcap of nothing": {"softcap": 1e-50},
    "scale": {"scale": 1e39},
    "negative scale": {"scale": -1e39},
    "products": {"scale": 1e37},
    "both": {"scale": 3e37, "softcap": 1e39},
}
"""Options that are legal, and take scores, or what is computed on the way to them, out of the range of float32."""


@dataclass(frozen=True)
class Case:
    """The arguments of one attention."""

    query: Array
    key: Array
    value: Array
    options: dict[str, Any] = field(default_factory=dict)
    """Options by their names in the SDK, with the oracle's score objects."""

    @cached_property
    def expected(self) -> oracle.Expected:
        """What the oracle gives."""
        return oracle.attend(self.query, self.key, self.value, **self.options)

    @property
    def arguments(self) -> dict[str, Any]:
        """The options as the SDK takes them."""
        score = self.options.get("score")
        if isinstance(score, oracle.General):
            return {**self.options, "score": attnserve.GeneralScore(score.weight)}
        if isinstance(score, oracle.Additive):
            parameters = score.query_weight, score.key_weight, score.bias, score.output_weight
            return {**self.options, "score": attnserve.AdditiveScore(*parameters)}
        return self.options

    def beyond_float32(self, sign: int) -> Case:
        """With queries and keys so large that all scores leave the range of float32, all on the same side."""
        query, key = (
            np.abs(array.astype(np.float64)) * 1e20 * side for array, side in ((self.query, 1), (self.key, sign))
        )
        return replace(self, query=query.astype(self.query.dtype), key=key.astype(self.key.dtype))

    def attend(self, client: attnserve.Client, **more: Any) -> Any:
        """Sends the request and waits; the `AttentionResult`. `more` is what to return, the deadline, the priority."""
        return client.attend(self.query, self.key, self.value, **self.arguments, **more)

    def submit(self, client: attnserve.Client, **more: Any) -> Any:
        """Sends the request; the future of the result."""
        return client.submit(self.query, self.key, self.value, **self.arguments, **more)

    def overflowing(self) -> Case:
        """With queries and keys of both signs, the products of which overflow in float32. The sums of half of the keys
        do not: they are 0 but for one element, which keeps its products small.
        """
        query, key = (array.astype(np.float64) * 2e19 for array in (self.query, self.key))
        some = key[..., 1::2, :]
        some[..., 1:], some[..., 0] = 0, some[..., 0] * 1e-20
        return replace(self, query=query.astype(self.query.dtype), key=key.astype(self.key.dtype))


@dataclass(frozen=True)
class Plan:
    """A request without the contents of its tensors. Lengths and offsets are part of the plan.

    `batch` counts sequences in every layout. If packed, `query_lengths` and `kv_lengths` give the length of each, and
    `query_length` and `key_length` are the longest.
    """

    dtype: str = "float32"
    layout: str = "heads_first"
    rank: int = 4
    batch: int = 2
    key_heads: int = 2
    group: int = 1
    query_length: int = 5
    key_length: int = 7
    head_dim: int = 8
    key_dim: int = 8
    value_dim: int = 8
    query_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    causal: bool | str = False
    query_offset: int | tuple[int, ...] | None = None
    window: tuple[int, int] | None = None
    mask_shape: tuple[int, ...] | None = None
    bias_shape: tuple[int, ...] | None = None
    alibi: bool = False
    sinks: bool = False
    scale: float | None = None
    softcap: float = 0.0
    score: str = "dot"
    hidden: int = 4
    additive_parts: tuple[bool, bool] = (True, True)
    """Whether the additive score has a bias, and an output weight."""
    parameter_dtype: str = "float32"
    """The dtype of biases, slopes, sinks and score parameters."""
    poisoned: bool = False
    """Whether NaN and infinities fill keys and values that no query attends to, and NaN is in a few others."""

    def case(self, seed: int) -> Case:
        """The request with contents from a seed: unit-normal tensors, masks that keep three keys in four."""
        rng = np.random.default_rng(seed)
        heads = self.key_heads * self.group

        def normal(*shape: int, dtype: str = self.parameter_dtype) -> Array:
            return rng.standard_normal(shape).astype(DTYPES[dtype])

        def tensor(heads: int, length: int, total: tuple[int, ...] | None, width: int) -> Array:
            if self.layout == "packed":
                return normal(sum(total or ()), heads, width, dtype=self.dtype)
            shape = (self.batch, heads, length, width)
            if self.layout == "length_first":
                shape = (self.batch, length, heads, width)
            return normal(*({4: shape, 3: shape[1:]}.get(self.rank) or (length, width)), dtype=self.dtype)

        options: dict[str, Any] = {"layout": self.layout}
        for name in ("query_lengths", "kv_lengths", "query_offset", "window", "scale"):
            if getattr(self, name) is not None:
                options[name] = getattr(self, name)
        for name in ("query_lengths", "kv_lengths", "query_offset"):
            if isinstance(options.get(name), tuple):
                options[name] = np.array(options[name], dtype=np.int64)
        if self.causal:
            options["causal"] = self.causal
        if self.softcap:
            options["softcap"] = self.softcap
        if self.mask_shape is not None:
            options["mask"] = rng.random(self.mask_shape) < 0.75
        if self.bias_shape is not None:
            options["bias"] = normal(*self.bias_shape)
        if self.alibi:
            options["alibi_slopes"] = rng.uniform(0, 0.5, heads).astype(DTYPES[self.parameter_dtype])
        if self.sinks:
            options["sinks"] = normal(heads)
        if self.score == "general":
            weight = rng.standard_normal((self.head_dim, self.key_dim)) / np.sqrt(self.head_dim * self.key_dim)
            options["score"] = oracle.General(weight.astype(DTYPES[self.parameter_dtype]))
        if self.score == "additive":
            with_bias, with_output = self.additive_parts
            options["score"] = oracle.Additive(
                normal(self.hidden, self.head_dim),
                normal(self.hidden, self.key_dim),
                normal(self.hidden) if with_bias else None,
                normal(self.hidden) if with_output else None,
            )
        case = Case(
            tensor(heads, self.query_length, self.query_lengths, self.head_dim),
            tensor(self.key_heads, self.key_length, self.kv_lengths, self.key_dim),
            tensor(self.key_heads, self.key_length, self.kv_lengths, self.value_dim),
            options,
        )
        return self._poisoned(case, rng) if self.poisoned else case

    def _poisoned(self, case: Case, rng: np.random.Generator) -> Case:
        """The case with NaN and infinities where no query attends, and NaN in 1 of 16 keys and 1 of 16 values."""
        attended: Array = case.expected.attended
        key, value = case.key.copy(), case.value.copy()
        if self.layout == "packed":  # [Hq, total, S] -> by sequence, then end to end
            starts = np.cumsum((0, *(self.query_lengths or ())))
            by_head = [
                attended[:, starts[b] : starts[b + 1], :keys].any(1) for b, keys in enumerate(self.kv_lengths or ())
            ]
            seen: Array = np.concatenate(by_head, axis=1) if by_head else np.zeros((attended.shape[0], 0), dtype=bool)
        else:
            seen = np.asarray(attended.any(-2))  # [..., Hq, S]
        if self.rank > 2:
            seen = np.asarray(seen.reshape(*seen.shape[:-2], self.key_heads, self.group, seen.shape[-1]).any(-2))
            if self.layout != "heads_first":
                seen = seen.swapaxes(-1, -2)
        for array in (key, value):
            array[~seen] = rng.choice([np.nan, np.inf, -np.inf], size=int((~seen).sum()))[:, None].astype(array.dtype)
            array[rng.random(seen.shape) < 1 / 16] = np.nan
        return Case(case.query, key, value, case.options)
