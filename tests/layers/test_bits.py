"""A reply's bits do not depend on the rest of the batch, on its order, or on threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import random_layers as make
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve_server.devices.cpu import SPLIT_FLOPS, CpuDevice
from attnserve_server.layers import product
from attnserve_server.layers.cost import cost_of
from attnserve_server.layers.layer import Layer, LayerInput
from attnserve_server.layers.options import LayerOptions
from attnserve_server.layers.specification import (
    Activation,
    Architecture,
    Dtype,
    Embedding,
    FeedForward,
    LearnedScore,
    Norm,
    Rotary,
    Transformer,
)

Devices = dict[int, CpuDevice]
EVERY_DTYPE = pytest.mark.parametrize("dtype", make.DTYPES)


NORM = Norm(kind="layer", width=24, epsilon=1e-12)
RMS = Norm(kind="rms", width=33, epsilon=1e-6, bias=False, unit_offset=True)
ARCHITECTURES: dict[str, Architecture] = {
    "plain": make.attention(64, 4, causal=True),
    "odd widths": make.attention(
        33, 2, contexts=17, outputs=5, head_dim=7, value_dim=3, query_bias=False, window=(4, 1)
    ),
    "misaligned values": make.attention(40, 2, head_dim=16, value_dim=8, causal=True, key_bias=False),
    "grouped, rotary": make.attention(
        48, 6, kv_heads=2, head_dim=8, value_dim=8, causal=True, rotary=Rotary(width=6, base=1e4, interleaved=True)
    ),
    "no output projection, alibi": make.attention(
        32, 2, outputs=32, output=False, output_bias=False, alibi=(0.5, 0.25), causal=True
    ),
    "capped": make.attention(32, 4, softcap=3.0),
    "additive": LearnedScore(score="additive", inputs=24, contexts=24, outputs=24, units=13, bias=True),
    "general": LearnedScore(score="general", inputs=20, contexts=20, outputs=12, value=True, value_bias=True),
    "encoder": Transformer(
        blocks=2,
        block=make.block(
            24, 3, 33, norm=NORM, feed_forward=FeedForward(width=24, hidden=33, activation="gelu"), pre_norm=False
        ),
        embedding=Embedding(width=24, vocabulary=50, positions=80, segments=2, norm=NORM),
    ),
    "decoder": Transformer(
        blocks=2,
        block=make.block(32, 4, 48, crossed=True, pre_norm=True),
        embedding=Embedding(width=32, vocabulary=50, scale=32**0.5, sinusoidal=True),
        final_norm=Norm(kind="layer", width=32, epsilon=1e-5),
    ),
    "gated, rotary": Transformer(
        blocks=2,
        block=make.block(
            33,
            4,
            self_attention=make.attention(33, 4, kv_heads=2, head_dim=8, causal=True, rotary=Rotary(width=8, base=1e4)),
            feed_forward=FeedForward(
                width=33, hidden=45, activation="gelu_tanh", gated=True, up_bias=False, down_bias=False
            ),
            norm=RMS,
            pre_norm=True,
        ),
        final_norm=RMS,
    ),
    "whole vectors": Transformer(
        blocks=2,
        block=make.block(
            64,
            1,
            self_attention=make.attention(64, 1, head_dim=64, causal=True, rotary=Rotary(width=64, base=1e4)),
            feed_forward=FeedForward(width=64, hidden=192, activation="gelu", gated=True),
            norm=Norm(kind="rms", width=64, epsilon=1e-6, bias=False),
            pre_norm=True,
        ),
        embedding=Embedding(width=64, vocabulary=50, sinusoidal=True),
        final_norm=Norm(kind="layer", width=64, epsilon=1e-5),
    ),
    "whole vectors, crossed": Transformer(
        blocks=1,
        block=make.block(
            128,
            2,
            crossed=True,
            self_attention=make.attention(
                128, 2, kv_heads=1, head_dim=96, causal=True, rotary=Rotary(width=64, base=1e4, interleaved=True)
            ),
            feed_forward=FeedForward(width=128, hidden=64, activation="gelu_tanh"),
            pre_norm=True,
        ),
    ),
}


def random_request(architecture: Architecture, dtype: Dtype, lengths: list[int], seed: int) -> LayerInput:
    """A request that, depending on the seed, uses optional features of the layer or asks only for its output."""
    total, context_lengths = sum(lengths), [(seed + 3 * n) % 9 for n in range(len(lengths))]
    generator = torch.Generator().manual_seed(seed)
    if not isinstance(architecture, Transformer):
        fields: dict[str, Any] = {}
        if seed % 3 == 0:
            stage = "weights" if seed % 2 else None
            fields["options"] = LayerOptions(return_lse=True, return_scores=stage, average_scores=stage is not None)
        if seed % 4 == 1:
            fields["offsets"] = [(seed + n) % 5 - 2 for n in range(len(lengths))]
        if seed % 2 or architecture.inputs != architecture.contexts:
            fields["context"] = make.random_rows(sum(context_lengths), architecture.contexts, seed + 1, dtype)
            fields["context_lengths"] = context_lengths
        if seed % 5 == 2 and lengths:
            longest = max(lengths), max(fields.get("context_lengths", lengths))
            fields["mask"] = torch.rand(1, 1, *longest, generator=generator) < 0.7
        rows = make.random_rows(total, architecture.inputs, seed, dtype)
        return LayerInput(input=rows, lengths=lengths, **fields)
    fields, embedding = {}, architecture.embedding
    rows = make.random_rows(total, architecture.block.self_attention.inputs, seed, dtype)
    if embedding is not None and embedding.vocabulary:
        rows = torch.randint(embedding.vocabulary, (total,), generator=generator)
        if embedding.segments and seed % 2:
            fields["segments"] = torch.randint(embedding.segments, (total,), generator=generator)
    if seed % 4 == 1:
        fields["offsets"] = [(seed + n) % 5 for n in range(len(lengths))]
    if architecture.block.cross_attention is not None:
        fields["context"] = make.random_rows(
            sum(context_lengths), architecture.block.cross_attention.contexts, seed + 1, dtype
        )
        fields["context_lengths"] = context_lengths
    return LayerInput(input=rows, lengths=lengths, **fields)


def assert_batch_invariant(layers: dict[int, Layer], requests: list[LayerInput]) -> None:
    """Compares requests alone with requests together, with one thread and with two, in either order."""
    alone = [make.run(layers[1], request)[0] for request in requests]
    for threads, layer in layers.items():
        for place, reply in enumerate(make.run(layer, *requests)):
            make.assert_same_replies(reply, alone[place], (threads, place))
        for place, reply in enumerate(reversed(make.run(layer, *requests[::-1]))):
            make.assert_same_replies(reply, alone[place], (threads, place, "reversed"))


def layers_of(architecture: Architecture, devices: Devices, dtype: Dtype) -> dict[int, Layer]:
    parameters = make.random_parameters(architecture, 0, dtype)
    return {threads: make.layer_of(architecture, parameters, device, dtype) for threads, device in devices.items()}


REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, 40), max_size=4), st.integers(0, 1 << 20)), min_size=1, max_size=6
)


@EVERY_DTYPE
@pytest.mark.parametrize("name", ARCHITECTURES)
@settings(max_examples=max(8, settings().max_examples // 12))
@given(drawn=REQUESTS)
def test_random_batches(devices: Devices, name: str, dtype: Dtype, drawn: list[tuple[list[int], int]]) -> None:
    architecture = ARCHITECTURES[name]
    requests = [random_request(architecture, dtype, lengths, seed) for lengths, seed in drawn]
    assert_batch_invariant(layers_of(architecture, devices, dtype), requests)


@pytest.mark.parametrize("name", ARCHITECTURES)
@settings(max_examples=max(4, settings().max_examples // 24))
@given(drawn=REQUESTS)
def test_random_batches_where_no_weight_is_packed(
    tensor_devices: Devices, name: str, drawn: list[tuple[list[int], int]]
) -> None:
    """As without the native library, on processors for which oneDNN's products are not used."""
    architecture = ARCHITECTURES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product, "packs", lambda dtype: False)
        layers = layers_of(architecture, tensor_devices, "float32")
    requests = [random_request(architecture, "float32", lengths, seed) for lengths, seed in drawn]
    assert_batch_invariant(layers, requests)


