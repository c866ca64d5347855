"""Attention to caches without a store: cases over pages of few tokens, in whatever way the tokens were written.

Everything but a query's own tokens is garbage: every slot of a pool holds NaN before a test writes to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracle
import pytest
import strategies
import torch
from cases import DTYPES, Case, Plan
from hypothesis import strategies as st
from kernel_calls import array, call_of, tensor
from resident import CPU, page_bytes_for, placement

from attnserve_server.caches import attend as attend_module
from attnserve_server.caches import query as query_module
from attnserve_server.caches import step as step_module
from attnserve_server.caches.attend import attend_cache
from attnserve_server.caches.page_memory import STORAGE
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.query import CacheQuery
from attnserve_server.caches.shape import CacheShape
from attnserve_server.devices import cpu
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.kernels import AttentionResult
from attnserve_server.native import library

PAGES = 400
EVERY_STORAGE = pytest.mark.parametrize("storage", sorted(STORAGE))
EVERY_DTYPE = pytest.mark.parametrize("dtype", sorted(DTYPES))
STORAGES = st.sampled_from(sorted(STORAGE))


@pytest.fixture(scope="module", params=["native", "tensors"])
def device(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    """Two threads, which share all work, however small; with the native kernel, and without."""
    native = library.best("auto") if request.param == "native" else None
    if native is None and request.param == "native":
        pytest.skip("there is no native kernel here")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "SPLIT_FLOPS", 0)
        patch.setattr(cpu, "ALONE_FLOPS", 0)
        patch.setattr(cpu, "HELPED_FLOPS", 1)
        device = CpuDevice(2, 0, native)
        yield device
        device.close()
    torch.set_num_threads(threads)


@contextmanager
def bounds(**values: int) -> Iterator[None]:
    """Sets other bounds on what is computed together: `piece_bytes`, `wave_bytes`, `converted_bytes`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            for module in (attend_module, query_module, step_module):
                if hasattr(module, name.upper()):
                    patch.setattr(module, name.upper(), value)
        yield


@dataclass(frozen=True)
class Way:
    """How tokens get into a cache: the page size, which pages, and the chunk sizes, repeated."""

    per_page: int = 4
    scattered: bool = False
    chunks: tuple[int, ...] = (1000,)


WAYS = st.builds(
    Way,
    per_page=st.sampled_from([1, 3, 4, 8, 16]),
    scattered=st.booleans(),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
)


def pool_for(shape: CacheShape, per_page: int) -> PagePool:
    """A pool of PAGES pages with NaN everywhere, of `per_page` tokens each, or of few more where rows are short."""
    page_bytes = page_bytes_for(shape, per_page)
    pool = PagePool(PAGES * page_bytes, page_bytes, CPU, None)
    count = PAGES * pool.tokens_per_page(shape)
    nan = torch.full((1, 1, 1), torch.nan)
    heads, widths = shape.num_kv_heads, (shape.head_dim, shape.value_dim)
    everywhere = placement(range(PAGES), pool.tokens_per_page(shape), 0, count)
    pool.write(shape, everywhere, *(nan.expand(heads, count, width) for width in widths))
    return pool


def shape_of(case: Case, storage: str) -> CacheShape:
    """The shape of a cache for the keys and values of a case."""
    return CacheShape(case.key.shape[1], case.key.shape[3], case.value.shape[3], 1, storage)  # type: ignore[arg-type]


def pages_of(way: Way, count: int, seed: int = 0) -> list[int]:
    """The pages of a cache."""
    return np.random.default_rng(seed).permutation(PAGES)[:count].tolist() if way.scattered else [*range(7, 7 + count)]


def fill(pool: PagePool, shape: CacheShape, pages: Sequence[int], case: Case, chunks: Sequence[int]) -> None:
    """Writes the keys and values of a case to pages, in chunks."""
    key, value = (tensor(part)[0] for part in (case.key, case.value))
    length, per_page, start, place = key.shape[1], pool.tokens_per_page(shape), 0, 0
    while start < length:
        stop = min(start + chunks[place % len(chunks)], length)
        pool.write(shape, placement(pages, per_page, start, stop - start), key[:, start:stop], value[:, start:stop])
        start, place = stop, place + 1


