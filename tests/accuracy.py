"""How close a result must be to the oracle: the accuracy that the contract promises, and nothing looser.

float32 is within 2e-6 on unit-normal inputs, whose scores reach about 8; where scores or log-sum-exps are larger, their
rounding errors are larger in proportion, and so is the bound. float64 likewise, with 1e-12. The output of a half
precision is within twice the error of torch's own kernel in that dtype plus 1e-5; where torch lacks a feature (softcap,
sinks, learned scores), its error without that feature is used, and never less than the cost of rounding alone. The
log-sum-exp of half precisions is float32, but torch's kernel for them uses an exponential with an error of 5e-5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import torch
from cases import Case
from oracle import Array, Floats
from torch.nn.functional import scaled_dot_product_attention

UNIT_NORMAL_SCORES = 8.0
"""The largest score that unit-normal queries and keys reach."""

_ABSOLUTE = {"float32": 2e-6, "float16": 2e-6, "bfloat16": 2e-6, "float64": 1e-12}
_LSE = {"float32": 2e-6, "float16": 1e-4, "bfloat16": 1e-4, "float64": 1e-12}
_ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float64": 2.0**-53}
_TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def check(case: Case, result: Any, scores: str | None = None) -> None:
    """Asserts that a result has the right shapes and dtypes and is as close to the oracle as promised.

    `result` has `output`, `lse` and `scores`, NumPy arrays, the latter two None if not asked for; `scores` says which
    scores they are.
    """
    expected, dtype = case.expected, case.query.dtype
    assert result.output.dtype == dtype
    assert result.output.shape == expected.output.shape
    _check(result.output, expected.output, output_bound(case), "output")
    magnitude = max(1.0, _largest(expected.masked[expected.attended]), _largest(case.options.get("sinks", ())))
    if result.lse is not None:
        assert result.lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
        _check(result.lse, expected.lse, _LSE[dtype.name] * magnitude, "lse")
    if scores is not None:
        wanted = getattr(expected, scores)
        assert result.scores.dtype == dtype
        magnitude = max(magnitude, _largest(expected.raw))
        bound = _ABSOLUTE[dtype.name] * magnitude
        if dtype.name in _TORCH:
            bound = bound + 2 * _ROUNDING[dtype.name] * np.abs(np.nan_to_num(wanted, posinf=0, neginf=0))
        got = result.scores.astype(np.float64)
        if scores in ("raw", "capped"):  # the scores of a key that holds NaN are unspecified
            known = np.isfinite(wanted) | ~np.isnan(expected.raw) & (expected.raw == wanted)
            got, wanted = np.where(known, got, 0), np.where(known, wanted, 0)
        if scores == "weights":  # a row that attends to a NaN has no weights where it attends
            assert (got[~expected.attended] == 0).all()
            known = np.isfinite(wanted).all(-1, keepdims=True)
            got, wanted = np.where(known, got, 0), np.where(known, wanted, 0)
        _check(got, wanted, bound, scores)


def check_beyond_float32(case: Case, result: Any) -> None:
    """The same where scores, and so lses, may be beyond float32: all weight is on the best key, or on ordinary scores
    that are capped by more than they can reach.
    """
    bound = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}[case.query.dtype.name]
    np.testing.assert_allclose(result.output.astype(np.float64), case.expected.output, rtol=0, atol=bound)
    assert result.lse.dtype == np.float32
    with np.errstate(over="ignore"):
        expected = case.expected.lse.astype(np.float32)
    np.testing.assert_allclose(result.lse, expected, rtol=2e-6, atol=1e-4)


def output_bound(case: Case) -> float:
    """The largest absolute error that an output may have."""
    expected, dtype = case.expected, case.query.dtype.name
    seen = expected.attended
    magnitude = max(_largest(expected.raw[seen]), _largest(expected.masked[seen])) / UNIT_NORMAL_SCORES
    if dtype not in _TORCH:
        return _ABSOLUTE[dtype] * max(1.0, magnitude)
    return 2 * max(_ROUNDING[dtype] * _largest(expected.output), torch_error(case)) + 1e-5


def torch_error(case: Case) -> float:
    """The largest error of torch's own kernel on a case in half precision, without the features that torch lacks."""
    if "score" in case.options:
        return 0.0
    options = {name: value for name, value in case.options.items() if name not in ("softcap", "sinks")}
    query, key, value = (np.nan_to_num(array.astype(np.float64), posinf=0, neginf=0) for array in _tensors(case))
    expected = case.expected
    seen = expected.attended
    if not np.isfinite(expected.capped[seen]).all():
        expected = oracle.attend(query, key, value, **options)  # what is added to scores does not depend on them
    added = np.full(expected.raw.shape, -np.inf)
    added[seen] = expected.masked[seen] - expected.capped[seen]
    scale = options.get("scale", 1 / np.sqrt(query.shape[-1]))
    layout, largest = options.get("layout", "heads_first"), 0.0
    for part in _sequences(case, layout, (query, key, value), added):
        q, k, v = (torch.tensor(array).to(_TORCH[case.query.dtype.name]) for array in part[:3])
        mask = torch.tensor(part[3]).float()
        if not (q.numel() and k.numel() and v.numel()):
            continue
        theirs = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=float(scale), enable_gqa=True)
        exact = scaled_dot_product_attention(
            q.double(), k.double(), v.double(), attn_mask=mask.double(), scale=float(scale), enable_gqa=True
        )
        attends = (mask > -torch.inf).any(-1)
        largest = max(largest, _largest((theirs.double() - exact)[attends].numpy()))
    return largest


def _tensors(case: Case) -> tuple[Array, Array, Array]:
    return case.query, case.key, case.value


def _sequences(
    case: Case, layout: str, tensors: tuple[Array, ...], added: Floats
) -> list[tuple[Array, Array, Array, Floats]]:
    """query, key, value [B, H, L, D] and what is added to their scores [B, Hq, Lq, S]; packed sequences one by one."""
    if layout != "packed":
        lacking = (None,) * (4 - case.query.ndim)
        swapped = [t.swapaxes(-3, -2) if layout == "length_first" and t.ndim > 2 else t for t in tensors]
        query, key, value = (t[lacking] for t in swapped)
        return [(query, key, value, added[lacking])]
    parts, i, j = [], 0, 0
    for n, s in zip(case.options["query_lengths"], case.options["kv_lengths"], strict=True):
        query, key, value = (t.swapaxes(0, 1)[None] for t in tensors)
        parts.append(
            (query[:, :, i : i + n], key[:, :, j : j + s], value[:, :, j : j + s], added[None, :, i : i + n, :s])
        )
        i, j = i + n, j + s
    return parts


def _largest(values: Any) -> float:
    """The largest finite magnitude; 0 of nothing."""
    finite = np.abs(np.asarray(values).astype(np.float64))
    return float(finite[np.isfinite(finite)].max(initial=0.0))


def _check(got: Array, wanted: Floats, bound: float | Floats, what: str) -> None:
    """Asserts that values are within a bound, and infinite or NaN exactly where they should not be finite."""
    got = got.astype(np.float64)
    assert got.shape == wanted.shape, what
    finite = np.isfinite(wanted)
    assert (got[wanted == -np.inf] == -np.inf).all() or what == "output", f"{what}: -inf expected"
    assert not np.isfinite(got[~finite]).any(), f"{what}: finite where it should not be"
    error = np.abs(np.where(finite, got, 0) - np.where(finite, wanted, 0))
    assert (error <= bound).all(), f"{what}: error {error.max()} (bound {np.max(bound)})"
