"""Caches on a CUDA device: the kernel that reads pages where they lie, and steps and prefills through a real server.

With `GPU_TESTS_ON=cpu` what goes through a server runs on a CPU, to check the tests themselves without a GPU.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import accuracy
import numpy as np
import pytest
import torch
from cases import Case, Plan
from conftest import served

from attnserve import Client
from attnserve_server.caches.attend import attend_tensors
from attnserve_server.caches.opening import open_caches
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.query import CacheQuery
from attnserve_server.caches.scattered import Reach, attend_ranges
from attnserve_server.caches.shape import CacheShape
from attnserve_server.devices import open_device
from attnserve_server.settings.config import Config

DEVICE = os.environ.get("GPU_TESTS_ON", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
HALF = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
EVERY_DTYPE = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])


@HALF
@pytest.mark.skipif(DEVICE != "cuda", reason="the kernel is CUDA's")
@pytest.mark.parametrize("width", [8, 64, 80, 128, 256])
@pytest.mark.parametrize(("heads", "length"), [(2, 1), (2, 3), (8, 1), (64, 2)])
def test_the_kernel_reads_keys_where_they_lie(dtype: str, width: int, heads: int, length: int) -> None:
    """All slots that are not attended to hold NaN; sequences begin and end within pages, and share some."""
    device = open_device("cuda", 0, 0, "auto")
    assert device.scattering is not None
    shape, where = CacheShape(2, width, width, 1, dtype), device.torch_device  # type: ignore[arg-type]
    page_bytes = 2 * 128 * shape.num_kv_heads * width * shape.item_bytes
    pool = PagePool(64 * page_bytes, page_bytes, where, None)
    views = pool.memory.views(shape)
    key, value, per_page = views.key, views.value, views.tokens_per_page
    for whole in (key, value):
        whole.fill_(torch.nan)
    random = torch.Generator(where).manual_seed(0)
    numbers = torch.randperm(64).tolist()
    shared, ranges = numbers[:2], [(0, per_page), (3, 2 * per_page + 5), (per_page - 1, 9 * per_page + 1), (0, 1)]
    reaches, free = [], numbers[2:]
    for begin, end in ranges:
        pages = [*shared, *(free.pop() for _ in range(max(0, -(-end // per_page) - 2)))]
        reaches.append(Reach(pages, begin, end))
        for token in range(begin, end):
            for whole in (key, value):
                new = torch.randn(2, width, device=where, generator=random).to(whole.dtype)
                whole[pages[token // per_page], :, token % per_page] = new
    query = torch.randn(len(ranges), heads, length, width, device=where, generator=random).to(key.dtype)
    found = attend_ranges(query, reaches, 0.2, shape, pool, device.scattering, True)
    torch.cuda.synchronize()
    assert found.check.isfinite().all()
    for n, (pages, begin, end) in enumerate(reaches):
        k, v = (whole[pages].transpose(0, 1).flatten(1, 2)[:, begin:end].double() for whole in (key, value))
        k, v = (each.repeat_interleave(heads // 2, 0) for each in (k, v))
        scores = query[n].double() @ k.mT * 0.2
        rounding = 2.0**-10 if dtype == "float16" else 2.0**-7
        torch.testing.assert_close(found.output[n].double(), scores.softmax(-1) @ v, rtol=0, atol=4 * rounding)
        torch.testing.assert_close(found.lse[n].double(), scores.logsumexp(-1), rtol=0, atol=1e-3)


@HALF
@pytest.mark.skipif(DEVICE != "cuda", reason="the kernel is CUDA's")
@pytest.mark.parametrize("count", [1, 2, 3, 17])
def test_a_step_has_the_same_bits_beside_longer_ones(dtype: str, count: int) -> None:
    """However many pages are merged at once because of others."""
    device = open_device("cuda", 0, 0, "auto")
    assert device.scattering is not None
    shape, where = CacheShape(2, 64, 64, 1, dtype), device.torch_device  # type: ignore[arg-type]
    page_bytes = 2 * 128 * shape.num_kv_heads * 64 * shape.item_bytes
    pool = PagePool(256 * page_bytes, page_bytes, where, None)
    views = pool.memory.views(shape)
    random = torch.Generator(where).manual_seed(0)
    for whole in (views.key, views.value):
        whole.copy_(torch.randn(whole.shape, device=where, generator=random))
    query = torch.randn(3, 8, 1, 64, device=where, generator=random).to(views.key.dtype)
    own = Reach(list(range(count)), 0, count * views.tokens_per_page - 5)
    others = [Reach(list(range(20, 20 + pages)), 0, pages * views.tokens_per_page) for pages in (64, 130)]
    alone = attend_ranges(query[:1], [own], 0.125, shape, pool, device.scattering, True)
    beside = attend_ranges(query, [own, *others], 0.125, shape, pool, device.scattering, True)
    assert torch.equal(alone.output[0], beside.output[0])
    assert torch.equal(alone.lse[0], beside.lse[0])


@pytest.mark.skipif(DEVICE != "cuda", reason="a CPU has no memory of its own")
def test_a_step_over_a_long_cache_takes_little_memory() -> None:
    """In float32, for which the kernel is given keys and values in two parts."""
    device = open_device("cuda", 0, 0, "auto")
    shape, where = CacheShape(8, 128, 128, 1, "float32"), device.torch_device
    pool = PagePool(2 << 30, 2 << 20, where, None)
    pages, per_page = list(range(1024)), pool.tokens_per_page(shape)
    query = CacheQuery(torch.randn(1, 8, 1, 128, device=where), shape, pages, 1024 * per_page, 0.1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attend_tensors([query], pool, device)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 3 << 29, "less than is attended to"


@pytest.mark.skipif(DEVICE != "cuda", reason="a CPU has no memory of its own")
def test_by_default_half_of_what_is_free_is_taken_at_the_start() -> None:
    device = open_device("cuda", 0, 0, "auto")
    gc.collect()
    torch.cuda.empty_cache()  # or the pool might be what torch still holds
    free = device.memory()["free"]
    host = open_caches(Config(), device)
    taken = free - device.memory()["free"]
    assert 0 <= free // 2 - host.store.pool_bytes < host.store.page_bytes
    assert free // 2 - host.store.page_bytes <= taken <= free * 0.55
    del host
    gc.collect()  # a pool is part of a cycle
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a server on that device."""
    flags = ("--device", DEVICE, "--cache-bytes", "256MiB", "--max-batch-requests", "1024")
    with served(flags, tmp_path_factory.mktemp("cuda-caches")) as server, Client(server.address) as client:
        yield client