def query_of(case: Case, storage: str, pages: Sequence[int], **returned: Any) -> CacheQuery:
    """A case of one sequence as a query; `kv_lengths` are an option of the case."""
    lengths = case.options.get("kv_lengths")
    call, kv_length = call_of(case), None if lengths is None else int(lengths[0])
    offset = call.offset
    if case.options.get("query_offset") is None and case.options.get("causal") == "bottom_right":
        offset = (case.key.shape[2] if kv_length is None else kv_length) - case.query.shape[2]
    names = ("query", "scale", "score", "softcap", "window", "mask", "bias", "alibi_slopes", "sinks")
    return CacheQuery(
        **{name: getattr(call, name) for name in names},
        shape=shape_of(case, storage),
        pages=pages,
        length=case.key.shape[2],
        offset=offset,
        kv_length=kv_length,
        **returned,
    )


def arrays(result: AttentionResult) -> Any:
    """A result in arrays."""
    lse, scores = (None if part is None else array(part) for part in (result.lse, result.scores))
    return SimpleNamespace(output=array(result.output), lse=lse, scores=scores)


def filled(case: Case, storage: str, way: Way) -> tuple[PagePool, list[int]]:
    """A pool, and the pages in it of a cache that was filled in a way."""
    shape = shape_of(case, storage)
    pool = pool_for(shape, way.per_page)
    pages = pages_of(way, -(-case.key.shape[2] // pool.tokens_per_page(shape)))
    fill(pool, shape, pages, case, way.chunks)
    return pool, pages


def attended(device: CpuDevice, case: Case, storage: str, way: Way, **returned: Any) -> Any:
    """The result of a case over a cache that was filled in a way."""
    pool, pages = filled(case, storage, way)
    (result,) = attend_cache([query_of(case, storage, pages, **returned)], pool, device)
    return arrays(result)


@st.composite
def single_plans(draw: st.DrawFn) -> Plan:
    """Any request that a cache can answer, of one sequence, with a length or without."""
    plan = replace(draw(strategies.plans(dense=True)), batch=1)
    for name in ("mask_shape", "bias_shape"):
        if len(getattr(plan, name) or ()) == 4:
            plan = replace(plan, **{name: (1, *getattr(plan, name)[1:])})
    return replace(plan, kv_lengths=draw(st.none() | st.tuples(st.integers(0, plan.key_length))))


RETURNED = st.fixed_dictionaries(
    {"return_lse": st.booleans(), "return_scores": st.sampled_from([None, None, None, *oracle.STAGES])}
)
PIECES = st.sampled_from([1, 1 << 10, 1 << 25])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "grouped": {"group": 4, "key_heads": 2},
    "three-heads": {"key_heads": 3, "causal": "bottom_right"},
    "widths": {"value_dim": 24},
    "window": {"causal": "bottom_right", "window": (21, -1)},
    "window-bias": {"causal": "bottom_right", "window": (30, -1), "bias_shape": (4, 1, 61)},
    "wide-window": {"window": (9, 8), "query_offset": 30},
    "mask": {"mask_shape": (1, 4, 1, 61)},
    "bias": {"bias_shape": (61,), "causal": "bottom_right"},
    "alibi": {"alibi": True, "causal": "bottom_right"},
    "alibi-mask": {"alibi": True, "mask_shape": (61,), "query_offset": 9},
    "alibi-amidst": {"alibi": True, "query_offset": 30},
    "alibi-beyond": {"alibi": True, "query_offset": 90, "sinks": True},
    "sinks": {"sinks": True, "causal": "bottom_right"},
    "softcap": {"softcap": 2.0, "causal": "bottom_right"},
    "general": {"score": "general"},
    "additive": {"score": "additive"},
    "length": {"kv_lengths": (37,), "causal": "bottom_right"},
    "scale": {"scale": -0.5, "mask_shape": (61,)},
    "nothing": {"causal": True, "query_offset": -40},
    "some-nothing": {"causal": True, "query_offset": -2, "sinks": True},
}
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
LENGTHS = pytest.mark.parametrize("length", [1, 4, 16, 17, 40])


def plan_of(options: dict[str, Any], **more: Any) -> Plan:
    """A query over 61 tokens of 4 heads."""
    base = {"batch": 1, "key_heads": 4, "key_length": 61, "head_dim": 16, "key_dim": 16, "value_dim": 16}
    return Plan(**{**base, **options, **more})
