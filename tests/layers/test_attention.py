"""Layers of one multi-head attention: against the oracle, torch's own module, and properties of any attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
import random_layers as make
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.layers.cost import cost_of
from attnserve_server.layers.layer import LayerInput
from attnserve_server.layers.options import LayerOptions
from attnserve_server.layers.specification import Attention, Dtype, Rotary

WIDE = 1e-12
TOLERANCES = {"float64": WIDE, "float32": 5e-6, "float16": 2e-2, "bfloat16": 1.5e-1}
"""Against float64 of the same numbers, for outputs of magnitude about 4."""


@pytest.fixture(scope="module")
def device(devices: dict[int, CpuDevice]) -> CpuDevice:
    return devices[2]


def rotated(heads: oracle.Floats, positions: oracle.Floats, rotary: Rotary) -> oracle.Floats:
    """Heads [n, H, D] at these positions, each pair rotated as a complex number."""
    half = rotary.width // 2
    angles = (positions[:, None] + rotary.offset) * rotary.base ** (-2 * np.arange(half) / rotary.width)
    turns = np.exp(1j * angles)[:, None]
    first, second = (
        (slice(0, rotary.width, 2), slice(1, rotary.width, 2))
        if rotary.interleaved
        else (
            slice(0, half),
            slice(half, rotary.width),
        )
    )
    turned = (heads[..., first] + 1j * heads[..., second]) * turns
    result = heads.copy()
    result[..., first], result[..., second] = turned.real, turned.imag
    return result


def expected(architecture: Attention, parameters: make.Parameters, request: LayerInput) -> tuple[oracle.Floats, Any]:
    """The output, and the oracle's result for the attention inside, in NumPy float64."""
    arrays, options = make.doubles(parameters), request.options
    contexts = request.input if request.context is None else request.context
    kv_lengths = request.lengths if request.context_lengths is None else request.context_lengths

    def projected(name: str, rows: torch.Tensor, heads: int) -> oracle.Floats:
        made = rows.double().numpy() @ arrays[f"{name}.weight"].T + arrays.get(f"{name}.bias", 0.0)
        return made.reshape(len(rows), heads, made.shape[1] // heads)

    query = projected("query", request.input, architecture.heads)
    key = projected("key", contexts, architecture.kv_heads)
    value = projected("value", contexts, architecture.kv_heads)
    if architecture.rotary is not None:
        offsets = request.offsets or [0] * len(request.lengths)
        standing = [np.arange(length) + offset for length, offset in zip(request.lengths, offsets, strict=True)]
        query = rotated(query, np.concatenate([np.zeros(0), *standing]), architecture.rotary)
        standing = [np.arange(length) for length in kv_lengths]
        key = rotated(key, np.concatenate([np.zeros(0), *standing]), architecture.rotary)
    causal = architecture.causal if options.causal is None else options.causal
    kept: dict[str, Any] = {
        name: None if tensor is None else tensor.numpy()
        for name, tensor in (("mask", request.mask), ("bias", request.bias))
    }
    offsets = request.offsets
    if offsets is None and options.bottom_right:
        offsets = [s - n for n, s in zip(request.lengths, kv_lengths, strict=True)]
    inside = oracle.attend(
        query,
        key,
        value,
        causal=causal,
        query_offset=offsets,
        window=architecture.window if options.window is None else options.window,
        alibi_slopes=np.array(architecture.alibi) if architecture.alibi else None,
        scale=architecture.scale,
        softcap=architecture.softcap,
        query_lengths=request.lengths,
        kv_lengths=kv_lengths,
        layout="packed",
        **kept,
    )
    output = inside.output.reshape(len(request.input), architecture.heads * architecture.value_dim)
    if architecture.output:
        output = output @ arrays["output.weight"].T + arrays.get("output.bias", 0.0)
    return output, inside


def assert_matches(architecture: Attention, dtype: Dtype, device: CpuDevice, *requests: LayerInput) -> None:
    """Asserts that a layer of random weights matches `expected` for requests that run together."""
    parameters = make.random_parameters(architecture, 1, dtype)
    replies = make.run(make.layer_of(architecture, parameters, device, dtype), *requests)
    for request, reply in zip(requests, replies, strict=True):
        output, inside = expected(architecture, parameters, request)
        bound = TOLERANCES[dtype]
        assert reply.output.dtype == make.torch_dtype(dtype)
        np.testing.assert_allclose(reply.output.double().numpy(), output, rtol=0, atol=bound)
        if request.options.return_lse:
            np.testing.assert_allclose(reply.lse.numpy(), inside.lse, rtol=0, atol=bound)
        stage = request.options.return_scores
        if stage is not None:
            wanted = getattr(inside, stage)
            wanted = wanted.mean(0) if request.options.average_scores else wanted
            np.testing.assert_allclose(reply.scores.double().numpy(), wanted, rtol=bound, atol=bound)


@st.composite
def architectures(draw: st.DrawFn) -> Attention:
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    head_dim, heads = draw(st.sampled_from([4, 6, 16])), kv_heads * group
    inputs = draw(st.sampled_from([8, 11, 32]))
    optional = {name: draw(st.booleans()) for name in ("query_bias", "key_bias", "value_bias", "output", "causal")}
    value_dim = draw(st.sampled_from([head_dim, 5]))
    width = draw(st.sampled_from([2, 4]))
    rotary = Rotary(width=width, interleaved=draw(st.booleans()), offset=draw(st.sampled_from([0, 3])), base=100.0)
    return Attention(
        inputs=inputs,
        contexts=draw(st.sampled_from([inputs, inputs, 7])),
        outputs=draw(st.sampled_from([inputs, 9])) if optional["output"] else heads * value_dim,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        output_bias=optional["output"] and draw(st.booleans()),
        window=draw(st.sampled_from([(-1, -1), (3, 0), (2, 2)])),
        scale=draw(st.sampled_from([None, None, 0.3, -0.2])),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5])),
        alibi=tuple(0.5 ** (head + 1) for head in range(heads)) if draw(st.booleans()) else (),
        rotary=rotary if draw(st.booleans()) else None,
        **optional,
    )