PLAN = Plan(batch=1, key_heads=4, group=2, head_dim=64, key_dim=64, value_dim=64, causal="bottom_right")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (700, -1)},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "softcap": {"softcap": 5.0},
    "mask": {"mask_shape": (1, 8, 1, 1531)},
    "bias": {"bias_shape": (1531,)},
    "more values than keys": {"value_dim": 80},
}


@EVERY_DTYPE
@pytest.mark.parametrize("length", [1, 5, 130])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_to_a_cache(client: Client, dtype: str, length: int, options: dict[str, Any]) -> None:
    """Filled in chunks, and by the request itself."""
    plan = replace(PLAN, dtype=dtype, query_length=length, key_length=1531, **options)
    case = plan.case(length)
    with client.create_cache(4, 64, value_dim=case.value.shape[-1], dtype=dtype) as cache:
        for start, stop in ((0, 1000), (1000, 1001), (1001, 1531 - length)):
            cache.append(case.key[0, :, start:stop], case.value[0, :, start:stop])
        arguments = {**case.arguments, "causal": True} if length > 1 else case.arguments
        own = (part[:, :, 1531 - length :] for part in (case.key, case.value))
        result = client.submit(case.query, *own, caches=[cache], return_lse=True, **arguments).result()
    accuracy.check(case, result)


@EVERY_DTYPE
def test_steps_of_many_caches(client: Client, dtype: str) -> None:
    """Of very different lengths, some of them forks, token by token: in one message, and side by side."""
    lengths = [1, 2, 63, 64, 65, 127, 128, 129, 500, 1024, 3000] * 3
    plan = replace(PLAN, dtype=dtype, query_length=1)
    cases = [replace(plan, key_length=length + 2).case(n) for n, length in enumerate(lengths)]
    caches = []
    for n, (case, length) in enumerate(zip(cases, lengths, strict=True)):
        if n >= 11 and n % 2:  # shares all but its last two tokens
            caches.append(caches[n - 11].fork())
            case.key[:, :, :length], case.value[:, :, :length] = (
                part[:, :, :length] for part in (cases[n - 11].key, cases[n - 11].value)
            )
            continue
        cache = client.create_cache(4, 64, dtype=dtype)
        cache.append(case.key[0, :, :length], case.value[0, :, :length])
        caches.append(cache)
    for step in range(2):
        before = [
            Case(case.query, case.key[:, :, : length + step + 1], case.value[:, :, : length + step + 1], {})
            for case, length in zip(cases, lengths, strict=True)
        ]
        query = np.concatenate([case.query for case in before])
        key, value = (
            np.concatenate([part[:, :, -1:] for part in parts])
            for parts in (tuple(case.key for case in before), tuple(case.value for case in before))
        )
        if step:
            futures = [
                client.submit(query[n : n + 1], key[n : n + 1], value[n : n + 1], caches=[cache], return_lse=True)
                for n, cache in enumerate(caches)
            ]
            found = [future.result() for future in futures]
        else:
            together = client.attend(query, key, value, caches=caches, return_lse=True)
            found = [_one(together, n) for n in range(len(caches))]
        for case, result in zip(before, found, strict=True):
            accuracy.check(case, result)
    for cache in caches:
        cache.delete()


def _one(result: Any, n: int) -> Any:
    return replace(result, output=result.output[n : n + 1], lse=result.lse[n : n + 1])


@EVERY_DTYPE
def test_what_is_not_finite_is_where_it_belongs(client: Client, dtype: str) -> None:
    """A NaN in a value that a window excludes is not seen; one that is attended to is."""
    case = replace(PLAN, dtype=dtype, query_length=1, key_length=300, window=(100, -1)).case(0)
    case.value[0, 1, 150, 3] = np.nan
    with client.create_cache(4, 64, dtype=dtype) as cache:
        cache.append(case.key[0], case.value[0])
        for window in ((100, -1), (200, -1)):
            case.options["window"] = window
            case.__dict__.pop("expected", None)
            accuracy.check(case, client.attend(case.query, caches=[cache], return_lse=True, **case.arguments))