@EVERY_DTYPE
@pytest.mark.parametrize("lengths", [[[700]], [[250], [250]], [[3], [600], [1, 1], [64]]], ids=str)
def test_work_that_is_divided_among_threads(devices: Devices, dtype: Dtype, lengths: list[list[int]]) -> None:
    """Wide enough that even one thread computes it in several ranges of rows, and two threads in different ones."""
    feed_forward = FeedForward(width=128, hidden=200, activation="gelu")
    architecture = Transformer(blocks=1, block=make.block(128, 4, feed_forward=feed_forward))
    layers = layers_of(architecture, devices, dtype)
    requests = [make.packed(*(make.random_rows(length, 128, length, dtype) for length in each)) for each in lengths]
    small = make.packed(make.random_rows(5, 128, 0, dtype))
    assert cost_of(architecture, [5], None).flops < SPLIT_FLOPS < cost_of(architecture, [700], None).flops
    assert_batch_invariant(layers, [small, *requests, small])


@EVERY_DTYPE
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_single_rows(devices: Devices, activation: Activation, gated: bool, dtype: Dtype) -> None:
    """For what is contiguous, as any part of a single row is, torch has other code."""
    feed_forward = FeedForward(width=64, hidden=2048, activation=activation, gated=gated)
    architecture = Transformer(blocks=1, block=make.block(64, 2, feed_forward=feed_forward))
    rows = [make.packed(make.random_rows(length, 64, length, dtype)) for length in (1, 3, 1, 2)]
    assert_batch_invariant(layers_of(architecture, devices, dtype), rows)