@st.composite
def requests(draw: st.DrawFn, architecture: Attention, dtype: Dtype) -> LayerInput:
    lengths = draw(st.lists(st.integers(0, 9), max_size=4))
    fields: dict[str, Any] = {}
    kv_lengths = lengths
    seed = draw(st.integers(0, 1 << 16))
    if architecture.inputs != architecture.contexts or draw(st.booleans()):
        kv_lengths = [draw(st.integers(0, 9)) for _ in lengths]
        fields["context"] = make.random_rows(sum(kv_lengths), architecture.contexts, seed + 1, dtype)
        fields["context_lengths"] = kv_lengths
    if draw(st.booleans()):
        fields["offsets"] = [draw(st.integers(-2, 5)) for _ in lengths]
    full = (len(lengths), architecture.heads, max(lengths, default=0), max(kv_lengths, default=0))
    generator = torch.Generator().manual_seed(seed)
    for name in ("mask", "bias"):
        if draw(st.booleans()):
            shape = [length if draw(st.booleans()) else 1 for length in full]
            wide = torch.float64 if dtype == "float64" else torch.float32
            drawn = torch.randn(shape, generator=generator, dtype=wide)
            fields[name] = drawn > -0.7 if name == "mask" else drawn
    stage = draw(st.sampled_from([None, *oracle.STAGES]))
    options = LayerOptions(
        causal=draw(st.sampled_from([None, True, False])),
        window=draw(st.sampled_from([None, (-1, -1), (1, 3)])),
        bottom_right=draw(st.booleans()),
        return_lse=draw(st.booleans()),
        return_scores=stage,
        average_scores=stage is not None and draw(st.booleans()),
    )
    rows = make.random_rows(sum(lengths), architecture.inputs, seed, dtype)
    return LayerInput(input=rows, lengths=lengths, options=options, **fields)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@given(data=st.data())
def test_everything_at_random(device: CpuDevice, dtype: Dtype, data: st.DataObject) -> None:
    architecture = data.draw(architectures())
    drawn = data.draw(st.lists(requests(architecture, dtype), min_size=1, max_size=4))
    assert_matches(architecture, dtype, device, *drawn)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rotary", [None, Rotary(width=16, base=1e4)])
def test_half_precisions(device: CpuDevice, dtype: Dtype, rotary: Rotary | None) -> None:
    architecture = make.attention(64, 4, causal=True, rotary=rotary)
    drawn = [make.packed(*(make.random_rows(n, 64, n, dtype) for n in lengths)) for lengths in ((5, 40), (17,), (1, 1))]
    assert_matches(architecture, dtype, device, *drawn)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("numbers", [{"softcap": 1e39}, {"scale": 1e37, "softcap": 1e38}])
