"""Steps of decoders over caches in one call of the native library: the bits of block by block, and what it leaves."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import random_layers as make
import torch
from bits import assert_same_bits
from decoding import Decoding, Part, decoder, random_decoder
from garbage import no_tensors_in_cycles
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.layers.decoder import MOST_TOKENS
from attnserve_server.layers.specification import Dtype, Transformer
from attnserve_server.layers.transformer import TransformerLayer
from attnserve_server.native.library import available

Devices = dict[int, CpuDevice]
NATIVE: tuple[Dtype, ...] = ("float32", "float16")
"""The dtypes that the library multiplies on every processor."""

pytestmark = pytest.mark.skipif(not available(), reason="there is no native library here")


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert_same_bits(found.numpy(), expected.numpy())


def grouped(random: Random, parts: list[Part]) -> list[list[Part]]:
    """Parts as requests of up to three."""
    requests, rest = [], list(parts)
    while rest:
        count = random.randint(1, 3)
        requests.append(rest[:count])
        rest = rest[count:]
    return requests


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 30))
def test_one_call_has_the_bits_of_all_other_ways(devices: Devices, seed: int) -> None:
    """Of the same batch block by block, and of each sequence alone: with chunks of any size, forks and shared pages."""
    random = Random(seed)
    torch.manual_seed(seed)
    architecture, dtype, page_tokens = random_decoder(random), random.choice(NATIVE), random.choice((1, 3, 5, 16))
    width, device = architecture.block.self_attention.inputs, devices[random.choice((1, 2))]
    ways = [Decoding(device, architecture, dtype, page_tokens) for _ in range(3)]
    caches = [[way.create() for way in ways] for _ in range(random.choice((1, 2, 4)))]
    for _ in range(random.randint(2, 5)):
        if random.random() < 0.5:
            source = random.choice(caches)
            caches.append([way.fork(cache) for way, cache in zip(ways, source, strict=True)])
        chosen = random.sample(caches, random.randint(1, len(caches)))
        lengths = [random.choice((0, 1, 1, 1, 2, 5, MOST_TOKENS, 20)) for _ in chosen]
        rows = [make.random_rows(length, width, random.randrange(1 << 20), dtype) for length in lengths]
        together, blocks, _ = (
            grouped(Random(seed), [Part(each[n], own) for each, own in zip(chosen, rows, strict=True)])
            for n in range(3)
        )
        found = ways[0].run(*together)
        by_blocks = ways[1].run(*blocks, by_blocks=True)
        for n, (each, own) in enumerate(zip(chosen, rows, strict=True)):
            same(found[n], by_blocks[n])
            if len(own):
                same(found[n], ways[2].run([Part(each[2], own)], by_blocks=random.random() < 0.3)[0])
        for one, other, _ in caches:
            assert ways[0].finite(one) == ways[1].finite(other)
    assert not ways[1].stepped
    assert all(succeeded for _, succeeded in ways[0].stepped)


@pytest.mark.parametrize("projected", [True, False])
@pytest.mark.parametrize("dtype", NATIVE)
def test_chunks_are_the_whole(devices: Devices, tensor_devices: Devices, dtype: Dtype, projected: bool) -> None:
    """That of the same parameters in float64, by torch. What heads give may be projected, or be added as it is."""
    architecture = decoder(blocks=3, output=projected, output_bias=projected)
    rows = make.random_rows(40, 32, 3, dtype)
    exact = make.random_parameters(architecture, 1, dtype)
    doubles = {name: tensor.double() for name, tensor in exact.items()}
    layer = make.layer_of(architecture, doubles, tensor_devices[2], "float64")
    (expected,) = make.run(layer, make.packed(rows.double()))
    decoding = Decoding(devices[2], architecture, dtype)
    cache = decoding.create()
    found = torch.cat([decoding.run([Part(cache, part)])[0] for part in torch.split(rows, [1, 16, 3, 1, 1, 13, 5])])
    near = {"float32": 1e-5, "float16": 2e-2}[dtype] * float(expected.output.abs().max())
    torch.testing.assert_close(found.double(), expected.output, rtol=0, atol=near)
    assert decoding.stepped == [(length, True) for length in (1, 16, 3, 1, 1, 13, 5)]


def test_a_request_that_needs_more_is_computed_apart(devices: Devices) -> None:
    """With many rows in a sequence, or a mask: the others still take one call."""
    decoding = Decoding(devices[2], decoder(), "float32")
    caches = [decoding.create() for _ in range(4)]
    rows = [make.random_rows(length, 32, length, "float32") for length in (MOST_TOKENS, MOST_TOKENS + 1, 2, 3)]
    mask = torch.ones(1, 1, 1, 2, dtype=torch.bool)
    masks = [None, None, mask, None]
    parts = [Part(*each) for each in zip(caches, rows, masks, strict=True)]
    together = decoding.run([parts[0]], [parts[1], Part(decoding.create(), rows[3])], [parts[2]], [parts[3]])
    assert decoding.stepped == [(MOST_TOKENS + 3, True)]
    for place, part in ((0, parts[0]), (1, parts[1]), (3, parts[2]), (4, parts[3])):
        same(together[place], decoding.run([part._replace(cache=decoding.create())], by_blocks=True)[0])


@pytest.mark.parametrize(
    ("architecture", "dtype", "storage"),
    [
        (decoder(), "float32", "float16"),
        (decoder(), "float64", "float32"),
        (decoder(width=24), "float32", None),
        (decoder(value_dim=9), "float32", None),
    ],
    ids=["converted", "float64", "width", "value_dim"],
)
def test_what_the_library_does_not_step(
    devices: Devices, architecture: Transformer, dtype: Dtype, storage: Any
) -> None:
    decoding = Decoding(devices[1], architecture, dtype, storage=storage)
    width = architecture.block.self_attention.inputs
    decoding.run([Part(decoding.create(), make.random_rows(1, width, 0, dtype))])
    assert decoding.stepped == []


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_costs_the_others_nothing(devices: Devices, bad: float) -> None:
    """A request that has it is computed apart, as long as it is in its caches; a fork's copy of a page is made anew."""
    decoding, clean = (Decoding(devices[2], decoder(), "float32") for _ in range(2))
    before = make.random_rows(3, 32, 1, "float32")
    both = []
    for each in (decoding, clean):
        root = each.create()
        each.run([Part(root, before)])
        both.append([root, each.fork(root), each.create()])
    rows = [make.random_rows(length, 32, 7 + length, "float32") for length in (2, 4, 1)]
    spoilt = rows[1].clone()
    spoilt[2, 5] = bad
    decoding.stepped.clear()
    given = [rows[0], spoilt, rows[2]]
    found = decoding.run(*([Part(cache, own)] for cache, own in zip(both[0], given, strict=True)))
    expected = clean.run(*([Part(cache, own)] for cache, own in zip(both[1], rows, strict=True)))
    assert decoding.stepped == [(7, False), (3, True)]
    same(found[0], expected[0])
    same(found[2], expected[2])
    torch.testing.assert_close(found[1][:2], expected[1][:2], rtol=0, atol=1e-5)
    assert not found[1][2:].isfinite().all(1).any()
    assert [any(decoding.finite(cache)) for cache in both[0]] == [True, False, True]
    assert [all(decoding.finite(cache)) for cache in both[0]] == [True, False, True]
    step = [make.random_rows(1, 32, 20 + n, "float32") for n in range(3)]
    found = decoding.run(*([Part(cache, own)] for cache, own in zip(both[0], step, strict=True)))
    expected = clean.run(*([Part(cache, own)] for cache, own in zip(both[1], step, strict=True)))
    same(found[0], expected[0])
    same(found[2], expected[2])
    assert found[1].isnan().all()