@EVERY_DTYPE
@pytest.mark.parametrize("name", ["plain", "encoder"])
def test_what_is_not_finite_stays_where_it_is(devices: Devices, name: str, dtype: Dtype) -> None:
    """A request of NaNs beside others, even of the same length."""
    architecture = ARCHITECTURES[name]
    layers = layers_of(architecture, devices, dtype)
    if name == "encoder":  # its inputs are ids, so a row of its table is NaN
        parameters = make.random_parameters(architecture, 0, dtype)
        parameters["embedding.token.weight"][7] = torch.nan
        layers = {n: make.layer_of(architecture, parameters, device, dtype) for n, device in devices.items()}
        requests = [LayerInput(input=torch.full((9,), token), lengths=[9]) for token in (6, 7, 8)]
    else:
        requests = [make.packed(make.random_rows(9, 64, seed, dtype)) for seed in range(3)]
        requests[1].input[:] = torch.nan
    assert_batch_invariant(layers, requests)
    finite = [bool(reply.output.isfinite().all()) for reply in make.run(layers[2], *requests)]
    assert finite == [True, False, True]


@EVERY_DTYPE
def test_what_is_not_finite_among_work_that_is_divided(devices: Devices, dtype: Dtype) -> None:
    """A NaN late in one of several causal sequences: what comes before it, and the other sequences, do not change."""
    architecture = make.attention(128, 4, causal=True)
    layers = layers_of(architecture, devices, dtype)
    clean = [make.packed(make.random_rows(300, 128, seed, dtype)) for seed in range(3)]
    spoilt = [clean[0], replace(clean[1], input=clean[1].input.clone()), clean[2]]
    spoilt[1].input[200:] = torch.nan
    assert_batch_invariant(layers, spoilt)
    outputs = [[reply.output for reply in make.run(layers[2], *requests)] for requests in (clean, spoilt)]
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][2], outputs[1][2])
    assert outputs[1][1][200:].isnan().all()
    bound = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-1}[dtype]
    torch.testing.assert_close(outputs[1][1][:200], outputs[0][1][:200], rtol=0, atol=bound)
