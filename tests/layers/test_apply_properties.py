"""Properties of layers whatever their weights, over the wire: order, causality, and bits independent of the batch."""

from __future__ import annotations

import random
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from bits import assert_same_bits, assert_same_results
from checkpoints import CHECKPOINTS, DTYPES, PLAIN, VOCABULARY
from conftest import Server
from numpy.typing import NDArray
from occupied import Occupied

from attnserve import Client, LayerResult, _dtypes

TOLERANCE = 1e-11
WIDTHS = {name: (each.width, each.context_width) for name, each in CHECKPOINTS.items()} | {
    name: (24, 10 if name in ("single", "additive", "general") else 0) for name in PLAIN
}
"""The widths of each layer's inputs (0: token ids) and of the context that it needs (0: none)."""

Array = NDArray[Any]


def rows(rng: np.random.Generator, width: int, *shape: int) -> Array:
    return rng.standard_normal((*shape, width)) if width else rng.integers(VOCABULARY, size=shape)


def near(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["attention", "original/encoder_self", "encoder/relu/post", "encoder/stack"])
def test_permuting_inputs_permutes_outputs(layer_client: Client, name: str) -> None:
    """For self-attention without positions."""
    rng = np.random.default_rng(1)
    x, order = rows(rng, WIDTHS[name][0], 2, 9), rng.permutation(9)
    near(layer_client.apply(name, x[:, order]).output, layer_client.apply(name, x).output[:, order])


@pytest.mark.parametrize("name", [name for name, (_, context_width) in WIDTHS.items() if context_width])
def test_the_order_of_the_context_changes_nothing(layer_client: Client, name: str) -> None:
    rng = np.random.default_rng(2)
    width, context_width = WIDTHS[name]
    x, z, order = rows(rng, width, 2, 5), rows(rng, context_width, 2, 9), rng.permutation(9)
    found, expected = (layer_client.apply(name, x, context=each).output for each in (z[:, order], z))
    near(found, expected)


def test_positions_are_what_makes_order_count(layer_client: Client) -> None:
    """Shows that the two properties above are not due to weights that do nothing."""
    rng = np.random.default_rng(3)
    x = rows(rng, 24, 9)
    found = layer_client.apply("rotary", x[::-1].copy()).output[::-1]
    assert np.abs(found - layer_client.apply("rotary", x).output).max() > 1e-2
    ids = rows(rng, 0, 9)
    found = layer_client.apply("bert", ids[::-1].copy()).output[::-1]
    assert np.abs(found - layer_client.apply("bert", ids).output).max() > 1e-2


@pytest.mark.parametrize(
    "name",
    ["original/decoder_self", "alibi", "gpt2", "llama", "decoder/relu/post", "decoder/gelu/pre", "decoder/stack"],
)
def test_no_row_depends_on_later_ones(layer_client: Client, name: str) -> None:
    """In causal layers other inputs, even NaN, leave the rows before them unchanged."""
    rng = np.random.default_rng(4)
    width, context_width = WIDTHS[name]
    x = rows(rng, width, 11)
    options: dict[str, Any] = {"context": rows(rng, context_width, 6)} if context_width else {}
    whole = layer_client.apply(name, x, **options).output
    for changed in (1, 5, 10):
        other = x.copy()
        other[changed:] = rows(rng, width, 11 - changed)
        found = layer_client.apply(name, other, **options).output
        near(found[:changed], whole[:changed])
        assert (np.abs(found - whole).max(axis=-1)[changed:] > 1e-3).any()
        if width:
            other[changed:] = np.nan
            near(layer_client.apply(name, other, **options).output[:changed], whole[:changed])


def questions(seed: int) -> list[tuple[str, Array, dict[str, Any]]]:
    """Every layer in every dtype, padded or packed, with lengths of its own."""
    rng = np.random.default_rng(seed)
    asked = []
    for name, (width, context_width) in WIDTHS.items():
        for dtype in DTYPES:
            lengths, context_lengths = rng.integers(0, 13, 3), rng.integers(0, 13, 3)
            options: dict[str, Any] = {"lengths": lengths, "priority": int(rng.integers(-2, 3))}
            packed = bool(rng.integers(2))
            numpy_dtype = next(each for each in _dtypes.NUMPY.values() if each.name == dtype)
            x = rows(rng, width, *([lengths.sum()] if packed else [3, lengths.max()]))
            if context_width:
                z = rows(rng, context_width, *([context_lengths.sum()] if packed else [3, context_lengths.max()]))
                options |= {"context": z.astype(numpy_dtype), "context_lengths": context_lengths}
            if name in PLAIN or "attention" in name or "original" in name:
                options |= {"return_lse": True, "return_scores": rng.choice(["raw", "capped", "masked", "weights"])}
            suffix = "" if dtype == "float64" else f"/{dtype}"
            asked.append((name + suffix, x.astype(numpy_dtype) if width else x, options))
    return asked


@pytest.mark.parametrize("seed", [1, 2])
def test_many_callers_at_once(layer_client: Client, layer_server: Server, seed: int) -> None:
    """Each caller gets its own reply, with the bits it has alone; several requests to each layer share its batches."""
    asked = [question for part in range(4) for question in questions(100 * seed + part)]
    alone = [layer_client.apply(name, x, **options) for name, x, options in asked]
    assert {result.batch_size for result in alone} == {1}

    order = list(range(len(asked)))
    random.Random(seed).shuffle(order)
    callers = 3
    with Client(layer_server.address) as another:

        def call(caller: int) -> list[tuple[int, Future[LayerResult[Array]]]]:
            client = another if caller == 0 else layer_client
            own = order[caller::callers]
            return [(n, client.submit_apply(asked[n][0], asked[n][1], timeout=None, **asked[n][2])) for n in own]

        with Occupied(layer_server) as device, ThreadPoolExecutor(callers) as pool:
            futures = [each for part in pool.map(call, range(callers)) for each in part]
            device.until_waiting(len(asked))
        sizes = []
        for n, future in futures:
            result = future.result()
            assert_same_results(result, alone[n])
            sizes.append(result.batch_size)
    assert max(sizes) >= 3
    assert sum(size > 1 for size in sizes) > len(sizes) // 2


def test_a_request_for_many_sequences_is_as_each_alone(layer_client: Client) -> None:
    """One call of ragged sequences and one call per sequence: either kind of batch gives the same bits."""
    rng = np.random.default_rng(6)
    lengths = [int(length) for length in rng.integers(1, 33, 40)]
    ids = rows(rng, 0, sum(lengths))
    whole = layer_client.apply("bert/float32", ids, lengths=lengths)
    parts = np.split(ids, np.cumsum(lengths)[:-1])
    futures = [layer_client.submit_apply("bert/float32", part) for part in parts]
    assert_same_bits(np.concatenate([future.result().output for future in futures]), whole.output)
