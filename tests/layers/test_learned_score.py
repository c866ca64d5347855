"""Layers of one head with an additive or general score, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import random_layers as make
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.layers.layer import LayerInput
from attnserve_server.layers.options import LayerOptions
from attnserve_server.layers.specification import Dtype, LearnedScore

TOLERANCES = {"float64": 1e-12, "float32": 5e-6, "float16": 1e-2, "bfloat16": 6e-2}


@pytest.fixture(scope="module")
def device(devices: dict[int, CpuDevice]) -> CpuDevice:
    return devices[2]


def expected(architecture: LearnedScore, parameters: make.Parameters, request: LayerInput) -> oracle.Expected:
    """The oracle's result, for values projected in NumPy float64."""
    arrays, options = make.doubles(parameters), request.options
    context = (request.input if request.context is None else request.context).double().numpy()
    kv_lengths = request.lengths if request.context_lengths is None else request.context_lengths
    values = context
    if architecture.value:
        values = context @ arrays["value.weight"].T + arrays.get("value.bias", 0.0)
    score: oracle.Additive | oracle.General
    if architecture.score == "additive":
        score = oracle.Additive(
            arrays["query.weight"], arrays["key.weight"], arrays.get("bias"), arrays.get("score.weight")
        )
    else:
        score = oracle.General(arrays["score.weight"])
    offsets = request.offsets
    if offsets is None and options.bottom_right:
        offsets = [s - n for n, s in zip(request.lengths, kv_lengths, strict=True)]
    return oracle.attend(
        request.input.double().numpy()[:, None],
        context[:, None],
        values[:, None],
        score=score,
        scale=architecture.scale,
        causal=architecture.causal if options.causal is None else options.causal,
        query_offset=offsets,
        window=architecture.window if options.window is None else options.window,
        mask=None if request.mask is None else request.mask.numpy(),
        query_lengths=request.lengths,
        kv_lengths=kv_lengths,
        layout="packed",
    )


def assert_matches(architecture: LearnedScore, dtype: Dtype, device: CpuDevice, *requests: LayerInput) -> None:
    """Asserts that a layer of random weights matches `expected` for requests that run together."""
    parameters = make.random_parameters(architecture, 1, dtype)
    replies = make.run(make.layer_of(architecture, parameters, device, dtype), *requests)
    for request, reply in zip(requests, replies, strict=True):
        wanted, bound = expected(architecture, parameters, request), TOLERANCES[dtype]
        assert reply.output.dtype == make.torch_dtype(dtype)
        np.testing.assert_allclose(reply.output.double().numpy(), wanted.output[:, 0], rtol=0, atol=bound)
        if request.options.return_lse:
            np.testing.assert_allclose(reply.lse.numpy(), wanted.lse, rtol=0, atol=bound)
        stage = request.options.return_scores
        if stage is not None:
            scores = getattr(wanted, stage)
            scores = scores[0] if request.options.average_scores else scores
            np.testing.assert_allclose(reply.scores.double().numpy(), scores, rtol=0, atol=bound)


@st.composite
def architectures(draw: st.DrawFn) -> LearnedScore:
    inputs = draw(st.sampled_from([6, 16]))
    contexts = draw(st.sampled_from([inputs, 9]))
    value = draw(st.booleans())
    common: dict[str, Any] = {
        "inputs": inputs,
        "contexts": contexts,
        "outputs": draw(st.sampled_from([5, 32])) if value else contexts,
        "value": value,
        "value_bias": value and draw(st.booleans()),
        "causal": draw(st.booleans()),
        "window": draw(st.sampled_from([(-1, -1), (2, 1)])),
        "scale": draw(st.sampled_from([None, 0.5])),
    }
    if draw(st.booleans()):
        return LearnedScore(score="general", **common)
    optional = {name: draw(st.booleans()) for name in ("bias", "score_weight")}
    return LearnedScore(score="additive", units=draw(st.sampled_from([1, 7, 16])), **common, **optional)


@st.composite
def requests(draw: st.DrawFn, architecture: LearnedScore, dtype: Dtype) -> LayerInput:
    lengths = draw(st.lists(st.integers(0, 7), max_size=3))
    fields: dict[str, Any] = {}
    kv_lengths, seed = lengths, draw(st.integers(0, 1 << 16))
    if architecture.inputs != architecture.contexts or draw(st.booleans()):
        kv_lengths = [draw(st.integers(0, 7)) for _ in lengths]
        fields["context"] = make.random_rows(sum(kv_lengths), architecture.contexts, seed + 1, dtype)
        fields["context_lengths"] = kv_lengths
    if draw(st.booleans()):
        shape = (len(lengths), 1, max(lengths, default=0), max(kv_lengths, default=0))
        fields["mask"] = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.7
    stage = draw(st.sampled_from([None, "raw", "masked", "weights"]))
    fields["options"] = LayerOptions(
        causal=draw(st.sampled_from([None, True, False])),
        bottom_right=draw(st.booleans()),
        return_lse=draw(st.booleans()),
        return_scores=stage,
        average_scores=stage is not None and draw(st.booleans()),
    )
    rows = make.random_rows(sum(lengths), architecture.inputs, seed, dtype)
    return LayerInput(input=rows, lengths=lengths, **fields)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@given(data=st.data())
def test_everything_at_random(device: CpuDevice, dtype: Dtype, data: st.DataObject) -> None:
    architecture = data.draw(architectures())
    drawn = data.draw(st.lists(requests(architecture, dtype), min_size=1, max_size=3))
    assert_matches(architecture, dtype, device, *drawn)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("score", ["additive", "general"])
def test_half_precisions(device: CpuDevice, dtype: Dtype, score: Any) -> None:
    units = 24 if score == "additive" else 0
    architecture = LearnedScore(
        score=score, inputs=32, contexts=32, outputs=16, units=units, bias=True, value=True, scale=0.3
    )
    assert_matches(architecture, dtype, device, *(make.packed(make.random_rows(n, 32, n, dtype)) for n in (9, 30, 1)))


def test_a_decoders_state_attends_to_an_encoders_annotations(device: CpuDevice) -> None:
    """Bahdanau et al. 2015, section 3.1: one state, annotations of another width, which are themselves the values."""
    architecture = LearnedScore(score="additive", inputs=100, contexts=200, outputs=200, units=64)
    context = make.random_rows(50, 200, 1)
    options = LayerOptions(return_scores="weights")
    state = LayerInput(
        input=make.random_rows(1, 100, 0), lengths=[1], context=context, context_lengths=[50], options=options
    )
    assert_matches(architecture, "float32", device, state)
