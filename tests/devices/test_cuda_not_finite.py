"""What CUDA batches, on CPU tensors, make of NaN, infinities and what is beyond float32: replies are right, and only
what has to be is computed again.
"""

from __future__ import annotations

from typing import Any

import accuracy
import numpy as np
import pytest
from cases import BEYOND_FLOAT32, Plan
from cuda_here import HALF, check, cuda_kernels_here, request_of, result_of, run

from attnserve_server.kernels import written_out

__all__ = ["cuda_kernels_here"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("numbers", BEYOND_FLOAT32.values(), ids=BEYOND_FLOAT32)
@pytest.mark.parametrize("options", [{}, {"mask_shape": (5, 7)}, {"score": "general"}])
def test_scores_may_be_beyond_float32(dtype: str, numbers: dict[str, Any], options: dict[str, Any]) -> None:
    case = Plan(dtype=dtype, **options, **numbers).case(1)
    request = request_of(case, return_lse=True)
    accuracy.check_beyond_float32(case, result_of(case, run([request]).results[0], request))


def test_capped_scores_that_leave_float32_on_the_way_are_computed_again() -> None:
    """On CUDA, float32 too is computed in float32 at first."""
    case = Plan(softcap=3.0).case(1)
    case.query[0], case.key[0] = case.query[0] * 1e20, np.where(case.key[0] > 0, np.float32(1e20), np.float32(-1e20))
    check([(case, {"return_lse": True})])


@pytest.mark.parametrize("dtype", HALF)
def test_sinks_beyond_float32_stay_finite(dtype: str) -> None:
    """They take all the weight."""
    case = Plan(dtype=dtype, sinks=True).case(0)
    case.options["sinks"] = np.full(case.options["sinks"].shape, 1e300)
    case.__dict__.pop("expected", None)
    request = request_of(case, return_lse=True)
    (result,) = run([request]).results
    arrays = result_of(case, result, request)
    assert (arrays.output == 0).all()
    assert (arrays.lse == np.finfo(np.float32).max).all()


@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_only_those_with_nan_are_computed_again(dtype: str) -> None:
    plan = Plan(dtype=dtype, causal="bottom_right", batch=3)
    cases = [plan.case(seed) for seed in range(6)]
    cases[2].value[1, 0, -1] = np.nan
    cases[4].key[0, 1, 2] = np.inf
    batch = check([(case, {"return_lse": True}) for case in cases])
    assert batch.kernel_calls[written_out.NAME] == 2
    masked = [Plan(dtype=dtype, batch=3, mask_shape=(5, 7)).case(seed) for seed in range(6)]
    masked[2].value[1, 0, -1] = np.nan
    batch = check([(case, {"return_lse": True}) for case in masked])
    assert batch.kernel_calls == {"cuda_efficient": 1, written_out.NAME: 1}  # only one of three sequences


@pytest.mark.parametrize("options", [{"mask_shape": (5, 7)}, {"bias_shape": (5, 7)}, {"alibi": True, "causal": True}])
def test_large_keys_are_no_reason_to_compute_again(options: dict[str, Any]) -> None:
    """Their sum overflows, but no result does."""
    case = Plan(dtype="float32", **options).case(0)
    case.key[:] = np.abs(case.key) * 3e37
    case.query[:] *= 3e-38
    case.__dict__.pop("expected", None)
    assert check([(case, {"return_lse": True})]).kernel_calls == {"cuda_efficient": 1}


@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_queries_before_all_keys_attend_to_nothing(dtype: str) -> None:
    """What the ragged kernel for float32 makes of them is NaN."""
    case = Plan(dtype=dtype, query_length=5, key_length=3, causal="bottom_right").case(0)
    check([(case, {"return_lse": True})])


def test_outputs_whose_sum_is_beyond_half_precision_are_no_reason_to_compute_again() -> None:
    case = Plan(dtype="float16", mask_shape=(5, 7)).case(0)
    case.value[:] = 3000
    case.__dict__.pop("expected", None)
    assert check([(case, {"return_lse": True})]).kernel_calls == {"cuda_efficient": 1}


@pytest.mark.parametrize("dtype", ["float32", *HALF])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["query", "key", "value", "bias"])
@pytest.mark.parametrize("masked", [False, True])
def test_what_is_not_finite_shows_in_results(dtype: str, poison: float, part: str, masked: bool) -> None:
    """Attended to or excluded, in one sequence of three: whatever a kernel makes of it, replies are right."""
    case = Plan(dtype=dtype, batch=3, mask_shape=(5, 7), bias_shape=(3, 1, 5, 7), sinks=True).case(0)
    tensor = case.options["bias"] if part == "bias" else getattr(case, part)
    tensor[1, 0, 2, 3] = poison
    case.options["mask"][:, 2:4] = not masked
    case.options["mask"][2, 3] = not masked
    case.__dict__.pop("expected", None)
    check([(case, {"return_lse": True})])


def test_what_lies_beyond_the_lengths_is_never_looked_at() -> None:
    """Garbage in the padding makes no sequence suspect."""
    case = Plan(dtype="float16", causal="bottom_right", kv_lengths=(3, 6), key_length=9).case(0)
    case.key[0, :, 3:], case.value[0, :, 3:], case.value[1, :, 6:] = np.nan, np.inf, np.nan
    assert check([(case, {"return_lse": True})]).kernel_calls == {"cuda_varlen": 1}


@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_a_bias_of_minus_infinity_is_no_reason_to_compute_again(dtype: str) -> None:
    case = Plan(dtype=dtype, bias_shape=(5, 7), causal=True).case(0)
    case.options["bias"][:, 3] = -np.inf
    assert check([(case, {"return_lse": True})]).kernel_calls == {"cuda_efficient": 1}
