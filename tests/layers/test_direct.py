"""Multi-head requests computed by one call of the native kernel: their results, and which take another path."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
import random_layers as make
import torch
from bits import assert_same_bits
from direct_layers import ARCHITECTURES, Layers, assert_near, exact, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.layers import direct, product
from attnserve_server.layers.specification import Rotary
from attnserve_server.native.dtypes import NATIVE_FROM_TORCH
from attnserve_server.native.library import Library, Team, available

pytestmark = pytest.mark.skipif(
    not available() and "REQUIRE_NATIVE" not in os.environ, reason="there is no native kernel here"
)

EACH = pytest.mark.parametrize("name", ARCHITECTURES)
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=4)


@pytest.fixture(scope="module", autouse=True)
def every_dtype() -> Iterator[None]:
    """The library multiplies bfloat16 on all processors, also where others are faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product, "is_native", lambda dtype, products: products is not None and dtype in NATIVE_FROM_TORCH)
        yield


@pytest.fixture(scope="module")
def layers(every_dtype: None) -> Iterator[dict[tuple[str, int], Layers]]:
    """By instruction set and threads. Teams are patient: every member that should compute does."""
    before, opened = torch.get_num_threads(), {}
    for instructions in available():
        for threads in (1, 2):
            device = CpuDevice(threads, 0, Library(instructions))
            if device._team is not None:
                device._team.close()
                device._team = Team(1, patient=True)
            opened[instructions, threads] = Layers(device)
    yield opened
    for each in opened.values():
        each.device.close()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def best(layers: dict[tuple[str, int], Layers]) -> Layers:
    return layers[available()[0], 2]


@pytest.mark.parametrize("instructions", available() or ["none"])
@EACH
@settings(max_examples=max(10, settings().max_examples // 8))
@given(lengths=LENGTHS, seed=st.integers(0, 99), shift=st.integers(0, 70))
def test_it_is_the_layer(
    layers: dict[tuple[str, int], Layers], instructions: str, name: str, lengths: list[int], seed: int, shift: int
) -> None:
    """Sequences packed, padded and each by itself, wherever they were received: the same bits three times, equal to
    those of the tensor path.
    """
    own = layers[instructions, 1]
    sequences = [rows_of(name, length, seed=seed + n) for n, length in enumerate(lengths)]
    expected = np.concatenate(
        [exact(name, each) if len(each) else each[:, :0] for each in sequences if len(each)]
        or [np.zeros((0, ARCHITECTURES[name].outputs))]
    )
    packed = own.read(name, np.concatenate(sequences), shift, lengths=lengths)
    assert (packed.received is not None) == (sum(lengths) > 0)
    (found,) = own.outputs(packed)
    assert_near(found, expected)
    padded = np.full((len(lengths), max(lengths), ARCHITECTURES[name].inputs), np.nan, found.dtype)
    for n, each in enumerate(sequences):
        padded[n, : len(each)] = each
    (of_padded,) = own.outputs(own.read(name, padded, shift, lengths=lengths))
    assert not any(of_padded[n, length:].any() for n, length in enumerate(lengths))
    assert_same_bits(np.concatenate([of_padded[n, :length] for n, length in enumerate(lengths)]), found)
    alone = [own.outputs(own.read(name, each))[0] for each in sequences]
    assert_same_bits(np.concatenate(alone), found)
    if packed.received is not None:
        assert_same_bits(own.outputs(packed.on_tensors())[0], found)


@EACH
@settings(max_examples=max(8, settings().max_examples // 12))
@given(drawn=st.lists(st.tuples(LENGTHS.filter(any), st.integers(0, 99)), min_size=2, max_size=6))
def test_batches_change_nothing(layers: dict[tuple[str, int], Layers], name: str, drawn: Any) -> None:
    """Alone and together, in either order, with one thread and with two."""
    first = layers[available()[0], 1]
    alone = [first.outputs(first.read(name, rows_of(name, sum(n), seed=seed), lengths=n))[0] for n, seed in drawn]
    for threads in (1, 2):
        own = layers[available()[0], threads]
        requests = [own.read(name, rows_of(name, sum(n), seed=seed), 3 * seed, lengths=n) for n, seed in drawn]
        for found, expected in zip(own.outputs(*requests), alone, strict=True):
            assert_same_bits(found, expected)
        for found, expected in zip(reversed(own.outputs(*requests[::-1])), alone, strict=True):
            assert_same_bits(found, expected)


def test_work_that_is_divided_among_threads(layers: dict[tuple[str, int], Layers]) -> None:
    """With rows enough for both threads, and for several units of each."""
    lengths = [300, 1, 16, 77, 129]
    found = []
    for threads in (1, 2):
        own = layers[available()[0], threads]
        requests = [own.read("wide", rows_of("wide", length, seed=length)) for length in lengths]
        found.append(own.outputs(*requests))
    for length, one, two in zip(lengths, *found, strict=True):
        assert_same_bits(one, two)
        assert_near(one, exact("wide", rows_of("wide", length, seed=length)))


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"causal": False}, {"causal": False}),
        ({"causal": True}, {}),
        ({"window": (2, 3)}, {"window": (2, 3)}),
        ({"causal": False, "window": (1, 1)}, {"causal": False, "window": (1, 1)}),
    ],
    ids=str,
)
def test_who_attends_whom(best: Layers, options: Any, changes: Any) -> None:
    """As the request says, otherwise as the layer's default; requests that differ in it do not share a call."""
    rows = rows_of("causal", 9)
    request = best.read("causal", rows, **options)
    assert request.received is not None
    assert_near(best.outputs(request)[0], exact("causal", rows, **changes))
    assert (request.group == best.read("causal", rows).group) == (not changes)


