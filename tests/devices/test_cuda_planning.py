"""The code around the CUDA kernels, on CPU tensors: how requests are grouped and packed, and how results are read.

Torch's own kernels are replaced by stand-ins that have the same traps; everything else is what runs on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
import strategies
import torch
from cases import Plan
from cuda_here import FEW, HALF, HostTransfers, check, cuda_kernels_here, request_of, run
from garbage import no_tensors_in_cycles
from hypothesis import given
from hypothesis import strategies as st

from attnserve_server.devices import packed_calls, packing
from attnserve_server.devices.batch import FEW_CALLS, launch_batch
from attnserve_server.devices.packing import pack
from attnserve_server.kernels import RAGGED_KERNELS, efficient_cuda, varlen_cuda, written_out
from attnserve_server.kernels.band import Band

__all__ = ["cuda_kernels_here"]


def packable(plan: Plan) -> Plan:
    """The plan without options that no ragged kernel computes."""
    plain = replace(plan, score="dot", key_dim=plan.head_dim, softcap=0.0, mask_shape=None, bias_shape=None)
    return replace(plain, alibi=False)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the kernel for equal lengths is given from now on."""
    asked: list[tuple[Any, ...]] = []
    kernel = efficient_cuda._efficient

    def telling(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments)
        return kernel(*arguments, **options)

    monkeypatch.setattr(efficient_cuda, "_efficient", telling)
    return asked


RETURNED = st.fixed_dictionaries(
    {"return_lse": st.booleans(), "return_scores": st.sampled_from([None, None, None, *oracle.STAGES])}
)


@FEW
@given(
    plans=st.lists(st.tuples(strategies.plans(), RETURNED), min_size=1, max_size=4),
    seeds=st.lists(strategies.SEEDS, min_size=1, max_size=2),
)
def test_random_batches(plans: list[tuple[Plan, dict[str, Any]]], seeds: list[int]) -> None:
    check([(plan.case(seed), returned) for seed in seeds for plan, returned in plans])


@FEW
@given(
    plans=st.lists(strategies.plans().map(packable), min_size=1, max_size=4),
    seeds=st.lists(strategies.SEEDS, min_size=1, max_size=3),
    lse=st.booleans(),
)
def test_random_batches_that_can_be_packed(plans: list[Plan], seeds: list[int], lse: bool) -> None:
    check([(plan.case(seed), {"return_lse": lse}) for seed in seeds for plan in plans])