def test_scores_beyond_float32(device: CpuDevice, dtype: Dtype, numbers: dict[str, float]) -> None:
    assert_matches(
        make.attention(64, 4, causal=True, **numbers), dtype, device, make.packed(make.random_rows(9, 64, 1, dtype))
    )


def test_work_that_all_threads_share(device: CpuDevice) -> None:
    architecture = make.attention(256, 4, kv_heads=2, causal=True)
    assert_matches(architecture, "float32", device, *(make.packed(make.random_rows(n, 256, n)) for n in (700, 31, 64)))


def test_the_original_transformers_attention(device: CpuDevice) -> None:
    """With h = 8, d_k = d_v = 64 (Vaswani et al. 2017): encoder, decoder, and encoder-decoder attention."""
    own, context = make.random_rows(20, 512, 0), make.random_rows(33, 512, 1)
    for causal, fields in ((False, {}), (True, {}), (False, {"context": context, "context_lengths": [33]})):
        architecture = make.attention(512, 8, causal=causal)
        assert (architecture.heads, architecture.head_dim, architecture.value_dim) == (8, 64, 64)
        assert_matches(architecture, "float32", device, LayerInput(input=own, lengths=[20], **fields))


def test_single_query_attention(device: CpuDevice) -> None:
    """One head, one query over a context of another width, all with biases."""
    architecture = make.attention(24, 1, contexts=40, head_dim=16, value_dim=48)
    contexts = [make.random_rows(length, 40, length) for length in (1, 9, 130)]
    drawn = [
        LayerInput(input=make.random_rows(1, 24, 0), lengths=[1], context=each, context_lengths=[len(each)])
        for each in contexts
    ]
    assert_matches(architecture, "float32", device, *drawn)


def torchs(width: int = 32, heads: int = 4, **options: Any) -> nn.MultiheadAttention:
    """A torch module whose biases are not their initial zeros."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(width, heads, batch_first=True, **options).eval().requires_grad_(False)
    if module.in_proj_bias is not None:
        nn.init.normal_(module.in_proj_bias)
        nn.init.normal_(module.out_proj.bias)
    return module


def layer_like(module: nn.MultiheadAttention, device: CpuDevice) -> Any:
    """The layer with a module's weights."""
    width, biased = module.embed_dim, module.in_proj_bias is not None
    architecture = make.attention(
        width,
        module.num_heads,
        contexts=module.kdim,
        **dict.fromkeys(("query_bias", "key_bias", "value_bias", "output_bias"), biased),
    )
    if module.in_proj_weight is not None:
        weights = list(module.in_proj_weight.chunk(3))
    else:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    parameters = dict(zip(("query.weight", "key.weight", "value.weight"), weights, strict=True))
    parameters["output.weight"] = module.out_proj.weight
    if biased:
        parameters |= dict(zip(("query.bias", "key.bias", "value.bias"), module.in_proj_bias.chunk(3), strict=True))
        parameters["output.bias"] = module.out_proj.bias
    return make.layer_of(architecture, parameters, device)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("masked", ["not", "causal", "mask", "float mask", "padding"])
