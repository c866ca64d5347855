"""Scores that leave the range of float32, by their scale, their softcap, or large queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import accuracy
import numpy as np
import oracle
import pytest
from cases import BEYOND_FLOAT32, Case, Plan
from kernel_calls import arrays_of, call_of, run

from attnserve_server.kernels import flash_cpu, written_out
from attnserve_server.native.calls import applies, attend_all
from attnserve_server.native.library import Library, available


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("numbers", BEYOND_FLOAT32.values(), ids=BEYOND_FLOAT32)
@pytest.mark.parametrize("options", [{}, {"alibi": True}, {"mask_shape": (80, 70)}, {"score": "general"}])
def test_scores_may_be_beyond_float32(dtype: str, numbers: dict[str, Any], options: dict[str, Any]) -> None:
    for length in (1, 80):
        shape = {"mask_shape": (length, 70)} if "mask_shape" in options else {}
        case = Plan(dtype=dtype, query_length=length, key_length=70, **(options | shape), **numbers).case(3)
        accuracy.check_beyond_float32(case, run(call_of(case, return_lse=True)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask_shape": (80, 70)}, {"sinks": True}, {"alibi": True}])
@pytest.mark.parametrize("sign", [-1, 1])
def test_queries_and_keys_may_take_scores_beyond_float32(dtype: str, options: dict[str, Any], sign: int) -> None:
    """Where all scores of a row are minus infinity in float32, its best key has all the weight nevertheless."""
    case = Plan(dtype=dtype, query_length=80, key_length=70, **options).case(4).beyond_float32(sign)
    for finite in (False, True):
        accuracy.check_beyond_float32(case, run(call_of(case, return_lse=True, finite=finite)))


def test_a_softcap_does_not_hide_that_scores_are_beyond_float32() -> None:
    """The products of query and keys are infinite in float32, and differ once they are scaled and capped."""
    case = Plan(dtype="bfloat16", query_length=2, key_length=2, scale=1e-38, softcap=30.0).case(6)
    case.query[:] = 3e19
    case.key[..., 0, :], case.key[..., 1, :] = 3e19, 2e19
    accuracy.check(case, run(call_of(case, return_lse=True)))


@pytest.mark.parametrize("instructions", available())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [2, 8, 64])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "bottom_right"},
        {"group": 3, "sinks": True},
        {"alibi": True, "window": (9, 3)},
        {"bias_shape": (70,), "mask_shape": (70,)},
    ],
    ids=str,
)
def test_sums_of_products_may_overflow_on_the_way(
    options: dict[str, Any], softcap: float, head_dim: int, dtype: str, instructions: str
) -> None:
    """In float32 a sum stays infinite, whatever is added to it: its sign is not that of the score."""
    library = Library(instructions)
    for length in range(1, 18):
        plan = Plan(dtype=dtype, query_length=length, key_length=70, head_dim=head_dim, key_dim=head_dim, **options)
        for keys in (2, 70):
            shapes = {name: (keys,) for name in ("bias_shape", "mask_shape") if name in options}
            case = replace(plan, softcap=softcap, key_length=keys, **shapes).case(100 * length + keys).overflowing()
            call = call_of(case, return_lse=True)
            assert applies(call)
            (result,) = attend_all(library, [call], None)
            accuracy.check_beyond_float32(case, arrays_of(result))


@pytest.mark.parametrize("instructions", available())
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [1, 3, 4, 17])
def test_a_sum_of_products_may_overflow_to_the_other_side(
    length: int, dtype: str, softcap: float, instructions: str
) -> None:
    """The best key's products overflow on the other side before the last of them: as -inf, it would have no weight."""
    plan = Plan(dtype=dtype, query_length=length, key_length=2, head_dim=64, key_dim=64, softcap=softcap)
    query, key = np.full((2, 2, length, 64), 2e19), np.zeros((2, 2, 2, 64))
    key[..., 0, :32], key[..., 0, 32:] = -3e19, 4e19
    key[..., 0, 16:48] = 0  # whichever vectors sum them up
    case = plan.case(9)
    case = Case(query.astype(case.query.dtype), key.astype(case.key.dtype), case.value, case.options)
    (result,) = attend_all(Library(instructions), [call_of(case, return_lse=True)], None)
    accuracy.check_beyond_float32(case, arrays_of(result))


@pytest.mark.parametrize("instructions", available())
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_products_that_stay_in_float32_are_computed_once(
    softcap: float, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of up to a tenth of the largest number of float32, and excluded keys that have infinite ones."""
    monkeypatch.setattr(written_out, "attend", None)
    monkeypatch.setattr(flash_cpu, "attend", None)
    for length in (1, 17):
        case = Plan(query_length=length, key_length=70, softcap=softcap, window=(-1, 30)).case(10)
        case.query[...], case.key[...] = case.query * 1e18, case.key * 1e18
        case.key[..., 60:, :] = 3e38
        (result,) = attend_all(Library(instructions), [call_of(case, return_lse=True)], None)
        accuracy.check_beyond_float32(case, arrays_of(result))


def test_zeros_are_no_reason_to_compute_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single key with a score of 0, as padding has, looks like a row whose scores are all beyond float32."""
    case = Plan(query_length=80, key_length=80, causal=True).case(7)
    case.query[..., :1, :] = 0
    monkeypatch.setattr(written_out, "attend_heads", None)
    result = run(call_of(case, return_lse=True))
    assert result.kernel == flash_cpu.NAME
    accuracy.check(case, result)


@pytest.mark.parametrize("length", [1, 80])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "bottom_right", "group": 3},
        {"mask_shape": (70,), "bias_shape": (70,)},
        {"mask_shape": (70,), "group": 3},
        {"bias_shape": (2, 6, 1, 70), "group": 3},
        {"window": (80, 3), "bias_shape": (2, 2, 1, 70), "sinks": True},
        {"alibi": True, "causal": "bottom_right"},
        {"scale": -0.25, "sinks": True},
    ],
    ids=str,
)
def test_ordinary_numbers_are_computed_once(
    options: dict[str, Any], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written_out, "attend_heads", None)
    case = Plan(query_length=length, key_length=70, **options).case(8)
    for finite in (False, True):
        result = run(call_of(case, return_lse=True, finite=finite))
        assert result.kernel == flash_cpu.NAME
        accuracy.check(case, result)


@pytest.mark.parametrize("stage", oracle.STAGES)
def test_half_precision_scores_that_leave_float32_on_the_way(stage: str) -> None:
    """The product of query and key is infinite in float32, the scaled score is a bfloat16."""
    case = Plan(dtype="bfloat16", causal=True, scale=2.0**-10).case(5)
    case.query[..., 0], case.key[..., 0] = 3e19, -3e19
    accuracy.check(case, run(call_of(case, return_lse=True, return_scores=stage)), stage)
