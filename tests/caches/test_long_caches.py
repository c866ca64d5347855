"""A few queries over long caches of few key heads, which threads divide by keys: they match the oracle, with the same
bits for any threads, however tokens were appended, and whatever is computed beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import accuracy
import pytest
import torch
from attending import EVERY_STORAGE, Way, arrays, fill, pages_of, plan_of, pool_for, query_of, shape_of
from bits import assert_same_results
from resident import stored

from attnserve_server.caches.attend import attend_cache
from attnserve_server.devices import cpu
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.native import library

TOKENS = 5000
OPTIONS: dict[str, dict[str, Any]] = {
    "step": {"key_heads": 1},
    "grouped": {"key_heads": 2, "group": 4},
    "window": {"key_heads": 1, "window": (3000, -1)},
    "alibi": {"key_heads": 1, "alibi": True, "sinks": True},
}

pytestmark = pytest.mark.skipif(not library.available(), reason="no native kernel is here")


@pytest.fixture(scope="module")
def devices() -> Iterator[list[CpuDevice]]:
    """One thread, and three that share all work, however small."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "ALONE_FLOPS", 0)
        patch.setattr(cpu, "HELPED_FLOPS", 1)
        opened = [CpuDevice(count, 0, library.best("auto")) for count in (1, 3)]
        yield opened
        for device in opened:
            device.close()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@EVERY_STORAGE
def test_long_caches_and_their_forks(devices: list[CpuDevice], storage: str, options: dict[str, Any]) -> None:
    """The second cache diverges from the first in its second range of keys, the third is shorter than one range."""
    plan = plan_of({"causal": "bottom_right", "query_length": 1, "key_length": TOKENS, **options})
    cases = [stored(plan.case(0), storage), stored(plan.case(1), storage)]
    cases.append(stored(replace(plan, key_length=1000).case(2), storage))
    shape = shape_of(cases[0], storage)
    pool = pool_for(shape, 64)
    per_page = pool.tokens_per_page(shape)
    count = -(-TOKENS // per_page)
    pages = pages_of(Way(scattered=True), 3 * count)
    tables = [pages[:count], pages[: count // 2] + pages[count : count + count - count // 2], pages[2 * count :]]
    parted = count // 2 * per_page
    for name in ("key", "value"):
        getattr(cases[1], name)[:, :, :parted] = getattr(cases[0], name)[:, :, :parted]
    for case, table, chunks in zip(cases, tables, ((TOKENS,), (1, 700, 64), (1000,)), strict=True):
        fill(pool, shape, table, case, chunks)
    queries = [query_of(case, storage, table, return_lse=True) for case, table in zip(cases, tables, strict=True)]
    alone = [arrays(attend_cache([query], pool, devices[0])[0]) for query in queries]
    for case, result in zip(cases, alone, strict=True):
        accuracy.check(case, result)
    for device in devices:
        for order in ([0, 1, 2], [2, 1, 0]):
            together = attend_cache([queries[place] for place in order], pool, device)
            for place, result in zip(order, together, strict=True):
                assert_same_results(arrays(result), alone[place])
        assert_same_results(arrays(attend_cache([queries[0]], pool, device)[0]), alone[0])
