"""Many queries and keys by the kernels on torch tensors: whatever excludes keys and however large the scores are.

Results are compared with the oracle, with the math kernel, or with those in other batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import accuracy
import numpy as np
import pytest
import torch
from bits import assert_same_results
from cases import Plan
from kernel_calls import call_of, run

from attnserve_server.kernels import flash_cpu, written_out

LONG: dict[str, Any] = {"batch": 1, "query_length": 301, "key_length": 333, "head_dim": 16, "key_dim": 16}


@pytest.fixture(autouse=True, scope="module")
def _alone() -> Iterator[None]:
    """One thread per call, as on the CPU device."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(case: Any) -> None:
    """Asserts that a case is computed by the flash kernel, and agrees with the oracle."""
    result = run(call_of(case, return_lse=True))
    assert result.kernel == flash_cpu.NAME
    accuracy.check(case, result)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "bottom_right", "group": 3},
        {"causal": True, "query_length": 400, "query_offset": -70, "sinks": True},
        {"window": (40, 9), "group": 2, "query_offset": 20},
        {"window": (200, -1), "query_offset": 280, "group": 5, "query_length": 100},
        {"mask_shape": (301, 333), "causal": True},
        {"mask_shape": (2, 1, 333), "bias_shape": (2, 301, 1), "sinks": True, "group": 1},
        {"bias_shape": (1, 4, 301, 333), "window": (100, 100), "group": 2},
        {"scale": -0.25, "value_dim": 24},
        {"key_length": 1100, "query_length": 150, "causal": "bottom_right", "bias_shape": (1, 1100)},
        {"layout": "length_first", "causal": True},
    ],
    ids=str,
)
def test_against_the_oracle(options: dict[str, Any]) -> None:
    case = Plan(**{**LONG, **options}).case(0)
    if case.options["layout"] == "length_first":
        case = replace(case, options={name: value for name, value in case.options.items() if name != "layout"})
        case = replace(case, **{name: getattr(case, name).swapaxes(1, 2) for name in ("query", "key", "value")})
    check(case)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": "bottom_right", "key_length": 1500}])
def test_scores_of_any_size(options: dict[str, Any]) -> None:
    """Rows whose weights would overflow or vanish leave the bits of neighbouring rows with small scores unchanged."""
    case = Plan(**{**LONG, **options}).case(1)
    expected = run(call_of(case, return_lse=True))
    case.query[:, 0, 5] *= 400
    case.query[:, 0, 200] = -400 * np.abs(case.query[:, 0, 200])
    case.key[:, :, 2] = 1
    result = run(call_of(case, return_lse=True))
    small = call_of(case, return_lse=True)
    exact = written_out.attend(small)
    assert (np.abs(result.lse) > 200).any()
    for row in (5, 200):
        np.testing.assert_allclose(result.output[:, 0, row], exact.output[:, 0, row], atol=2e-4)
    others = np.delete(np.arange(case.query.shape[2]), (5, 200))
    np.testing.assert_allclose(result.output[:, :, others], exact.output[:, :, others], atol=3e-6)
    assert exact.lse is not None
    np.testing.assert_allclose(result.lse, exact.lse, rtol=1e-6, atol=3e-6)
    case.query[:, 0, [5, 200]] = 0
    again = run(call_of(case, return_lse=True))
    np.testing.assert_array_equal(again.output[:, :, others], result.output[:, :, others])
    np.testing.assert_array_equal(again.lse[:, :, others], result.lse[:, :, others])
    assert not np.array_equal(expected.lse, again.lse)


def test_large_biases_are_values() -> None:
    case = Plan(**LONG, bias_shape=(301, 333)).case(2)
    case.options["bias"][:] = -3e38
    case.options["bias"][:, 17] = -2e38
    result = run(call_of(case, return_lse=True))
    np.testing.assert_allclose(result.output, np.broadcast_to(case.value[:, :, 17:18], result.output.shape), rtol=1e-6)
    np.testing.assert_allclose(result.lse, -2e38, rtol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [{"causal": True, "key_length": 301}, {"mask_shape": (301, 333)}])
