"""Attention to forks of caches by the native kernel, together: what they share is read once, and no bit differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import accuracy
import numpy as np
import pytest
import torch
from attending import EVERY_STORAGE, arrays, fill, plan_of, pool_for, query_of, shape_of
from bits import assert_same_results
from kernel_calls import tensor
from resident import CPU, placement, stored

from attnserve_server.caches.attend import attend_cache
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.query import CacheQuery
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.native import library

GROUPED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "grouped-heads": {"causal": "bottom_right", "group": 4, "key_heads": 2},
    "window": {"causal": "bottom_right", "window": (21, -1)},
    "mask": {"mask_shape": (1, 4, 1, 61)},
    "bias": {"bias_shape": (61,), "causal": "bottom_right"},
    "alibi": {"alibi": True, "causal": "bottom_right", "sinks": True},
    "softcap": {"softcap": 2.0, "causal": "bottom_right"},
}


class Forks:
    """Queries over forks of one cache, some of which diverge early, some late and some not at all."""

    PARTED = (61, 61, 45, 20, 46, 3, 61, 13)
    """How many tokens each has in common with the first."""

    def __init__(self, storage: str, options: dict[str, Any], lengths: Sequence[int] = (1,) * 8) -> None:
        """Pages of 4 tokens, or more where rows are short."""
        plan = plan_of(options)
        self.cases = [stored(replace(plan, query_length=n).case(seed), storage) for seed, n in enumerate(lengths)]
        first = self.cases[0]
        shape = shape_of(first, storage)
        self.pool = pool_for(shape, 4)
        per_page = self.pool.tokens_per_page(shape)
        count = -(-61 // per_page)
        trunk = [*range(40, 40 + count)]
        self.queries = []
        for n, (case, parted) in enumerate(zip(self.cases, self.PARTED, strict=False)):
            case.key[:, :, :parted], case.value[:, :, :parted] = first.key[:, :, :parted], first.value[:, :, :parted]
            own = trunk[: parted // per_page] if parted < 61 else trunk
            pages = [*own, *range(100 + 20 * n, 100 + 20 * n + count - len(own))]
            fill(self.pool, shape, pages, case, (1000,))
            self.queries.append(query_of(case, storage, pages, return_lse=True))


@pytest.fixture(scope="module", params=["AVX-512", "AVX2"])
def native(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    """One thread, with the native kernel for an instruction set."""
    if request.param not in library.available():
        pytest.skip(f"there is no native kernel for {request.param} here")
    kernel = library.Library(request.param)
    threads = torch.get_num_threads()
    device = CpuDevice(1, 0, kernel)
    yield device
    device.close()
    torch.set_num_threads(threads)


def shared_pages(device: CpuDevice, queries: Sequence[CacheQuery], pool: PagePool) -> int:
    """How many pages queries need not read, since the one before them reads those for them."""
    seen = []

    def attend(calls: bytearray, flops: int) -> Any:
        seen.extend(np.frombuffer(calls, np.int64).reshape(-1, library.CALL_BYTES // 8)[:, 9].tolist())
        assert device.native is not None
        return device.native.attend(calls, flops)

    compute: Any = SimpleNamespace(native=SimpleNamespace(attend=attend), torch_device=CPU)
    attend_cache(queries, pool, compute)
    assert len(seen) == len(queries)
    return sum(seen)


@pytest.mark.parametrize("lengths", [(1,) * 8, (3,) * 8, (1, 1, 3, 3, 1, 20, 3, 1)], ids=["step", "few", "mixed"])
@pytest.mark.parametrize("options", GROUPED.values(), ids=GROUPED)
@EVERY_STORAGE
def test_forks_that_are_computed_together_have_the_bits_that_they_have_alone(
    native: CpuDevice, storage: str, options: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    forks = Forks(storage, options, lengths)
    alone = [arrays(attend_cache([query], forks.pool, native)[0]) for query in forks.queries]
    for case, result in zip(forks.cases, alone, strict=True):
        accuracy.check(case, result)
    assert shared_pages(native, forks.queries, forks.pool) > 0
    for order in ([*range(8)], [5, 0, 7, 2, 1, 6, 3, 4]):
        together = attend_cache([forks.queries[place] for place in order], forks.pool, native)
        for place, result in zip(order, together, strict=True):
            assert_same_results(arrays(result), alone[place])


def test_shorter_lengths_share_the_full_pages_that_they_have(native: CpuDevice) -> None:
    """A group's members all read what it shares; a length may end within a page, or before the end of that part."""
    forks = Forks("float32", {"causal": "bottom_right"})
    queries = [replace(query, kv_length=length) for query in forks.queries[:3] for length in (0, 3, 30, 45, 57)]
    alone = [arrays(attend_cache([query], forks.pool, native)[0]) for query in queries]
    assert shared_pages(native, queries, forks.pool) > 0
    for result, expected in zip(attend_cache(queries, forks.pool, native), alone, strict=True):
        assert_same_results(arrays(result), expected)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("length", [1, 3])
def test_what_is_not_finite_in_a_fork_is_its_own_affair(native: CpuDevice, length: int, poison: float) -> None:
    """In a token of its own, and in one that others share; also where a window excludes it."""
    for token, window in ((59, (-1, -1)), (59, (5, -1)), (5, (-1, -1)), (5, (21, -1))):
        forks = Forks("float32", {"causal": "bottom_right", "window": window}, (length,) * 8)
        shape = forks.queries[0].shape
        for place in (2, 3):
            case, pages = forks.cases[place], forks.queries[place].pages
            case.key[:, 1, token] = poison
            per_page = forks.pool.tokens_per_page(shape)
            where = placement(pages, per_page, token, 1)
            key, value = (tensor(part)[0, :, token : token + 1] for part in (case.key, case.value))
            forks.pool.write(shape, where, key, value)
        alone = [arrays(attend_cache([query], forks.pool, native)[0]) for query in forks.queries]
        together = attend_cache(forks.queries, forks.pool, native)
        for place, (result, expected) in enumerate(zip(together, alone, strict=True)):
            assert_same_results(arrays(result), expected)
            if token == 59 or place in (2, 3):
                accuracy.check(forks.cases[place], expected)