def test_a_step_that_fails_leaves_nothing_that_counts_as_finite(devices: Devices) -> None:
    """The page that it wrote to goes on with fewer tokens; what lies behind these may be anything."""
    decoding = Decoding(devices[1], decoder(), "float32")
    cache, first = decoding.create(), make.random_rows(2, 32, 0, "float32")
    decoding.run([Part(cache, first)])
    assert all(decoding.finite(cache))
    steps = decoding.layer._decoder
    assert steps is not None
    compute: Any = steps._compute

    def failing(*arguments: Any) -> torch.Tensor | None:
        compute.step(*arguments)
        raise MemoryError

    steps._compute = SimpleNamespace(step=failing)  # type: ignore[assignment]
    with pytest.raises(MemoryError):
        decoding.run([Part(cache, torch.full((1, 32), torch.nan))])
    steps._compute = compute
    assert cache.lengths == [2, 2]
    assert not any(decoding.finite(cache))
    rest = make.random_rows(3, 32, 1, "float32")
    other = decoding.create()
    decoding.run([Part(other, first)])
    same(decoding.run([Part(cache, rest)])[0], decoding.run([Part(other, rest)])[0])


def test_its_weights_are_freed_with_it(devices: Devices) -> None:
    """At once, without the garbage collector: another layer needs the room."""
    architecture = decoder()
    parameters = make.random_parameters(architecture)
    with no_tensors_in_cycles():
        layer = make.layer_of(architecture, parameters, devices[1])
        assert isinstance(layer, TransformerLayer)
        assert layer._decoder is not None
        del layer
