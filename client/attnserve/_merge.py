"""Merges attentions over disjoint sets of keys into the attention over all of them.

In: outputs with their log-sum-exps, NumPy or torch. Out: one output and one log-sum-exp of the same kind. For keys that
are too many for one request, or are kept in several places.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, Generic, NamedTuple, get_args

import numpy as np

from attnserve import _dtypes
from attnserve._numbers import shown
from attnserve._requests import arrays
from attnserve._requests.arguments import ArrayT
from attnserve._requests.attend import Layout
from attnserve._requests.result import AttentionResult
from attnserve.v1 import tensor_pb2 as pb


class MergedAttention(NamedTuple, Generic[ArrayT]):
    """An output and its log-sum-exp, which can be merged again.

    - `output`: of the shape, layout and dtype of the outputs that were merged.
    - `lse`: of the shape and dtype of the log-sum-exps that were merged.
    """

    output: ArrayT
    lse: ArrayT


def merge_attention(
    results: Iterable[AttentionResult[ArrayT] | tuple[ArrayT, ArrayT]], *, layout: Layout = "heads_first"
) -> MergedAttention[ArrayT]:
    """Merges attentions of the same queries over disjoint sets of keys, exactly.

    - `results`: one or more results of calls with ``return_lse=True``, or ``(output, lse)`` pairs; outputs
      ``[B, Hq, Lq, Dv]`` in the given layout, lse ``[B, Hq, Lq]`` (``[Hq, total]`` if packed), or of lower rank.
    - `layout`: the layout of the outputs.

    With m the largest lse of a row and ``w_i = exp(lse_i - m)``: ``output = sum(w_i output_i) / sum(w_i)`` and
    ``lse = m + log(sum(w_i))``, computed in float32 at least. A row that attends nothing in any result gives 0 and
    -inf; one with an lse of +inf or NaN in any gives NaN, as attention over all keys does.
    Sinks must count once: pass them to at most one of the calls.

    Raises ValueError if there is nothing to merge, an lse is missing, shapes do not fit, a dtype is not floating, NumPy
    arrays and torch tensors are mixed, or there is no such layout.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"layout: expected one of {', '.join(map(repr, get_args(Layout)))}, found {shown(layout)}")
    if isinstance(results, AttentionResult) or not isinstance(results, Iterable):
        found = "a single one" if isinstance(results, AttentionResult) else type(results).__name__
        raise ValueError(f"results: expected several in a list, found {found}")
    pairs = [_pair(result) for result in results]
    if not pairs:
        raise ValueError("results: expected one or more, found none")
    outputs, lses = [output for output, _ in pairs], [lse for _, lse in pairs]
    is_torch = arrays.torch_tensor(outputs[0]) is not None
    if any((arrays.torch_tensor(each) is not None) != is_torch for each in (*outputs, *lses)):
        raise ValueError("results: expected NumPy arrays or torch tensors, found both")
    for output, lse in pairs:
        if output.shape != outputs[0].shape or lse.shape != lses[0].shape:
            raise ValueError(
                f"results: expected outputs {tuple(outputs[0].shape)} with lse {tuple(lses[0].shape)}, "
                f"found {tuple(output.shape)} with {tuple(lse.shape)}"
            )
    rows = tuple(outputs[0].shape[:-1])
    crossed = layout != "heads_first" and len(rows) > 1
    expected = (*rows[:-2], rows[-1], rows[-2]) if crossed else rows
    if tuple(lses[0].shape) != expected:
        raise ValueError(f"results: expected lse {expected} in layout {layout!r}, found {tuple(lses[0].shape)}")

    xp: Any = sys.modules["torch"] if is_torch else np
    wide = xp.float64 if outputs[0].dtype == xp.float64 or lses[0].dtype == xp.float64 else xp.float32

    def cast(array: Any, dtype: Any) -> Any:
        return array.to(dtype) if is_torch else array.astype(dtype, copy=False)

    def along_rows(array: Any) -> Any:
        return (array.swapaxes(-1, -2) if crossed else array)[..., None]

    with np.errstate(invalid="ignore"):  # inf - inf is NaN, as intended
        exponents = [cast(lse, wide) for lse in lses]
        largest = reduce(xp.maximum, exponents)
        nothing = largest == -xp.inf
        largest = xp.where(nothing, xp.zeros_like(largest), largest)  # -inf - -inf is NaN
        weights = [xp.exp(exponent - largest) for exponent in exponents]
        total = sum(weights[1:], weights[0])
        total = xp.where(nothing, xp.ones_like(total), total)
        lse = xp.where(nothing, xp.full_like(largest, -xp.inf), largest + xp.log(total))
        # Outputs near the dtype's largest number would overflow in a sum. A power of 2 changes no digits.
        least = 0.5 ** (len(pairs) - 1).bit_length()
        parts = zip(weights, exponents, outputs, strict=True)
        weighted = [
            along_rows(weight * least) * xp.where(along_rows(exponent == -xp.inf), 0.0, cast(output, wide))
            for weight, exponent, output in parts  # other kernels' outputs may be NaN where nothing is attended
        ]
        output = sum(weighted[1:], weighted[0]) / along_rows(total * least)
    return MergedAttention(cast(output, outputs[0].dtype), cast(lse, lses[0].dtype))


def _pair(result: AttentionResult[Any] | tuple[Any, Any]) -> tuple[Any, Any]:
    if isinstance(result, AttentionResult):
        if result.lse is None:
            raise ValueError("results: expected a result with its lse (return_lse=True), found one without")
        return result.output, result.lse
    if not (isinstance(result, Sequence) and len(result) == 2):
        found = type(result).__name__
        raise ValueError(f"results: expected an AttentionResult or a pair (output, lse), found {found}")
    output, lse = (_floating(part) for part in result)
    return output, lse


def _floating(part: Any) -> Any:
    """An output or an lse as an array or a tensor. ValueError if it is neither, or not of a floating dtype."""
    if arrays.torch_tensor(part) is not None:
        array, floating = part, part.is_floating_point()
    else:
        array = np.asarray(part)
        floating = array.dtype.kind == "f" or array.dtype == _dtypes.NUMPY[pb.DATA_TYPE_BFLOAT16]
    if not floating or isinstance(part, np.ma.MaskedArray):
        found = array.dtype if not floating else "a masked array, of whose mask nobody would know"
        raise ValueError(f"results: expected outputs and lse of a floating dtype, found {found}")
    return array
