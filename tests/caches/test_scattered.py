"""Queries over many caches in one call of a kernel for keys that lie anywhere, which a stand-in computes on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import accuracy
import numpy as np
import pytest
import torch
from attending import EVERY_OPTION, Way, arrays, fill, filled, pages_of, plan_of, pool_for, query_of, shape_of
from cases import Case
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import array
from resident import stored
from scattering import HALF, ScatteringDevice, device
from strategies import MANY

from attnserve_server.caches import scattered
from attnserve_server.caches.attend import attend_tensors
from attnserve_server.kernels import varlen_cuda

__all__ = ["device"]


def check(
    device: ScatteringDevice, cases: list[Case], storage: str, pages: list[list[int]], per_page: int = 4
) -> list[Any]:
    """Asserts that cases over such pages get the right results; later ones write what pages of earlier ones hold."""
    shape = shape_of(cases[0], storage)
    pool = pool_for(shape, per_page)
    for case, own in zip(cases, pages, strict=True):
        fill(pool, shape, own, case, (1000,))
    queries = [query_of(case, storage, own, return_lse=True) for case, own in zip(cases, pages, strict=True)]
    results = attend_tensors(queries, pool, device)
    for case, result in zip(cases, results, strict=True):
        accuracy.check(case, arrays(result))
    return results


@HALF
@EVERY_OPTION
@pytest.mark.parametrize("length", [1, 3])
def test_every_option(device: ScatteringDevice, dtype: str, length: int, options: dict[str, Any]) -> None:
    """Those that the kernel lacks are computed in another way."""
    case = stored(plan_of(options, dtype=dtype, query_length=length).case(length), dtype)
    (result,) = check(device, [case], dtype, [pages_of(Way(scattered=True), 16)])
    if length == 1 and options.keys() <= {"causal", "group", "key_heads", "window", "query_offset", "sinks"}:
        assert (result.kernel == varlen_cuda.NAME) == bool(case.expected.attended.any())
        assert len(device.scattered) == bool(case.expected.attended.any())


@HALF
@pytest.mark.parametrize("per_page", [4, 16])
@pytest.mark.parametrize("lengths", [(1,), (4, 61), (1, 700, 61, 33, 5), (128, 129, 127, 4)])
def test_lengths(device: ScatteringDevice, dtype: str, per_page: int, lengths: tuple[int, ...]) -> None:
    """In one call, and pages that were freed by others, here NaN, are not read."""
    plan = plan_of({"group": 2, "key_heads": 2, "causal": "bottom_right"}, dtype=dtype, query_length=1)
    cases = [stored(replace(plan, key_length=length).case(n), dtype) for n, length in enumerate(lengths)]
    if sum(-(-length // per_page) for length in lengths) > 400:
        per_page = 16
    free = np.random.default_rng(0).permutation(400).tolist()
    pages = [[free.pop() for _ in range(-(-length // per_page))] for length in lengths]
    results = check(device, cases, dtype, pages, per_page)
    assert {result.kernel for result in results} == {varlen_cuda.NAME}
    assert len(device.scattered) == 1


@MANY
@given(
    counts=st.lists(st.integers(1, 80), min_size=1, max_size=6),
    merged=st.sampled_from([2, 3, 32]),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 4)]),
    seed=st.integers(0, 9),
)
def test_merges(counts: list[int], merged: int, heads: tuple[int, int], seed: int) -> None:
    """Results over any number of pages become one for each query, with the same bits whatever others are merged."""
    generator = torch.Generator().manual_seed(seed)
    total, (rows, kv_heads) = sum(counts), heads
    output = torch.randn(total, rows, kv_heads, 8, generator=generator)
    lse = torch.randn(total, rows, kv_heads, generator=generator)
    place = torch.randperm(total, generator=generator)

    def merge(counts: list[int], place: torch.Tensor, *found: torch.Tensor) -> tuple[torch.Tensor, ...]:
        levels, sizes = scattered._levels(np.array(counts), place.numpy())
        for level, size in zip(levels, sizes, strict=True):
            chosen = None if level is None else tuple(map(torch.from_numpy, scattered._chosen(level)))
            found = scattered._merged(*found, chosen, size)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scattered, "MERGED", merged)
        found = merge(counts, place, output, lse)
        for n, own in enumerate(torch.split(place, counts)):
            alone = merge([len(own)], torch.arange(len(own)), output[own], lse[own])
            for part, same in zip(found, alone, strict=True):
                assert torch.equal(part[n], same[0])
    for n, own in enumerate(torch.split(place, counts)):
        weights = lse[own].softmax(0).unsqueeze(-1)
        torch.testing.assert_close(found[0][n], (output[own] * weights).sum(0), rtol=0, atol=1e-5)
        torch.testing.assert_close(found[1][n], lse[own].logsumexp(0), rtol=0, atol=1e-5)


@HALF
def test_what_caches_share_is_read_once(device: ScatteringDevice, dtype: str) -> None:
    plan = plan_of({"causal": "bottom_right", "group": 2}, dtype=dtype, query_length=1)
    trunk, branch = [*range(50, 66)], [*range(50, 58), *range(100, 108)]
    cases = [stored(plan.case(n), dtype) for n in range(4)]
    for case in cases:
        case.key[:], case.value[:] = cases[0].key, cases[0].value
    other = stored(plan.case(9), dtype)
    cases[2].key[:, :, 32:], cases[2].value[:, :, 32:] = other.key[:, :, 32:], other.value[:, :, 32:]
    check(device, cases, dtype, [trunk, trunk, branch, trunk])
    (call,) = device.scattered
    assert int(call.kv_lengths.sum()) == 61 + 29
    assert call.longest_query == 4 * 2


@pytest.mark.parametrize("length", [1, 2])
def test_what_many_share_is_as_many_sequences_as_the_kernel_has_blocks_of(
    device: ScatteringDevice, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """It would start as many for what only one of them attends to."""
    monkeypatch.setattr(scattered, "BLOCK_ROWS", 4 * length)
    plan = plan_of({"group": 2}, dtype="float16", query_length=length)
    cases = [stored(plan.case(n), "float16") for n in range(5)]
    for case in cases[1:]:
        case.key[:, :, :32], case.value[:, :, :32] = cases[0].key[:, :, :32], cases[0].value[:, :, :32]
    pages = [[*range(50, 58), *range(100 + 10 * n, 108 + 10 * n)] for n in range(5)]
    results = check(device, cases, "float16", pages)
    (call,) = device.scattered
    assert call.longest_query == 4 * length
    assert int(call.kv_lengths.sum()) == 3 * 32 + 5 * 29
    queries = [query_of(case, "float16", own, return_lse=True) for case, own in zip(cases, pages, strict=True)]
    monkeypatch.setattr(scattered, "BLOCK_ROWS", 128)
    pool = pool_for(queries[0].shape, 4)
    for case, own in zip(cases, pages, strict=True):
        fill(pool, queries[0].shape, own, case, (1000,))
    for result, other in zip(results, attend_tensors(queries, pool, device), strict=True):
        assert torch.equal(result.output, other.output)


@HALF
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["key", "value"])
def test_what_is_not_finite(device: ScatteringDevice, dtype: str, poison: float, part: str) -> None:
    """Excluded, it is not seen; attended to, it is computed again, and nothing else is."""
    plan = plan_of({"window": (20, 0), "query_offset": 50}, dtype=dtype, query_length=1)
    cases = [stored(plan.case(n), dtype) for n in range(3)]
    for case in cases:
        for outside in (slice(0, 30), slice(51, 61)):
            getattr(case, part)[:, :, outside] = poison
    getattr(cases[1], part)[:, 2, 40] = poison
    for case in cases:
        case.__dict__.pop("expected", None)
    results = check(device, cases, dtype, [[*range(first, first + 16)] for first in (0, 100, 200)])
    assert [result.kernel == varlen_cuda.NAME for result in results][::2] == [True, True]
    assert device.looks == 1
    if part == "value" or np.isnan(poison):
        assert results[1].kernel != varlen_cuda.NAME


@HALF
@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scales(device: ScatteringDevice, dtype: str, scale: float) -> None:
    case = stored(plan_of({"scale": scale}, dtype=dtype, query_length=1).case(0), dtype)
    check(device, [case], dtype, [[*range(16)]])
    assert len(device.scattered) == 1


@HALF
def test_results_are_rounded_once_after_all_is_merged(device: ScatteringDevice, dtype: str) -> None:
    """With sinks as without, so that errors are few more than those of results rounded from the exact ones."""
    found, rounded = 0.0, 0.0
    for n in range(60):
        case = stored(plan_of({"causal": "bottom_right", "sinks": True}, dtype=dtype, query_length=1).case(n), dtype)
        (result,) = check(device, [case], dtype, [[*range(16)]])
        exact = case.expected.output
        found += np.abs(array(result.output).astype(np.float64) - exact).mean()
        rounded += np.abs(exact.astype(case.query.dtype).astype(np.float64) - exact).mean()
    assert found < 1.65 * rounded, found / rounded


def test_batches_of_more_pages_than_a_call_may_have_are_several_calls(
    device: ScatteringDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scattered, "MAX_SEQUENCES", 20)
    plan = plan_of({"causal": "bottom_right"}, dtype="float16", query_length=1)
    lengths = (61, 5, 9, 61, 61)
    cases = [stored(replace(plan, key_length=length).case(n), "float16") for n, length in enumerate(lengths)]
    check(device, cases, "float16", [[*range(16 * n, 16 * n + -(-k // 4))] for n, k in enumerate(lengths)])
    assert [len(call.kv_lengths) for call in device.scattered] == [18, 19, 16]


def test_one_long_cache_among_short_ones_takes_no_more_memory_than_a_call_may(
    device: ScatteringDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many results are merged for each of them, most of which are gaps."""
    plan = plan_of({"causal": "bottom_right"}, dtype="float16", query_length=1)
    cases = [stored(replace(plan, key_length=n).case(n), "float16") for n in (61, *[3] * 12, 61)]
    _, heads, _, width = cases[0].query.shape
    most = 64
    monkeypatch.setattr(scattered, "CALL_BYTES", most * 2 * heads * width * 2)
    sizes: list[int] = []
    merged = scattered._merged

    def measuring(output: torch.Tensor, lse: torch.Tensor, index: torch.Tensor | None, size: int) -> Any:
        sizes.append(len(output) if index is None else len(index))
        return merged(output, lse, index, size)

    monkeypatch.setattr(scattered, "_merged", measuring)
    check(device, cases, "float16", [[*range(16 * n, 16 * n + -(-c.key.shape[2] // 4))] for n, c in enumerate(cases)])
    assert len(device.scattered) > 1
    assert max(sizes) <= most


def test_queries_that_the_kernel_does_not_take(device: ScatteringDevice) -> None:
    for options, storage in (
        ({}, "float32"),
        ({"value_dim": 24}, "float16"),
        ({"head_dim": 12, "key_dim": 12}, "float16"),
    ):
        plan = plan_of({"causal": "bottom_right", **options}, dtype="float16", query_length=1)
        case = stored(plan.case(0), storage)
        check(device, [case], storage, [[*range(16)]])
    assert not device.scattered


@HALF
@pytest.mark.parametrize("scale", [1e37, -1e39])
def test_scores_may_be_beyond_float32(device: ScatteringDevice, dtype: str, scale: float) -> None:
    case = stored(plan_of({"scale": scale}, dtype=dtype, query_length=1).case(0), dtype)
    pool, pages = filled(case, dtype, Way(per_page=16))
    (result,) = attend_tensors([query_of(case, dtype, pages, return_lse=True)], pool, device)
    accuracy.check_beyond_float32(case, arrays(result))
    assert not device.scattered


@pytest.mark.parametrize("sign", [-1, 1])
def test_queries_and_keys_may_take_scores_beyond_float32(device: ScatteringDevice, sign: int) -> None:
    plan = plan_of({"causal": "bottom_right"}, dtype="bfloat16", query_length=1)
    case = stored(plan.case(0), "bfloat16").beyond_float32(sign)
    pool, pages = filled(case, "bfloat16", Way(per_page=16))
    (result,) = attend_tensors([query_of(case, "bfloat16", pages, return_lse=True)], pool, device)
    assert len(device.scattered) == 1
    accuracy.check_beyond_float32(case, arrays(result))
