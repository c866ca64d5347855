"""Attention to the contents of caches, against the oracle, with pages of few tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import accuracy
import numpy as np
import oracle
import pytest
import strategies
import torch
from attending import (
    EVERY_DTYPE,
    EVERY_OPTION,
    EVERY_STORAGE,
    OPTIONS,
    PIECES,
    RETURNED,
    STORAGES,
    WAYS,
    Way,
    arrays,
    attended,
    bounds,
    device,
    fill,
    filled,
    plan_of,
    pool_for,
    query_of,
    shape_of,
    single_plans,
)
from cases import BEYOND_FLOAT32, Plan
from hypothesis import given
from kernel_calls import tensor
from resident import stored
from torch.nn.functional import scaled_dot_product_attention

from attnserve_server.caches.attend import attend_cache, attend_tensors
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.kernels import AttentionCall, AttentionResult
from attnserve_server.kernels.table import CPU_PAGES
from attnserve_server.native import library

__all__ = ["device"]


@strategies.MANY
@given(plan=single_plans(), seed=strategies.SEEDS, storage=STORAGES, way=WAYS, piece_bytes=PIECES, returned=RETURNED)
def test_random_queries(
    device: CpuDevice, plan: Plan, seed: int, storage: str, way: Way, piece_bytes: int, returned: dict[str, Any]
) -> None:
    case = stored(plan.case(seed), storage)
    with bounds(piece_bytes=piece_bytes):
        result = attended(device, case, storage, way, **returned)
    accuracy.check(case, result, returned["return_scores"])


@EVERY_DTYPE
@EVERY_STORAGE
@EVERY_OPTION
def test_every_option_in_every_dtype(device: CpuDevice, dtype: str, storage: str, options: dict[str, Any]) -> None:
    for length in (1, 5, 20):
        case = stored(plan_of(options, dtype=dtype, query_length=length).case(length), storage)
        accuracy.check(case, attended(device, case, storage, Way(per_page=8, scattered=True), return_lse=True))


@EVERY_OPTION
@pytest.mark.parametrize("length", [1, 5, 20])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_values_near_the_largest_of_the_dtype(
    device: CpuDevice, storage: str, length: int, options: dict[str, Any]
) -> None:
    """Sums of weighted values overflow unless they are divided before."""
    case = plan_of(options, dtype="float32", query_length=length, value_dim=16).case(length)
    case.value[...] = np.random.default_rng(2).uniform(0.5, 1, case.value.shape) * 3e38
    case = stored(case, storage)
    result = attended(device, case, storage, Way(per_page=8, scattered=True), return_lse=True)
    np.testing.assert_allclose(result.output / 3e38, case.expected.output / 3e38, rtol=0, atol=2e-6)
    np.testing.assert_allclose(result.lse, case.expected.lse, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("numbers", BEYOND_FLOAT32.values(), ids=BEYOND_FLOAT32)
@pytest.mark.parametrize("length", [1, 20])
def test_scores_may_be_beyond_float32(device: CpuDevice, dtype: str, numbers: dict[str, Any], length: int) -> None:
    """Also where results over several pieces of a cache are merged by their lses."""
    for options in ({}, {"causal": "bottom_right", "sinks": True}, {"bias_shape": (61,)}):
        case = stored(plan_of(options, dtype=dtype, query_length=length, **numbers).case(length), "float16")
        for piece_bytes in (1, 1 << 25):
            with bounds(piece_bytes=piece_bytes):
                result = attended(device, case, "float16", Way(), return_lse=True)
            accuracy.check_beyond_float32(case, result)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [1, 5, 20])
@pytest.mark.parametrize("name", ["plain", "causal", "grouped", "mask", "bias", "alibi", "sinks", "general", "length"])
def test_queries_and_keys_may_take_scores_beyond_float32(
    device: CpuDevice, name: str, length: int, storage: str, sign: int
) -> None:
    """Infinite lses of several pieces cannot be merged, and a row of nothing but minus infinity is not one without."""
    case = stored(plan_of(OPTIONS[name], dtype="float32", query_length=length).case(length), storage)
    case = case.beyond_float32(sign)
    for piece_bytes in (1, 1 << 25):
        with bounds(piece_bytes=piece_bytes):
            result = attended(device, case, storage, Way(per_page=8, scattered=True), return_lse=True)
            weights = attended(device, case, storage, Way(per_page=8), return_scores="weights").scores
        accuracy.check_beyond_float32(case, result)
        np.testing.assert_allclose(weights.astype(np.float64), case.expected.weights, rtol=0, atol=2e-6)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [1, 5, 16, 20])
@pytest.mark.parametrize("name", ["plain", "causal", "grouped", "sinks", "window-bias"])
def test_sums_of_products_may_overflow_on_the_way(
    device: CpuDevice, name: str, length: int, storage: str, softcap: float
) -> None:
    """The sign of an infinite sum is not that of the score: a query gets the same at once and row by row."""
    plan = plan_of(OPTIONS[name], dtype="float32", query_length=length, softcap=softcap)
    case = stored(plan.case(length).overflowing(), storage)
    for piece_bytes in (1, 1 << 25):
        with bounds(piece_bytes=piece_bytes):
            result = attended(device, case, storage, Way(per_page=8, scattered=True), return_lse=True)
        accuracy.check_beyond_float32(case, result)


@EVERY_OPTION
@pytest.mark.parametrize("length", [1, 5])
def test_which_kernel_computes_few_queries(device: CpuDevice, length: int, options: dict[str, Any]) -> None:
    """Without the native kernel, matrix products over whole pages, except for rare options, value widths that are not
    whole vectors, and queries with nothing to attend to.
    """
    case = plan_of(options, query_length=length).case(1)
    shape, pages = shape_of(case, "float32"), [*range(4)]
    pool = pool_for(shape, 16)
    fill(pool, shape, pages, case, (1000,))
    (result,) = attend_cache([query_of(case, "float32", pages)], pool, device)
    rare = "score" in options or ("alibi" in options and "mask_shape" in options)
    if device.native is not None:
        assert (result.kernel == library.NAME) == (not rare)
        return
    rare |= "softcap" in options or options.get("value_dim") == 24
    assert (result.kernel == CPU_PAGES) == (not rare and bool(case.expected.attended.any()))


@EVERY_OPTION
@pytest.mark.parametrize("stage", oracle.STAGES)
def test_scores_of_all_pages(device: CpuDevice, options: dict[str, Any], stage: Any) -> None:
    case = plan_of(options).case(1)
    for piece_bytes in (1, 1 << 25):
        with bounds(piece_bytes=piece_bytes):
            result = attended(device, case, "float32", Way(), return_lse=True, return_scores=stage)
        accuracy.check(case, result, stage)


class Counting:
    """A device that counts the keys of its calls."""

    def __init__(self, device: CpuDevice) -> None:
        """Computes on another device."""
        self._device = device
        self.torch_device = device.torch_device
        self.keys = 0
        self.scattering = None

    def rows(self, *arguments: Any, **options: Any) -> Any:
        """As the device does."""
        return self._device.rows(*arguments, **options)

    def run_each(self, *arguments: Any, **options: Any) -> Any:
        """As the device does."""
        return self._device.run_each(*arguments, **options)

    def attend(self, calls: list[AttentionCall], flops: int) -> list[AttentionResult]:
        """As the device does."""
        self.keys += sum(len(call.key) * call.key.shape[2] for call in calls)
        return self._device.attend(calls, flops)


@pytest.mark.parametrize("group", [1, 2])
@EVERY_STORAGE
def test_folded_queries_see_what_they_would_alone(device: CpuDevice, group: int, storage: str) -> None:
    """For forks with shared parts of different lengths, and others in between, with options of their own."""
    plan = plan_of({"causal": "bottom_right", "group": group})
    trunk, branch = [*range(50, 66)], [*range(50, 58), *range(100, 108)]
    options: list[dict[str, Any]] = [{}, {}, {}, {"mask_shape": (61,)}, {"scale": 0.5, "softcap": 2.0}, {"scale": 0.5}]
    options += [{}, *[{"alibi": True}, {"bias_shape": (61,)}] * 2]
    lengths = [1, 3, 1, 2, 1, 1, 1, 1, 1, 2, 2]
    cases = [
        stored(replace(plan, query_length=length, **own).case(n), storage)
        for n, (length, own) in enumerate(zip(lengths, options, strict=True))
    ]
    for case in cases:
        case.key[:], case.value[:] = cases[0].key, cases[0].value
    other = stored(plan.case(9), storage)
    cases[2].key[:, :, 32:], cases[2].value[:, :, 32:] = other.key[:, :, 32:], other.value[:, :, 32:]
    shape = shape_of(cases[0], storage)
    pool = pool_for(shape, 4)
    fill(pool, shape, trunk, cases[0], (1000,))
    fill(pool, shape, branch, cases[2], (1000,))
    pages = [branch if case is cases[2] else trunk for case in cases]
    queries = [query_of(case, storage, own, return_lse=True) for case, own in zip(cases, pages, strict=True)]
    counting = Counting(device)
    for case, result in zip(cases, attend_tensors(queries, pool, counting, fold=True), strict=True):
        accuracy.check(case, arrays(result))
    # Four have no options of their own, and the pages that all four share hold 32 tokens.
    assert counting.keys == 11 * 61 - 3 * 32


@EVERY_OPTION
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("scattered", [False, True])
def test_every_option_page_by_page(device: CpuDevice, scattered: bool, length: int, options: dict[str, Any]) -> None:
    """As on any device but a CPU; also where a mask or a bias leaves a head nothing to attend to."""
    case = stored(plan_of(options, query_length=length).case(length), "bfloat16")
    for name, nothing in (("mask", False), ("bias", -np.inf)):
        if name in case.options and case.options[name].ndim > 2:
            case.options[name][..., 1, :, :] = nothing
    pool, pages = filled(case, "bfloat16", Way(per_page=8, scattered=scattered))
    for return_lse in (False, True):
        query = query_of(case, "bfloat16", pages, return_lse=return_lse)
        (result,) = attend_tensors([query], pool, device, fold=True)
        accuracy.check(case, arrays(result))


@EVERY_DTYPE
@pytest.mark.parametrize("length", [1, 3, 20])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [{}, {"alibi": True}, {"softcap": 3.0}, {"mask_shape": (1, 1, 1, 61)}])
def test_what_is_excluded_never_leaks(
    device: CpuDevice, dtype: str, length: int, poison: float, options: dict[str, Any]
) -> None:
    """Non-finite values beyond a length, before a window and where a mask excludes; those attended to are seen."""
    plan = plan_of({"causal": "bottom_right", "window": (30, -1), **options}, dtype=dtype, query_length=length)
    case = stored(replace(plan, kv_lengths=(57,)).case(4), "bfloat16")
    seen = case.expected.attended.any((0, 1, 2))
    assert 0 < seen.sum() < 61
    for part in (case.key, case.value):
        part[:, :, ~seen] = poison
    del case.__dict__["expected"]
    result = attended(device, case, "bfloat16", Way(), return_lse=True)
    assert np.isfinite(result.output.astype(np.float64)).all()
    accuracy.check(case, result)
    case.value[:, 2, np.flatnonzero(seen)[-1]] = poison
    del case.__dict__["expected"]
    result = attended(device, case, "bfloat16", Way(), return_lse=True)
    assert not np.isfinite(result.output[:, 2, -1].astype(np.float64)).any()
    assert np.isfinite(result.output[:, :2].astype(np.float64)).all()
    accuracy.check(case, result)


@EVERY_DTYPE
@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0), (1, 0), (20, 0)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sinks": True}, {"softcap": 2.0}, {"score": "additive"}])
def test_zero_lengths(device: CpuDevice, dtype: str, lengths: tuple[int, int], options: dict[str, Any]) -> None:
    plan = Plan(dtype=dtype, batch=1, query_length=lengths[0], key_length=lengths[1], **options)
    case = plan.case(0)
    case = stored(case, "float32")
    accuracy.check(case, attended(device, case, "float32", Way(), return_lse=True))
    result = attended(device, case, "float32", Way(), return_lse=True, return_scores="weights")
    accuracy.check(case, result, "weights")


def test_a_nan_in_a_query_spoils_its_own_row_and_no_other(device: CpuDevice) -> None:
    case = plan_of({}, query_length=3).case(5)
    case.query[:, :, 1, 0] = np.nan
    result = attended(device, case, "float32", Way(), return_lse=True)
    assert np.isnan(result.output[:, :, 1]).all()
    assert np.isnan(result.lse[:, :, 1]).all()
    accuracy.check(case, result)


@pytest.mark.parametrize("options", [{"window": (20, 0)}, {"mask_shape": (3, 61)}, {"softcap": 2.0}])
def test_excluded_keys_have_no_weight_beside_a_nan(device: CpuDevice, options: dict[str, Any]) -> None:
    case = plan_of({"causal": "bottom_right", **options}, query_length=3).case(6)
    case.query[:, :, 1, 0] = np.nan
    case.key[:, 0, 50] = np.nan
    accuracy.check(case, attended(device, case, "float32", Way(), return_scores="weights"), "weights")


@pytest.mark.parametrize("length", [1, 8, 100])
@pytest.mark.parametrize("group", [1, 4])
@EVERY_STORAGE
def test_pages_of_real_sizes_against_torchs_own_attention(
    device: CpuDevice, length: int, group: int, storage: str
) -> None:
    plan = Plan(batch=1, key_heads=4, group=group, query_length=length, key_length=1000, head_dim=64, key_dim=64)
    case = stored(replace(plan, value_dim=64, causal="bottom_right").case(6), storage)
    result = attended(device, case, storage, Way(per_page=64, chunks=(300,)))
    query, key, value = (tensor(part).double() for part in (case.query, case.key, case.value))
    mask = torch.ones(length, 1000, dtype=torch.bool).tril(1000 - length)
    exact = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).numpy()
    assert np.abs(result.output - exact).max() < 2e-6
