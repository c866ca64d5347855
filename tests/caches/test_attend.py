"""Attention to what caches hold: against the oracle, with pages of few tokens, and to the last bit against itself.

Whatever is not a query's own is garbage: every slot of a pool holds NaN before a test writes to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import accuracy
import numpy as np
import oracle
import pytest
import strategies
import torch
from bits import assert_same_results
from cases import DTYPES, Case, Plan
from hypothesis import given
from hypothesis import strategies as st
from resident import CPU, page_bytes_for, placement
from test_kernels import array, call_of, tensor
from torch.nn.functional import scaled_dot_product_attention

from attnserve_server.caches import attend as attend_module
from attnserve_server.caches import query as query_module
from attnserve_server.caches import step as step_module
from attnserve_server.caches.attend import CacheQuery, attend_cache
from attnserve_server.caches.layer import Placement, Write
from attnserve_server.caches.pages import STORAGE, PagePool
from attnserve_server.caches.shape import CacheShape
from attnserve_server.devices import cpu
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.kernels import AttentionCall, AttentionResult

PAGES = 400
EVERY_STORAGE = pytest.mark.parametrize("storage", sorted(STORAGE))
EVERY_DTYPE = pytest.mark.parametrize("dtype", sorted(DTYPES))


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    """Two threads, which divide all work, however small."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "SPLIT_FLOPS", 0)
        device = CpuDevice(2, 0)
        yield device
        device.close()
    torch.set_num_threads(threads)


@contextmanager
def bounds(**values: int) -> Iterator[None]:
    """Other bounds of what is computed together: `piece_bytes`, `wave_bytes`, `converted_bytes`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            for module in (attend_module, query_module, step_module):
                if hasattr(module, name.upper()):
                    patch.setattr(module, name.upper(), value)
        yield


@dataclass(frozen=True)
class Way:
    """How tokens come to be in a cache: page size, in which pages, and in chunks of which sizes, over and over."""

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
    pool = PagePool(PAGES * page_bytes, page_bytes, CPU)
    count = PAGES * pool.tokens_per_page(shape)
    nan = torch.full((1, 1, 1), torch.nan)
    heads, widths = shape.num_kv_heads, (shape.head_dim, shape.value_dim)
    everywhere = placement(range(PAGES), pool.tokens_per_page(shape), 0, count)
    pool.write(shape, everywhere, *(nan.expand(heads, count, width) for width in widths))
    return pool


def shape_of(case: Case, storage: str) -> CacheShape:
    """The shape of a cache for the keys and values of a case."""
    return CacheShape(case.key.shape[1], case.key.shape[3], case.value.shape[3], 1, storage)  # type: ignore[arg-type]


def stored(case: Case, storage: str) -> Case:
    """The case with keys and values as they are when they have been stored."""
    with np.errstate(over="ignore"):
        key, value = (part.astype(DTYPES[storage]) for part in (case.key, case.value))
    return Case(case.query, key, value, case.options)


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
    names = ("query", "scale", "score", "softcap", "causal", "window", "mask", "bias", "alibi_slopes", "sinks")
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


def attended(device: CpuDevice, case: Case, storage: str, way: Way, **returned: Any) -> Any:
    """The result of a case over a cache that came to be in a way."""
    shape = shape_of(case, storage)
    pool = pool_for(shape, way.per_page)
    pages = pages_of(way, -(-case.key.shape[2] // pool.tokens_per_page(shape)))
    fill(pool, shape, pages, case, way.chunks)
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
STORAGES = st.sampled_from(sorted(STORAGE))
PIECES = st.sampled_from([1, 1 << 10, 1 << 25])


@strategies.MANY
@given(plan=single_plans(), seed=strategies.SEEDS, storage=STORAGES, way=WAYS, piece_bytes=PIECES, returned=RETURNED)
def test_random_queries(
    device: CpuDevice, plan: Plan, seed: int, storage: str, way: Way, piece_bytes: int, returned: dict[str, Any]
) -> None:
    case = stored(plan.case(seed), storage)
    with bounds(piece_bytes=piece_bytes):
        result = attended(device, case, storage, way, **returned)
    accuracy.check(case, result, returned["return_scores"])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "grouped": {"group": 4, "key_heads": 2},
    "three-heads": {"key_heads": 3, "causal": "bottom_right"},
    "widths": {"value_dim": 24},
    "window": {"causal": "bottom_right", "window": (21, -1)},
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


@EVERY_DTYPE
@EVERY_STORAGE
@EVERY_OPTION
def test_every_option_in_every_dtype(device: CpuDevice, dtype: str, storage: str, options: dict[str, Any]) -> None:
    for length in (1, 5, 20):
        case = stored(plan_of(options, dtype=dtype, query_length=length).case(length), storage)
        accuracy.check(case, attended(device, case, storage, Way(per_page=8, scattered=True), return_lse=True))


@EVERY_OPTION
@pytest.mark.parametrize("length", [1, 5])
def test_few_queries_are_products_over_pages(device: CpuDevice, length: int, options: dict[str, Any]) -> None:
    """But for rare options, values that are not whole vectors wide, and what has nothing to attend."""
    case = plan_of(options, query_length=length).case(1)
    shape, pages = shape_of(case, "float32"), [*range(4)]
    pool = pool_for(shape, 16)
    fill(pool, shape, pages, case, (1000,))
    (result,) = attend_cache([query_of(case, "float32", pages)], pool, device)
    rare = "softcap" in options or "score" in options or options.get("value_dim") == 24
    rare |= "alibi" in options and "mask_shape" in options
    assert (result.kernel == step_module.NAME) == (not rare and bool(case.expected.attended.any()))


@pytest.mark.parametrize("kv_heads", [8, 6])
@pytest.mark.parametrize("group", [1, 4])
def test_bits_of_a_step_do_not_depend_on_what_is_beside_it(device: CpuDevice, kv_heads: int, group: int) -> None:
    """Pages of the size that servers have: caches of many lengths together, in the order of others' pages."""
    shape = CacheShape(kv_heads, 64, 64, 1, "float32")
    pool = PagePool(60 << 17, 1 << 17, CPU)
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


