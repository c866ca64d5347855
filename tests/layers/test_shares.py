"""Requests shared out among threads: which thread gets which, and that replies are the same, in order."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import random_layers as make
from hypothesis import given
from hypothesis import strategies as st

from attnserve_server.devices.cpu import SPLIT_FLOPS, CpuDevice
from attnserve_server.devices.division import UNEVEN, even_shares, shares
from attnserve_server.layers.cost import cost_of
from attnserve_server.layers.layer import LayerInput, LayerOutput

EACH = SPLIT_FLOPS


@given(costs=st.lists(st.integers(0, 1000), max_size=30), threads=st.integers(1, 5))
def test_every_item_is_in_one_part(costs: list[int], threads: int) -> None:
    parts = shares(costs, threads)
    assert sorted(place for part in parts for place in part) == list(range(len(costs)))
    assert len(parts) == min(threads, len(costs))
    assert all(part == sorted(part) for part in parts)
    loads = [sum(costs[place] for place in part) for part in parts]
    # No load exceeds another by more than the smallest item in it.
    for part, load in zip(parts, loads, strict=True):
        assert load - min(costs[place] for place in part) <= min(loads)


@given(costs=st.lists(st.integers(1, 1000), max_size=30), threads=st.integers(1, 5))
def test_even_shares(costs: list[int], threads: int) -> None:
    parts, rest = even_shares(costs, threads)
    assert sorted([*rest, *(place for part in parts for place in part)]) == list(range(len(costs)))
    assert len(parts) in (0, threads)
    loads = [sum(costs[place] for place in part) for part in parts]
    assert max(loads, default=0) * threads <= UNEVEN * sum(loads)
    assert len(rest) <= 1 or not parts


@pytest.mark.parametrize(("count", "threads", "shared"), [(5, 2, 4), (3, 2, 2), (4, 2, 4), (1, 2, 0), (7, 3, 6)])
def test_the_odd_one_of_equal_items_is_left(count: int, threads: int, shared: int) -> None:
    parts, rest = even_shares([100] * count, threads)
    assert sum(map(len, parts)) == shared
    assert len(rest) == count - shared


def test_an_odd_item_is_computed_by_itself(devices: dict[int, CpuDevice]) -> None:
    calls = []

    def compute(items: Sequence[int]) -> list[int]:
        calls.append((len(items), threading.current_thread() is threading.main_thread()))
        return [item * 10 for item in items]

    assert devices[2].share(compute, range(5), [EACH] * 5) == [0, 10, 20, 30, 40]
    assert sorted(calls) == [(1, True), (2, False), (2, False)]


def test_equal_items_are_shared_out_in_halves(devices: dict[int, CpuDevice]) -> None:
    both = threading.Barrier(2)

    def compute(items: Sequence[int]) -> list[int]:
        both.wait(60)  # neither continues before the other has begun
        return [item * 10 for item in items]

    assert devices[2].share(compute, range(8), [EACH] * 8) == [item * 10 for item in range(8)]


@pytest.mark.parametrize(
    ("costs", "threads"),
    [([EACH] * 4, 1), ([EACH // 8] * 4, 2), ([EACH], 2), ([EACH, 2 * EACH], 2), ([], 2)],
    ids=["one thread", "little", "one item", "uneven", "nothing"],
)
def test_what_is_not_shared_out(devices: dict[int, CpuDevice], costs: list[int], threads: int) -> None:
    """All are computed at once by the calling thread, which divides each step among the others."""
    calls = []

    def compute(items: Sequence[int]) -> list[int]:
        calls.append(threading.current_thread())
        return list(items)

    assert devices[threads].share(compute, range(len(costs)), costs) == list(range(len(costs)))
    assert calls == [threading.current_thread()]


def test_a_thread_divides_nothing_of_its_share(devices: dict[int, CpuDevice]) -> None:
    """If every thread had a share, it would wait for itself."""
    device = devices[2]

    def compute(items: Sequence[int]) -> list[tuple[str, str]]:
        thread = threading.current_thread().name
        rows = make.random_rows(64, 5, 0)
        seen: list[str] = []
        device.rows(lambda of_rows: (seen.append(threading.current_thread().name), of_rows)[1], rows, flops=EACH)
        return [(thread, of_rows) for of_rows in seen] * len(items)

    own = device.share(compute, range(4), [EACH] * 4)
    assert len(own) == 4
    assert all(thread == of_rows for thread, of_rows in own)


def test_an_error_in_a_share_is_the_callers(devices: dict[int, CpuDevice]) -> None:
    def compute(items: Sequence[int]) -> list[int]:
        if 3 in items:
            raise RuntimeError("out of memory")
        return list(items)

    with pytest.raises(RuntimeError, match="out of memory"):
        devices[2].share(compute, range(4), [EACH] * 4)


@pytest.mark.parametrize("dtype", make.DTYPES)
def test_replies_do_not_depend_on_it(devices: dict[int, CpuDevice], dtype: make.Dtype) -> None:
    """Alone, all in one call, and shared out: the same bits, and the same number of kernel calls counted."""
    architecture = make.attention(128, 4, causal=True)
    layer = make.layer_of(architecture, make.random_parameters(architecture, dtype=dtype), devices[2], dtype)
    requests = [
        make.packed(make.random_rows(length, 128, seed, dtype)) for seed, length in enumerate((90, 100, 1, 80, 110, 3))
    ]
    costs = [cost_of(architecture, request.lengths, None).flops for request in requests]
    assert sum(costs) > SPLIT_FLOPS
    alone = [make.run(layer, request)[0] for request in requests]
    devices[2].take_kernel_calls()
    threads = set()

    def run(inputs: Sequence[LayerInput]) -> Sequence[LayerOutput]:
        threads.add(threading.current_thread())
        return layer.run(inputs)

    shared = devices[2].share(run, requests, costs)
    assert threads.isdisjoint([threading.current_thread()])
    assert devices[2].take_kernel_calls().total() == len(requests)
    for one, other in zip(shared, alone, strict=True):
        make.assert_same_replies(one, other)
