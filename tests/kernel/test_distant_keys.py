"""ALiBi where every key that a query attends to is far away: all of its biases are large, and their differences count.

In the dtype of the sums, the bias of a key 2 ** 30 positions away leaves no digits for its score.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import Plan
from kernel_calls import call_of, run

from attnserve_server.kernels import kernel_for, written_out

FAR = 1 << 30
ROUNDING = {"float32": 2e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Of outputs and weights: two roundings of values up to 1; values here are up to 4. Not of float64: the oracle is that.
"""


@pytest.mark.parametrize("dtype", sorted(ROUNDING))
@pytest.mark.parametrize("offset", [FAR, -FAR])
@pytest.mark.parametrize(
    "options",
    [
        {"mask_shape": (2, 1, 5, 7)},
        {"mask_shape": (1, 7), "sinks": True},
        {"softcap": 3.0},
        {"bias_shape": (5, 7), "mask_shape": (7,)},
        {"score": "general"},
        {"window": (FAR + 8, FAR + 3), "mask_shape": (5, 7)},
    ],
)
def test_distant_keys_keep_their_scores(dtype: str, offset: int, options: dict[str, Any]) -> None:
    case = Plan(dtype=dtype, alibi=True, query_offset=offset, **options).case(15)
    expected, bound = case.expected, ROUNDING[dtype]
    for scores in ("weights", "masked"):
        call = call_of(case, return_lse=True, return_scores=scores)
        result = run(call)
        np.testing.assert_allclose(result.output.astype(np.float64), expected.output, rtol=0, atol=4 * bound)
        np.testing.assert_allclose(result.lse, expected.lse, rtol=2e-7, atol=0)
        wanted, got = getattr(expected, scores), result.scores.astype(np.float64)
        if dtype == "float16" and scores == "masked":
            wanted = np.where(np.abs(wanted) > np.finfo(np.float16).max, -np.inf, wanted)
        np.testing.assert_allclose(got, wanted, rtol=2 * bound, atol=bound)


def test_without_returned_scores_the_same_kernel_computes_them() -> None:
    for dtype in ("float16", "bfloat16"):
        case = Plan(dtype=dtype, alibi=True, query_offset=FAR, mask_shape=(5, 7)).case(16)
        call = call_of(case)
        assert kernel_for(call).name == written_out.NAME
        error = np.abs(run(call).output.astype(np.float64) - case.expected.output).max()
        assert error <= 4 * ROUNDING[dtype]


@pytest.mark.parametrize("slope", [np.inf, -np.inf, 3e38])
def test_slopes_without_bounds_change_no_other_head(slope: float) -> None:
    """And what the formula gives for them: keys at no distance from the query have the bias inf * 0."""
    case = Plan(alibi=True, mask_shape=(5, 7)).case(17)
    call = call_of(case, return_lse=True)
    expected = run(call)
    assert call.alibi_slopes is not None
    call.alibi_slopes[0] = slope
    result = run(call)
    assert torch.equal(torch.from_numpy(result.output[:, 1:]), torch.from_numpy(expected.output[:, 1:]))
    assert not np.isnan(result.lse[:, 1:]).any()