@EVERY_OPTION
@pytest.mark.parametrize("stage", oracle.STAGES)
def test_scores_of_all_pages(device: CpuDevice, options: dict[str, Any], stage: Any) -> None:
    case = plan_of(options).case(1)
    for piece_bytes in (1, 1 << 25):
        with bounds(piece_bytes=piece_bytes):
            result = attended(device, case, "float32", Way(), return_lse=True, return_scores=stage)
        accuracy.check(case, result, stage)


@LENGTHS
@EVERY_OPTION
@EVERY_STORAGE
def test_bits_do_not_depend_on_how_tokens_came_or_where_they_lie(
    device: CpuDevice, length: int, options: dict[str, Any], storage: str
) -> None:
    case = stored(plan_of(options, query_length=length).case(length), storage)
    for piece_bytes in (1, 1 << 25):
        with bounds(piece_bytes=piece_bytes):
            expected = attended(device, case, storage, Way(), return_lse=True)
            for way in (
                Way(scattered=True),
                Way(chunks=(1,)),
                Way(scattered=True, chunks=(5, 1, 11)),
            ):
                assert_same_results(attended(device, case, storage, way, return_lse=True), expected)


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
def test_bits_do_not_depend_on_the_company(
    device: CpuDevice,
    plan: Plan,
    seeds: list[int],
    storage: str,
    per_page: int,
    wave_bytes: int,
    returned: dict[str, Any],
    data: st.DataObject,
) -> None:
    """Of queries over other caches, and over other lengths of the same ones, in any order."""
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
    """Forks share full pages; the page that both go on in is copied. Bits are those of caches that share nothing."""
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


class Counting:
    """A device that notes over how many keys its calls are."""

    def __init__(self, device: CpuDevice) -> None:
        """Computes on another device."""
        self._device = device
        self.torch_device = device.torch_device
        self.keys = 0

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
    """Of forks with shared parts of different lengths, of other queries in between, and of some with a mask."""
    plan = plan_of({"causal": "bottom_right", "group": group})
    trunk, branch = [*range(50, 66)], [*range(50, 58), *range(100, 108)]
    lengths = [1, 3, 1, 2, 1, 1]
    cases = [stored(replace(plan, query_length=length).case(length), storage) for length in lengths]
    cases[3] = stored(replace(plan, query_length=2, mask_shape=(61,)).case(3), storage)
    cases[4] = stored(replace(plan, query_length=1, scale=0.5, softcap=2.0).case(4), storage)
    for case in cases:
        case.key[:], case.value[:] = cases[0].key, cases[0].value
    other = stored(plan.case(9), storage)
    cases[2].key[:, :, 32:], cases[2].value[:, :, 32:] = other.key[:, :, 32:], other.value[:, :, 32:]
    shape = shape_of(cases[0], storage)
    pool = pool_for(shape, 4)
    fill(pool, shape, trunk, cases[0], (1000,))
    fill(pool, shape, branch, cases[2], (1000,))
    pages = [trunk, trunk, branch, trunk, trunk, trunk]
    queries = [query_of(case, storage, own, return_lse=True) for case, own in zip(cases, pages, strict=True)]
    counting = Counting(device)
    for case, result in zip(cases, attend_cache(queries, pool, counting, fold=True), strict=True):
        accuracy.check(case, arrays(result))
    # Four are without mask and softcap, and 32 tokens are in the pages that all of those share.
    assert counting.keys == 6 * 61 - 3 * 32


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


@EVERY_DTYPE
@pytest.mark.parametrize("length", [1, 3, 20])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [{}, {"alibi": True}, {"softcap": 3.0}, {"mask_shape": (1, 1, 1, 61)}])
def test_what_is_excluded_never_leaks(
    device: CpuDevice, dtype: str, length: int, poison: float, options: dict[str, Any]
) -> None:
    """What is not finite behind a length, before a window and where a mask excludes; and what is attended is seen."""
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