def test_against_torchs_module(device: CpuDevice, bias: bool, average: bool, masked: str) -> None:
    module = torchs(bias=bias)
    rows, length = torch.randn(3, 11, 32), 11
    theirs: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    options: dict[str, Any] = {"return_scores": "weights", "average_scores": average}
    lengths = [length] * 3
    if masked == "causal":
        theirs = {"attn_mask": torch.ones(length, length, dtype=torch.bool).triu(1)}
        options["causal"] = True
    elif masked == "mask":
        mask = torch.rand(3 * 4, length, length) < 0.6
        mask[..., 0] = True
        theirs, ours = {"attn_mask": ~mask}, {"mask": mask.view(3, 4, length, length)}
    elif masked == "float mask":
        bias_tensor = torch.randn(length, length)
        theirs, ours = {"attn_mask": bias_tensor}, {"bias": bias_tensor[None, None]}
    elif masked == "padding":
        lengths = [11, 4, 7]
        theirs = {"key_padding_mask": torch.arange(length) >= torch.tensor(lengths)[:, None]}
    output, weights = module(rows, rows, rows, need_weights=True, average_attn_weights=average, **theirs)
    inputs = make.packed(*(row[:n] for row, n in zip(rows, lengths, strict=True)), **ours)
    inputs.options = LayerOptions(**options)
    (reply,) = make.run(layer_like(module, device), inputs)
    parts = zip(reply.output.split(lengths), reply.scores.split(lengths, -2), lengths, output, weights, strict=True)
    for own_output, own_weights, n, their_output, their_weights in parts:
        torch.testing.assert_close(own_output, their_output[:n], rtol=0, atol=2e-6)
        torch.testing.assert_close(own_weights, their_weights[..., :n, :], rtol=0, atol=2e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_against_torchs_module_over_contexts_of_another_width(device: CpuDevice, bias: bool) -> None:
    module = torchs(kdim=20, vdim=20, bias=bias)
    rows, context = torch.randn(2, 5, 32), torch.randn(2, 13, 20)
    output, _ = module(rows, context, context, need_weights=False)
    (reply,) = make.run(layer_like(module, device), make.batched(rows, context=context))
    torch.testing.assert_close(reply.output.view(output.shape), output, rtol=0, atol=2e-6)


def test_against_llamas_attention(device: CpuDevice) -> None:
    """Grouped heads and rotary positions, against transformers' own code."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=8, max_position_embeddings=64
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    module = llama.LlamaAttention(config, 0).eval().requires_grad_(False)
    rows = torch.randn(2, 17, 48)
    positions = torch.arange(17)[None] + 5
    angles = llama.LlamaRotaryEmbedding(config)(rows, positions)
    causal = torch.full((17, 17), -torch.inf).triu(1)[None, None]
    theirs, _ = module(rows, position_embeddings=angles, attention_mask=causal)
    architecture = make.attention(
        48,
        6,
        kv_heads=2,
        causal=True,
        rotary=Rotary(width=8, base=1e4, offset=5),
        **dict.fromkeys(("query_bias", "key_bias", "value_bias", "output_bias"), False),
    )
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    parameters = {f"{ours}.weight": getattr(module, name).weight for ours, name in names.items()}
    (reply,) = make.run(make.layer_of(architecture, parameters, device), make.batched(rows))
    torch.testing.assert_close(reply.output.view(theirs.shape), theirs, rtol=0, atol=3e-6)


def test_permuting_inputs_permutes_outputs(device: CpuDevice) -> None:
    architecture = make.attention(64, 4)
    layer = make.layer_of(architecture, make.random_parameters(architecture), device)
    rows, order = make.random_rows(19, 64, 0), torch.randperm(19, generator=torch.Generator().manual_seed(1))
    plain, permuted = make.run(layer, make.packed(rows), make.packed(rows[order]))
    torch.testing.assert_close(permuted.output, plain.output[order], rtol=0, atol=3e-6)
    assert not torch.equal(order, torch.arange(19))


def test_the_order_of_the_context_changes_nothing(device: CpuDevice) -> None:
    architecture = make.attention(64, 4, contexts=40)
    layer = make.layer_of(architecture, make.random_parameters(architecture), device)
    rows, context = make.random_rows(9, 64, 0), make.random_rows(23, 40, 1)
    request = LayerInput(input=rows, lengths=[9], context=context, context_lengths=[23])
    one, other = make.run(layer, request, replace(request, context=context.flip(0)))
    torch.testing.assert_close(one.output, other.output, rtol=0, atol=3e-6)


@pytest.mark.parametrize("poison", [1e3, float("nan"), float("inf")])
def test_causal_rows_do_not_depend_on_later_ones(device: CpuDevice, poison: float) -> None:
    architecture = make.attention(64, 4, causal=True, rotary=Rotary(width=16, base=1e4))
    layer = make.layer_of(architecture, make.random_parameters(architecture), device)
    rows = make.random_rows(21, 64, 0)
    spoilt = rows.clone()
    spoilt[13:] = poison
    one, other = make.run(layer, make.packed(rows), make.packed(spoilt))
    torch.testing.assert_close(one.output[:13], other.output[:13], rtol=0, atol=3e-6)
    assert not torch.isclose(one.output[13:], other.output[13:]).all(1).any()


@settings(max_examples=max(20, settings().max_examples // 5))
@given(lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=4), causal=st.booleans())
def test_flops_are_those_of_the_products(lengths: list[tuple[int, int]], causal: bool) -> None:
    """Counted from shapes: projections of all rows, and two products with each sequence's scores."""
    architecture = make.attention(12, 3, contexts=10, outputs=7, head_dim=4, value_dim=5, causal=causal)
    queries, keys = [n for n, _ in lengths], [s for _, s in lengths]
    counted = sum(2 * n * (12 * 12 + 15 * 7) + 2 * s * 10 * (12 + 15) + 2 * n * s * 3 * (4 + 5) for n, s in lengths)
    assert cost_of(architecture, queries, keys).flops == counted