def test_what_is_not_finite(options: dict[str, Any], poison: float) -> None:
    """It reaches the rows that attend to it and no others, whether in queries, keys or values."""
    for name in ("query", "key", "value"):
        case = Plan(**{**LONG, **options}).case(3)
        getattr(case, name)[:, 1, 290, 3] = poison
        result = run(call_of(case, return_lse=True))
        exact = written_out.attend(call_of(case, return_lse=True))
        assert exact.lse is not None
        np.testing.assert_allclose(result.output, exact.output, atol=3e-6)
        np.testing.assert_allclose(result.lse, exact.lse, atol=3e-6)
        assert np.isfinite(result.output[:, 0]).all()


def test_rows_that_a_mask_leaves_nothing() -> None:
    case = Plan(**LONG, mask_shape=(301, 333)).case(4)
    case.options["mask"][[0, 77, 300]] = False
    result = run(call_of(case, return_lse=True))
    assert (result.output[:, :, [0, 77, 300]] == 0).all()
    assert (result.lse[:, :, [0, 77, 300]] == -np.inf).all()
    check(case)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"mask_shape": (301, 333)}, {"bias_shape": (301, 333)}, {"window": (50, 3)}]
)
@pytest.mark.parametrize("sign", [-1, 1])
def test_scores_may_be_beyond_float32(options: dict[str, Any], sign: int) -> None:
    """Where all scores of a row are minus infinity in float32, its best key has all the weight nevertheless."""
    case = Plan(**LONG, **options).case(7)
    query, key = np.abs(case.query) * np.float32(1e20), np.abs(case.key) * np.float32(sign * 1e20)
    for name, nothing in (("mask", False), ("bias", -np.inf)):
        if name in case.options:
            case.options[name][77] = nothing
    case = replace(case, query=query, key=key)
    result = run(call_of(case, return_lse=True))
    assert result.kernel == flash_cpu.NAME
    accuracy.check_beyond_float32(case, result)


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_rows_with_nothing_to_attend(name: str) -> None:
    case = Plan(**LONG, **{f"{name}_shape": (301, 333)}).case(8)
    case.options[name][77] = False if name == "mask" else -np.inf
    check(case)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "group": 3}, {"mask_shape": (4, 1, 301, 333), "sinks": True}, {"window": (50, 3)}]
)
def test_bits_depend_on_the_sequence_alone(options: dict[str, Any]) -> None:
    """Not on other sequences (one holds a NaN), other heads, memory addresses or strides."""
    call = call_of(Plan(**{**LONG, "batch": 4, **options}).case(5), return_lse=True)
    call.value[2, 0, 40, 1] = torch.nan
    call.query[3, 0, 9] *= 500
    together = run(call)
    for n in range(4):
        alone = call.sequences(n, n + 1)
        result = run(alone)
        np.testing.assert_array_equal(result.output, together.output[n : n + 1])
        np.testing.assert_array_equal(result.lse, together.lse[n : n + 1])
        strided = replace(alone, **{name: _elsewhere(getattr(alone, name)) for name in ("query", "key", "value")})
        assert_same_results(run(strided), result)
    group = call.query.shape[1] // call.key.shape[1]
    second = run(call.kv_heads(1, 2))
    np.testing.assert_array_equal(second.output, together.output[:, group:])
    np.testing.assert_array_equal(second.lse, together.lse[:, group:])


def _elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, length-first in memory, at an unaligned address."""
    room = torch.empty(tensor.numel() + 3)
    count, heads, length, width = tensor.shape
    return room[3:].view(count, length, heads, width).transpose(1, 2).copy_(tensor)


@pytest.mark.parametrize("narrower", [torch.float16, torch.bfloat16])
def test_narrower_keys(narrower: torch.dtype) -> None:
    call = call_of(Plan(**LONG, causal=True).case(6), return_lse=True)
    narrow = replace(call, key=call.key.to(narrower), value=call.value.to(narrower))
    wide = replace(narrow, key=narrow.key.float(), value=narrow.value.float())
    assert_same_results(run(narrow), run(wide))


@pytest.mark.parametrize("width", [192, 256, 512, 1040])
def test_wide_heads_are_as_exact_as_others(width: int) -> None:
    plan = Plan(batch=1, query_length=256, key_length=256, causal=True, head_dim=width, key_dim=width, value_dim=width)
    for seed in range(3):
        case = plan.case(seed)
        result = run(call_of(case, return_lse=True))
        np.testing.assert_allclose(result.output, case.expected.output, rtol=0, atol=2e-6)