def test_masks_beyond_all_bounds_are_not_remembered(best: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MOST_VARIANTS", 3)
    rows = rows_of("causal", 5)
    loaded: Any = best.get("causal")
    for left in range(6):
        assert best.read("causal", rows, window=(left, 0)).received is not None
        assert len(loaded.layer._direct._variants) <= 3
    assert_near(best.outputs(best.read("causal", rows, window=(0, 0)))[0], exact("causal", rows, window=(0, 0)))


ROWS: Final = rows_of("causal", 4)


@pytest.mark.parametrize(
    "options",
    [
        {"context": ROWS},
        {"mask": np.ones((1, 1, 4, 4), bool)},
        {"bias": np.zeros((1, 1, 4, 4), np.float32)},
        {"return_lse": True},
        {"return_scores": "weights"},
        {"query_offset": [2]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_asks_for_more_is_computed_on_tensors(best: Layers, options: Any) -> None:
    """With the same products, and scores separately by the same kernel: the same bits where it means the same."""
    request, plain = best.read("causal", ROWS, causal=True, **options), best.read("causal", ROWS)
    assert request.received is None
    assert plain.received is not None
    assert request.group != plain.group
    if options.keys().isdisjoint(("context", "query_offset", "return_scores")):
        assert_same_bits(best.outputs(request)[0], best.outputs(plain)[0])


def test_another_dtype_is_computed_on_tensors(best: Layers) -> None:
    """Than the layer's."""
    assert best.read("causal", ROWS.astype(np.float64)).received is None
    assert best.read("causal", ROWS.astype(np.float16)).received is None
    half = rows_of("alibi, float16", 4)
    assert best.read("alibi, float16", half).received is not None
    for other in (np.float32, ml_dtypes.bfloat16):
        assert best.read("alibi, float16", half.astype(other)).received is None


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"rotary": Rotary(width=8, base=1e4)}, "float32"),
        ({"outputs": 20}, "float32"),
        ({"inputs": 40, "contexts": 40}, "float32"),
        ({"value_dim": 7}, "float32"),
        ({"contexts": 64}, "float32"),
        ({}, "bfloat16"),
    ],
    ids=str,
)
def test_layers_that_are_computed_on_tensors(best: Layers, changes: Any, dtype: make.Dtype) -> None:
    """Among others, widths that are not a whole number of panels: padding does not appear in requests and replies."""
    architecture = replace(ARCHITECTURES["causal"], **changes)
    layer = make.layer_of(architecture, make.random_parameters(architecture, 0, dtype), best.device, dtype)
    application = best.read("causal", ROWS).application
    assert layer.plan(application, [4]) is None


def test_without_the_kernel_all_is_computed_on_tensors() -> None:
    device = CpuDevice(1, 0, None)
    own = Layers(device)
    request = own.read("causal", ROWS)
    assert request.received is None
    assert_near(own.outputs(request)[0], exact("causal", ROWS))
    device.close()


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_what_is_not_finite_is_computed_once_more_alone(best: Layers, value: float) -> None:
    """A late token of a causal sequence: what comes before it is as it would be without it, and the other requests keep
    the same bits.
    """
    rows = [rows_of("causal", 12, seed=n) for n in range(3)]
    before = best.outputs(*(best.read("causal", each) for each in rows))
    rows[1][7, 3] = value
    requests = [best.read("causal", each) for each in rows]
    batch = requests[0].run_batch(best.device, requests)
    assert batch.again.keys() == {1}
    (again,) = batch.again.values()
    assert again.group != requests[1].group
    assert again.extent.cost == requests[1].extent.cost
    found = best.outputs(*requests)
    assert_same_bits(found[0], before[0])
    assert_same_bits(found[2], before[2])
    assert_near(found[1][:7], before[1][:7])
    assert not np.isfinite(found[1][7:]).any() or value == 3e38


def test_one_of_several_sequences_that_is_not_finite(best: Layers) -> None:
    """Its request is rerun, whichever of its sequences it was."""
    rows = rows_of("causal", 9)
    lengths = [2, 0, 4, 3]
    first = best.read("causal", rows_of("causal", 5, seed=1), lengths=[3, 2])
    expected = best.outputs(best.read("causal", rows, lengths=lengths))[0]
    rows[8] = np.inf
    batch = first.run_batch(best.device, [first, best.read("causal", rows, lengths=lengths), first])
    assert batch.again.keys() == {1}
    found = best.outputs(best.read("causal", rows, lengths=lengths))[0]
    assert_near(found[:8], expected[:8])
    assert np.isnan(found[8]).all()


def test_calls_are_counted(best: Layers) -> None:
    """One per sequence, as everywhere."""
    best.device.take_kernel_calls()
    requests = [best.read("causal", ROWS), best.read("causal", ROWS, lengths=[1, 0, 3])]
    assert sum(requests[0].run_batch(best.device, requests).kernel_calls.values()) == 3


def test_a_request_keeps_its_message_and_its_layer(best: Layers) -> None:
    """And neither outlives it, even without the garbage collector."""
    own = Layers(best.device)
    expected = best.outputs(best.read("causal", ROWS))[0]
    request = own.read("causal", ROWS)
    layer = weakref.ref(own.get("causal").layer)
    gc.disable()
    try:
        del own
        assert_same_bits(best.outputs(request)[0], expected)
        assert layer() is not None
        del request
        assert layer() is None
    finally:
        gc.enable()
