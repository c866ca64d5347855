"""Attention to the contents of caches, against itself to the last bit: how tokens got into a cache, which pages hold
them and what a query is batched with change nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import accuracy
import numpy as np
import pytest
import strategies
import torch
from attending import (
    EVERY_OPTION,
    EVERY_STORAGE,
    LENGTHS,
    PAGES,
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
    pages_of,
    plan_of,
    pool_for,
    query_of,
    shape_of,
    single_plans,
)
from bits import assert_same_results
from cases import Case, Plan
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import tensor
from resident import CPU, placement, stored

from attnserve_server.caches.attend import attend_cache
from attnserve_server.caches.layer import Placement, Write
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.query import lacks_keys
from attnserve_server.caches.shape import CacheShape
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.kernels.band import Band

__all__ = ["device"]


@pytest.mark.parametrize("kv_heads", [8, 6])
@pytest.mark.parametrize("group", [1, 4])
def test_bits_of_a_step_do_not_depend_on_what_is_beside_it(device: CpuDevice, kv_heads: int, group: int) -> None:
    """Pages of the size that servers use: caches of many lengths together, in the order of others' pages."""
    shape = CacheShape(kv_heads, 64, 64, 1, "float32")
    pool = PagePool(60 << 17, 1 << 17, CPU, None)
    per_page = pool.tokens_per_page(shape)
    places = np.random.default_rng(1).permutation(60).tolist()
    plan = plan_of({"causal": "bottom_right"}, key_heads=kv_heads, group=group, head_dim=64, key_dim=64, value_dim=64)
    cases = [replace(plan, key_length=length).case(length) for length in (1, 33, 4 * per_page - 1, 6 * per_page + 5)]
    queries = []
    for case in cases:
        count = -(-case.key.shape[2] // per_page)
        pages, places = sorted(places[:count]), places[count:]
        fill(pool, shape, pages, case, (1000,))
        queries.append(query_of(case, "float32", pages, return_lse=True))
    alone = [arrays(attend_cache([query], pool, device)[0]) for query in queries]
    for case, result in zip(cases, alone, strict=True):
        accuracy.check(case, result)
    for order in ((3, 1, 0, 2), (2, 3, 0, 1)):
        together = attend_cache([queries[place] for place in order], pool, device)
        for place, result in zip(order, together, strict=True):
            assert_same_results(arrays(result), alone[place])
    for case, expected in zip(cases, alone, strict=True):  # the same tokens in adjacent pages
        pages = list(range(-(-case.key.shape[2] // per_page)))
        fill(pool, shape, pages, case, (7,))
        (result,) = attend_cache([query_of(case, "float32", pages, return_lse=True)], pool, device)
        assert_same_results(arrays(result), expected)


@LENGTHS
@EVERY_OPTION
@EVERY_STORAGE
def test_bits_do_not_depend_on_how_tokens_came_or_where_they_lie(
    device: CpuDevice, length: int, options: dict[str, Any], storage: str
) -> None:
    case = stored(plan_of(options, query_length=length).case(length), storage)
    ways = Way(), Way(scattered=True), Way(chunks=(1,)), Way(scattered=True, chunks=(5, 1, 11))
    caches = [filled(case, storage, way) for way in ways]
    for piece_bytes in (1, 1 << 25):
        with bounds(piece_bytes=piece_bytes):
            results = [
                arrays(attend_cache([query_of(case, storage, pages, return_lse=True)], pool, device)[0])
                for pool, pages in caches
            ]
        for result in results[1:]:
            assert_same_results(result, results[0])


@given(plan=single_plans(), seed=strategies.SEEDS, storage=STORAGES, ways=st.tuples(WAYS, WAYS), returned=RETURNED)
def test_random_bits_do_not_depend_on_how_tokens_came_or_where_they_lie(
    device: CpuDevice, plan: Plan, seed: int, storage: str, ways: tuple[Way, Way], returned: dict[str, Any]
) -> None:
    case, one, other = stored(plan.case(seed), storage), ways[0], replace(ways[1], per_page=ways[0].per_page)
    with bounds(piece_bytes=1 << 10):
        results = [attended(device, case, storage, way, **returned) for way in (one, other)]
    assert_same_results(*results)


@given(
    plan=single_plans(),
    seeds=st.lists(strategies.SEEDS, min_size=2, max_size=6),
    storage=STORAGES,
    per_page=st.sampled_from([3, 8]),
    wave_bytes=st.sampled_from([1, 1 << 12, 1 << 28]),
    returned=RETURNED,
    data=st.data(),
)
def test_bits_do_not_depend_on_the_batch(
    device: CpuDevice,
    plan: Plan,
    seeds: list[int],
    storage: str,
    per_page: int,
    wave_bytes: int,
    returned: dict[str, Any],
    data: st.DataObject,
) -> None:
    """Queries over other caches, and over other lengths of the same ones, in any order."""
    cases = [stored(plan.case(seed), storage) for seed in seeds]
    shape = shape_of(cases[0], storage)
    pool = pool_for(shape, per_page)
    count = -(-plan.key_length // pool.tokens_per_page(shape))
    places = np.random.default_rng(seeds[0]).permutation(PAGES).tolist()
    queries = []
    for n, case in enumerate(cases):
        pages = places[n * count : (n + 1) * count]
        fill(pool, shape, pages, case, (1000,))
        query = query_of(case, storage, pages, **returned)
        shorter = data.draw(st.integers(0, plan.key_length))
        queries += [query, replace(query, kv_length=shorter), replace(query, window=(3, 3), offset=shorter)]
    alone = [arrays(attend_cache([query], pool, device)[0]) for query in queries]
    order = data.draw(st.permutations(range(len(queries))))
    with bounds(wave_bytes=wave_bytes):
        together = attend_cache([queries[place] for place in order], pool, device)
    for place, result in zip(order, together, strict=True):
        assert_same_results(arrays(result), alone[place])


@pytest.mark.parametrize("length", [1, 3, 20])
@EVERY_STORAGE
def test_forks_see_their_own_tokens_and_what_they_share(device: CpuDevice, length: int, storage: str) -> None:
    """Forks share full pages; a partial page that both append to is copied. Bits are as without sharing."""
    plan = plan_of({"causal": "bottom_right", "group": 2}, query_length=length)
    cases = [stored(plan.case(seed), storage) for seed in range(3)]
    for case in cases[1:]:
        case.key[:, :, :22], case.value[:, :, :22] = cases[0].key[:, :, :22], cases[0].value[:, :, :22]
    shape = shape_of(cases[0], storage)
    pool = pool_for(shape, 4)
    assert pool.tokens_per_page(shape) == 4
    trunk = [*range(50, 66)]
    fill(pool, shape, trunk, cases[0], (1000,))
    queries = [query_of(cases[0], storage, trunk, return_lse=True)]
    for n, case in enumerate(cases[1:], 1):
        pages = [*trunk[:5], *range(100 * n, 100 * n + 11)]
        start = placement(pages, 4, 22, 39)
        key, value = (tensor(part)[0, :, 22:] for part in (case.key, case.value))
        assert start.writes[0] == Write(100 * n, 2, 2)
        pool.write(shape, Placement([(trunk[5], pages[5])], start.writes), key, value)
        queries.append(query_of(case, storage, pages, return_lse=True))
    results = attend_cache(queries, pool, device)
    for case, result in zip(cases, results, strict=True):
        accuracy.check(case, arrays(result))
        assert_same_results(arrays(result), attended(device, case, storage, Way(), return_lse=True))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("length", [1, 3, 20])
@pytest.mark.parametrize("kept", [0, 4, 21, 40, 60])
def test_truncating_and_replaying_is_as_never_having_gone_there(
    device: CpuDevice, poison: float, length: int, kept: int
) -> None:
    """Even if what was truncated was not finite."""
    case = plan_of({"causal": "bottom_right"}, query_length=length).case(3)
    shape = shape_of(case, "float32")
    pool = pool_for(shape, 4)
    pages = pages_of(Way(scattered=True), 16)
    gone = Case(case.query, case.key.copy(), case.value.copy())
    gone.key[:, :, kept:], gone.value[:, :, kept:] = poison, poison
    fill(pool, shape, pages, gone, (1000,))
    key, value = (tensor(part)[0, :, kept:] for part in (case.key, case.value))
    pool.write(shape, placement(pages, 4, kept, 61 - kept), key, value)
    (result,) = attend_cache([query_of(case, "float32", pages, return_lse=True)], pool, device)
    assert_same_results(arrays(result), attended(device, case, "float32", Way(), return_lse=True))


@pytest.mark.parametrize("query_dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", [1, 5, 40])
def test_bits_do_not_depend_on_excluded_keys_where_a_row_attends_to_nothing(
    device: CpuDevice, length: int, query_dtype: type[np.floating[Any]]
) -> None:
    plan = plan_of({}, query_length=length, key_length=61, key_dim=64, head_dim=64, value_dim=64)
    case, results = plan.case(3), []
    mask = np.ones((1, case.query.shape[1], length, 61), np.bool_)
    mask[:, 0, 0], mask[..., 30:] = False, False
    for scale in (1.0, 1e37):
        key = case.key.copy()
        key[:, :, 30:] *= np.float32(scale)
        scaled = Case(case.query.astype(query_dtype), key, case.value, {"mask": mask})
        results.append(attended(device, scaled, "float32", Way(per_page=16), return_lse=True))
    assert_same_results(*results)
    assert not results[0].output[:, 0, 0].any()


@given(plan=single_plans(), seed=strategies.SEEDS)
def test_which_rows_lack_keys(plan: Plan, seed: int) -> None:
    query = query_of(plan.case(seed), "float32", [])
    keys = query.length if query.kv_length is None else query.kv_length
    _, heads, length, _ = query.query.shape
    reached = Band(length, keys, query.offset, *query.window).tensor(torch.device("cpu"))
    if query.mask is not None:
        reached = reached & query.mask.expand(1, heads, length, query.length)[..., :keys]
    expected = ~reached.any(-1)
    assert torch.equal(lacks_keys(query).expand(1, heads, length), expected.expand(1, heads, length))


@pytest.mark.parametrize("query_dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", [1, 5, 40])
def test_bits_do_not_depend_on_what_others_have_left_in_a_page(
    device: CpuDevice, length: int, query_dtype: type[np.floating[Any]]
) -> None:
    """Neither where a row attends to nothing, which is not recognised by keys."""
    plan = plan_of({}, query_length=length, key_length=61, key_dim=64, head_dim=64, value_dim=64)
    case = plan.case(3)
    mask = np.ones((1, case.query.shape[1], length, 1), np.bool_)
    mask[:, 0, 0] = False
    case = Case(case.query.astype(query_dtype), case.key, case.value, {"mask": mask})
    shape, results = shape_of(case, "float32"), []
    for scale in (1.0, 1e37):
        pool = pool_for(shape, 16)
        left = np.random.default_rng(1).standard_normal(case.key.shape).astype(np.float32)
        for first in range(0, 40, 4):
            before = Case(case.query, left[:, :, :60] * np.float32(scale), left[:, :, :60])
            fill(pool, shape, range(first, first + 4), before, (1000,))
        fill(pool, shape, [7, 8, 9, 10], case, (1000,))
        (result,) = attend_cache([query_of(case, "float32", [7, 8, 9, 10], return_lse=True)], pool, device)
        results.append(arrays(result))
    assert_same_results(*results)
    assert not results[0].output[:, 0, 0].any()