@FEW
@given(
    plans=st.lists(strategies.plans().map(packable), min_size=1, max_size=4),
    seeds=st.lists(strategies.SEEDS, min_size=1, max_size=3),
    call_bytes=st.sampled_from([1, 500, 3000]),
    sequences=st.sampled_from([1, 3, 65535]),
    rearranged=st.integers(0, 600),
)
def test_random_batches_in_any_parts(
    plans: list[Plan], seeds: list[int], call_bytes: int, sequences: int, rearranged: int
) -> None:
    """However calls are divided, and whatever of each is rearranged on the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "CALL_BYTES", call_bytes)
        patch.setattr(packing, "MAX_SEQUENCES", sequences)
        patch.setattr(packed_calls, "REARRANGED", rearranged)
        check([(plan.case(seed), {"return_lse": True}) for seed in seeds for plan in plans])


def test_a_call_is_copied_while_the_one_before_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "CALL_BYTES", 1)
    done: list[str] = []
    for name in ("stage", "run"):
        method = getattr(packed_calls._Call, name)

        def told(call: Any, name: str = name, method: Any = method) -> None:
            done.append(name)
            method(call)

        monkeypatch.setattr(packed_calls._Call, name, told)
    check([(Plan(dtype="float16").case(seed), {}) for seed in range(3)])
    assert done == ["stage", "run", "stage", "run", "stage", "run"]


@pytest.mark.parametrize("dtype", ["float32", *HALF])
@pytest.mark.parametrize("layout", ["heads_first", "length_first", "packed"])
@pytest.mark.parametrize("sinks", [False, True])
def test_sequences_of_all_lengths_are_one_call(dtype: str, layout: str, sinks: bool) -> None:
    """Bottom-right causal, as in serving: prefills, chunks and single queries, with and without a past."""
    rng = np.random.default_rng(0)
    asked = []
    for seed in range(40):
        lengths = tuple(int(n) for n in rng.integers(1, 30, 3))
        plan = Plan(dtype=dtype, layout=layout, group=2, causal="bottom_right", sinks=sinks, batch=3)
        if layout == "packed":
            kept = tuple(int(n) for n in lengths + rng.integers(0, 30, 3))
            plan = replace(plan, rank=3, query_lengths=lengths, kv_lengths=kept)
            plan = replace(plan, query_length=max(lengths), key_length=max(kept))
        else:
            plan = replace(plan, query_length=lengths[0], key_length=lengths[0] + lengths[1])
        asked.append((plan.case(seed), {"return_lse": True}))
    batch = check(asked)
    assert batch.kernel_calls == {"cuda_efficient" if dtype == "float32" else "cuda_varlen": 1}


def test_single_queries_are_one_call() -> None:
    plans = [Plan(dtype="float16", group=4, query_length=1, key_length=3 + n, causal="bottom_right") for n in range(9)]
    assert check([(plan.case(n), {}) for n, plan in enumerate(plans)]).kernel_calls == {"cuda_varlen": 1}


@pytest.mark.parametrize("causal", [False, "bottom_right"])
@pytest.mark.parametrize("group", [1, 2])
def test_single_queries_are_computed_in_blocks_of_the_same_size_in_any_company(
    monkeypatch: pytest.MonkeyPatch, causal: bool | str, group: int
) -> None:
    """On some GPUs, the blocks of what is told to be causal have other sizes, and so results have other bits."""
    told: list[bool] = []
    flash = varlen_cuda._flash

    def telling(*arguments: Any, **options: Any) -> Any:
        told.append(options["window_size_left"] < 0 and options["window_size_right"] == 0)
        return flash(*arguments, **options)

    monkeypatch.setattr(varlen_cuda, "_flash", telling)
    single, longer = (
        Plan(dtype="float16", group=group, query_length=length, key_length=9, causal=causal) for length in (1, 5)
    )
    check([(single.case(0), {})])
    check([(single.case(0), {}), (longer.case(1), {})])
    assert told == [causal == "bottom_right"] * 2


def test_windows_of_long_and_short_sequences() -> None:
    """For sequences shorter than the window, only causality is left: a second call, not a third."""
    plans = [
        Plan(dtype="float16", query_length=n, key_length=n, window=(6, -1), causal="bottom_right") for n in range(1, 20)
    ]
    assert check([(plan.case(0), {}) for plan in plans]).kernel_calls == {"cuda_varlen": 2}


@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_a_bias_for_some_of_the_keys_begins_where_loads_are_aligned(dtype: str) -> None:
    """A row of a bias, cut at the window or the lengths, may start anywhere in memory; packing it must align it."""
    window = Plan(dtype=dtype, query_length=1, key_length=20, bias_shape=(20,), window=(15, 0), causal="bottom_right")
    shorter = Plan(dtype=dtype, query_length=3, key_length=17, bias_shape=(2, 1, 1, 17), kv_lengths=(17, 16))
    for plan in (window, shorter):
        assert check([(plan.case(0), {"return_lse": True})]).kernel_calls.keys() == {"cuda_efficient"}


def test_keys_that_lie_in_pages_or_rows_are_read_where_they_are() -> None:
    """A copy would read and write as much as the kernel has to read."""
    pages, rows = (
        torch.zeros(4, 3, 40, 16)[1:3, :, :17],
        torch.zeros(9, 160)[:, 48:96].view(1, 9, 3, 16).transpose(1, 2),
    )
    for lying in (pages, rows, pages[:1, :, :1]):
        read = efficient_cuda._readable(lying)
        assert read.data_ptr() == lying.data_ptr()
        assert read.shape == lying.shape
    for askew in (
        torch.zeros(1, 2, 3, 12),
        torch.zeros(1, 2, 3, 20)[..., :16],
        torch.zeros(1, 2, 3, 32)[..., ::2],
        torch.zeros(100)[1:97].view(1, 2, 3, 16),
    ):
        assert efficient_cuda._readable(askew).data_ptr() != askew.data_ptr()


def test_more_heads_than_a_grid_has_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficient_cuda, "MAX_SEQUENCES", 4)
    for heads, kernel in ((4, "cuda_efficient"), (6, written_out.NAME)):
        plan = Plan(key_heads=heads, mask_shape=(5, 7))
        assert check([(plan.case(0), {"return_lse": True})]).kernel_calls == {kernel: 1}


def test_batches_are_freed_when_they_are_done() -> None:
    """Not when garbage is collected: until then, there would be no memory for the next ones."""
    plans = [Plan(dtype="float16", batch=3, **options) for options in ({}, {"window": (2, 0)}, {"mask_shape": (5, 7)})]
    cases = [plan.case(0) for plan in plans]
    cases[0].value[0, 0, 0] = np.nan
    requests = [request_of(case, return_lse=True) for case in cases]
    run(requests)  # what is remembered from the first time on may be in cycles
    with no_tensors_in_cycles():
        run(requests)


def test_what_is_alike_is_stacked() -> None:
    plan = Plan(mask_shape=(2, 1, 5, 7))
    assert check([(plan.case(seed), {}) for seed in range(5)]).kernel_calls == {"cuda_efficient": 1}
    plan = Plan(softcap=2.0, batch=3)
    assert check([(plan.case(seed), {}) for seed in range(5)]).kernel_calls == {written_out.NAME: 1}


def test_more_sequences_than_a_grid_has_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (packing, efficient_cuda):
        monkeypatch.setattr(module, "MAX_SEQUENCES", 4)
    packed = check([(Plan(batch=3, query_length=n + 1).case(n), {"return_lse": True}) for n in range(3)])
    assert packed.kernel_calls == {"cuda_efficient": 3}
    asked = watched(monkeypatch)
    check([(Plan(batch=10, mask_shape=(10, 1, 5, 7)).case(0), {"return_lse": True})])
    assert [len(query) for query, *_ in asked] == [4, 4, 2]


@pytest.mark.parametrize("lengths", [(30, 1, 1, 2, 1, 1), (1, 1, 30, 1, 1), (1, 2, 3, 4, 5, 6), (30, 29, 1)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_long_sequences_are_computed_apart_from_many_short_ones(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], dtype: str
) -> None:
    """A kernel writes as many lses for each sequence as for the longest: in one request, and in several."""
    monkeypatch.setattr(packing, "CALL_ROWS", rows := 64)
    plan = Plan(
        dtype=dtype,
        layout="packed",
        rank=3,
        sinks=True,
        causal="bottom_right",
        query_lengths=lengths,
        kv_lengths=lengths,
        query_length=max(lengths),
        key_length=max(lengths),
        batch=len(lengths),
    )
    requests = [request_of(plan.case(seed), return_lse=True) for seed in range(2)]
    (one,), left = pack(requests, RAGGED_KERNELS)
    heads = requests[0].problem.query_heads
    for _, pieces in one.calls():
        all_as_long = sum(piece.sequences for piece in pieces) * max(piece.query_length for piece in pieces)
        assert all_as_long * heads <= rows or sum(piece.sequences for piece in pieces) == 1
    assert not left
    alone = check([(plan.case(0), {"return_lse": True})])
    check([(plan.case(seed), {"return_lse": True}) for seed in range(2)])
    assert sum(alone.kernel_calls.values()) < len(lengths) or len(lengths) == 3, "the short ones are together"


def test_wide_rows_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, rows have twice their width for the kernel."""
    monkeypatch.setattr(efficient_cuda, "MAX_WIDTH", 16)
    for dtype, width, kernel in (
        ("float32", 8, "cuda_efficient"),
        ("float32", 9, written_out.NAME),
        ("float16", 24, written_out.NAME),
    ):
        plan = Plan(dtype=dtype, head_dim=width, key_dim=width, value_dim=8, mask_shape=(5, 7))
        assert check([(plan.case(0), {"return_lse": True})]).kernel_calls == {kernel: 1}
    for kernel in RAGGED_KERNELS:
        assert kernel.max_width <= 1 << 15


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_copies_of_keys_and_values_are_bounded(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Such as those of a long cache, whose pages are the sequences of one call."""
    monkeypatch.setattr(efficient_cuda, "MAX_BLOCK_BYTES", 12_000)
    asked = watched(monkeypatch)
    for options in (
        {"bias_shape": (5, 7)},
        {"group": 3, "window": (2, 1), "mask_shape": (5, 7)},
        {"group": 2, "alibi": True},
        *([{"group": 3, "window": (2, 1)}] if dtype == "float32" else []),
    ):
        asked.clear()
        check([(Plan(dtype=dtype, batch=20, **options).case(0), {"return_lse": True})])
        sizes = [key.nbytes + value.nbytes for _, key, value, *_ in asked]
        assert len(sizes) > 1
        assert max(sizes) <= 12_000


@pytest.mark.parametrize(
    ("options", "once"),
    [
        ({"query_length": 1, "mask_shape": (1, 7)}, True),
        ({"mask_shape": (7,)}, True),
        ({"mask_shape": (8, 1, 7)}, False),
    ],
)
def test_keys_are_read_once_for_heads_that_share_them_and_their_mask(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], once: bool
) -> None:
    asked = watched(monkeypatch)
    case = Plan(key_heads=2, group=4, batch=3, **options).case(0)
    check([(case, {"return_lse": True})])
    assert [key.shape[1] for _, key, *_ in asked] == [2 if once else 8]


def test_what_takes_many_calls_is_not_launched() -> None:
    """Others would wait for it: each scale is a call of its own."""
    requests = [request_of(Plan(dtype="float16", scale=0.1 + n).case(n)) for n in range(FEW_CALLS + 1)]
    assert launch_batch(requests, HostTransfers(), RAGGED_KERNELS) is None
    finish = launch_batch(requests[1:], HostTransfers(), RAGGED_KERNELS)
    assert finish is not None
    assert len(finish().results) == FEW_CALLS


def test_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are many queries, masks, biases and scores are made for some of them at a time."""
    monkeypatch.setattr(efficient_cuda, "MAX_BLOCK_ELEMENTS", most := 40)
    asked = watched(monkeypatch)
    monkeypatch.setitem(written_out.BLOCK_ELEMENTS, "cpu", 100)
    for options in ({"alibi": True}, {"window": (2, 1)}, {"mask_shape": (3, 1, 11, 7)}, {"softcap": 1.0}):
        plan = Plan(query_length=11, batch=3, group=2, causal=True, sinks=True, **options)
        check([(plan.case(seed), {"return_lse": True}) for seed in range(2)])
    assert asked
    for _, _, _, bias, *_ in asked:
        assert math.prod(length for length, step in zip(bias.shape, bias.stride(), strict=True) if step) <= most


@given(
    lengths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    offset=st.integers(-12, 12),
    window=st.tuples(st.integers(-1, 12), st.integers(-1, 12)),
    companion=st.integers(0, 5),
)
def test_bands_from_the_bottom_right(
    lengths: tuple[int, int], offset: int, window: tuple[int, int], companion: int
) -> None:
    """However a band is described, kernels give the same result, also beside longer sequences."""
    band, begin, end = Band(*lengths, offset, *window).narrowed()
    found = band.from_bottom_right() if begin < end else None
    if found is None:
        return
    longest = band.kv_length + companion
    left, right = (-1 if bound >= longest else bound for bound in found)
    p = torch.arange(band.query_length)[:, None] + band.kv_length - band.query_length
    j = torch.arange(band.kv_length)
    reached = (j >= p - (left if left >= 0 else math.inf)) & (j <= p + (right if right >= 0 else math.inf))
    assert torch.equal(reached, band.tensor(torch.device("cpu")))


def test_alignments_that_serving_needs_are_found() -> None:
    """Prefill, chunked prefill, decode, more queries than keys, sliding windows: none falls back."""
    for lengths, offset, window, expected in [
        ((5, 5), 0, (-1, 0), (-1, 0)),
        ((3, 9), 6, (-1, 0), (-1, 0)),
        ((1, 9), 8, (-1, 0), (-1, 0)),
        ((9, 3), -6, (-1, 0), (-1, 0)),
        ((4, 9), 0, (-1, -1), (-1, -1)),
        ((5, 5), 0, (2, 0), (2, 0)),
        ((3, 9), 0, (-1, 0), (-1, 0)),
        ((3, 9), 1, (2, 2), (4, 0)),
        ((7, 7), 0, (2, 2), (2, 2)),
    ]:
        band = Band(*lengths, offset, *window).narrowed()[0]
        assert band.from_bottom_right() == expected, (lengths, offset, window)


def test_what_no_ragged_kernel_takes_is_left() -> None:
    taken = {"causal": "bottom_right"}, {"sinks": True}, {"window": (3, 0)}, {"kv_lengths": (2, 7)}, {"group": 3}
    left = (
        {"softcap": 1.0},
        {"scale": 1e37},
        {"alibi": True},
        {"mask_shape": (5, 7)},
        {"bias_shape": (5, 7)},
        {"score": "general"},
        {"score": "additive"},
        {"kv_lengths": (0, 7)},
        {"value_dim": 264},
        {"dtype": "float64"},
    )
    requests = [request_of(Plan(**{"dtype": "float16", **options}).case(0)) for options in (*taken, *left)]
    packs, others = pack(requests, RAGGED_KERNELS)
    assert sorted(place for each in packs for place in each.places) == list(range(len(taken)))
    assert others == list(range(len(taken), len(requests)))
