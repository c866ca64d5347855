"""Stacks of encoder and decoder blocks, against torch's and transformers' modules, and the parts around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import random_layers as make
import torch
from torch import nn

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.layers.layer import LayerInput
from attnserve_server.layers.specification import (
    Activation,
    Block,
    Dtype,
    Embedding,
    FeedForward,
    Norm,
    Rotary,
    Transformer,
)


@pytest.fixture(scope="module")
def device(devices: dict[int, CpuDevice]) -> CpuDevice:
    return devices[2]


def randomised(module: nn.Module) -> Any:
    """A module in which nothing is 0 or 1, as biases and norms initially are."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    return module.eval().requires_grad_(False)


def parameters_of_torchs(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The canonical parameters of one of torch's encoder or decoder layers."""
    parameters: dict[str, torch.Tensor] = {}
    crossed = "multihead_attn.in_proj_weight" in state
    attentions = {"self": "self_attn", "cross": "multihead_attn"} if crossed else {"self": "self_attn"}
    for ours, theirs in attentions.items():
        for kind in ("weight", "bias"):
            if f"{theirs}.in_proj_{kind}" not in state:
                continue
            for name, part in zip(("query", "key", "value"), state[f"{theirs}.in_proj_{kind}"].chunk(3), strict=True):
                parameters[f"{prefix}{ours}.{name}.{kind}"] = part
    renamed = {
        "self_attn.out_proj": "self.output",
        "multihead_attn.out_proj": "cross.output",
        "linear1": "feed_forward.up",
        "linear2": "feed_forward.down",
        "norm1": "self.norm",
        "norm2": "cross.norm" if crossed else "feed_forward.norm",
        "norm3": "feed_forward.norm",
    }
    for theirs, ours in renamed.items():
        for kind in ("weight", "bias"):
            if f"{theirs}.{kind}" in state:
                parameters[f"{prefix}{ours}.{kind}"] = state[f"{theirs}.{kind}"]
    return parameters


def block_like(width: int, heads: int, hidden: int, activation: Activation, **fields: Any) -> Block:
    """A block like torch's layers."""
    return make.block(
        width, heads, feed_forward=FeedForward(width=width, hidden=hidden, activation=activation), **fields
    )


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_torchs_encoder_layer(device: CpuDevice, activation: Activation, pre_norm: bool) -> None:
    module = randomised(
        nn.TransformerEncoderLayer(32, 4, 70, activation=activation, norm_first=pre_norm, batch_first=True)
    )
    architecture = Transformer(blocks=1, block=block_like(32, 4, 70, activation, pre_norm=pre_norm))
    layer = make.layer_of(architecture, parameters_of_torchs(module.state_dict(), "blocks.0."), device)
    rows = make.random_rows(3 * 9, 32, 0).view(3, 9, 32)
    lengths = [9, 4, 1]
    padding = torch.arange(9) >= torch.tensor(lengths)[:, None]
    theirs = module(rows, src_key_padding_mask=padding)
    (reply,) = make.run(layer, make.packed(*(row[:n] for row, n in zip(rows, lengths, strict=True))))
    torch.testing.assert_close(reply.output, theirs[~padding], rtol=0, atol=5e-6)
    mask = torch.rand(9, 9, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[:, 0] = True
    theirs = module(rows, src_mask=~mask)
    (reply,) = make.run(layer, make.batched(rows, mask=mask[None, None]))
    torch.testing.assert_close(reply.output.view(rows.shape), theirs, rtol=0, atol=5e-6)


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_torchs_decoder_layer(device: CpuDevice, activation: Activation, pre_norm: bool) -> None:
    module = randomised(
        nn.TransformerDecoderLayer(32, 4, 70, activation=activation, norm_first=pre_norm, batch_first=True)
    )
    architecture = Transformer(blocks=1, block=block_like(32, 4, 70, activation, pre_norm=pre_norm, crossed=True))
    layer = make.layer_of(architecture, parameters_of_torchs(module.state_dict(), "blocks.0."), device)
    rows, context = make.random_rows(3 * 6, 32, 0).view(3, 6, 32), make.random_rows(3 * 11, 32, 1).view(3, 11, 32)
    lengths = [11, 5, 8]
    padding = torch.arange(11) >= torch.tensor(lengths)[:, None]
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    theirs = module(rows, context, tgt_mask=causal, memory_key_padding_mask=padding, tgt_is_causal=True)
    (reply,) = make.run(
        layer,
        LayerInput(input=rows.flatten(0, 1), lengths=[6] * 3, context=context[~padding], context_lengths=lengths),
    )
    torch.testing.assert_close(reply.output.view(rows.shape), theirs, rtol=0, atol=5e-6)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("bias", [True, False])
def test_torchs_stacks_as_the_original_transformer(device: CpuDevice, bias: bool) -> None:
    """Encoder and decoder of 2 blocks each, 512 wide, h = 8, d_k = d_v = 64 (Vaswani et al. 2017), and final norms."""
    module = randomised(nn.Transformer(512, 8, 2, 2, 600, batch_first=True, bias=bias))
    biases = dict.fromkeys(("query_bias", "key_bias", "value_bias", "output_bias"), bias)
    norm = Norm(kind="layer", width=512, epsilon=1e-5, bias=bias)
    common: dict[str, Any] = {
        "feed_forward": FeedForward(width=512, hidden=600, activation="relu", up_bias=bias, down_bias=bias),
        "norm": norm,
    }
    encoder = make.block(512, 8, self_attention=make.attention(512, 8, **biases), **common)
    decoder = make.block(
        512,
        8,
        self_attention=make.attention(512, 8, causal=True, **biases),
        cross_attention=make.attention(512, 8, **biases),
        **common,
    )
    layers = {}
    for name, block in (("encoder", encoder), ("decoder", decoder)):
        part = getattr(module, name)
        parameters = {f"norm.{kind}": values for kind, values in part.norm.state_dict().items()}
        for number, each in enumerate(part.layers):
            parameters |= parameters_of_torchs(each.state_dict(), f"blocks.{number}.")
        layers[name] = make.layer_of(Transformer(blocks=2, block=block, final_norm=norm), parameters, device)
    source, target = make.random_rows(2 * 13, 512, 0).view(2, 13, 512), make.random_rows(2 * 7, 512, 1).view(2, 7, 512)
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    theirs = module(source, target, tgt_mask=causal, tgt_is_causal=True)
    (encoded,) = make.run(layers["encoder"], make.batched(source))
    (reply,) = make.run(layers["decoder"], make.batched(target, context=encoded.output.view(source.shape)))
    torch.testing.assert_close(reply.output.view(target.shape), theirs, rtol=1e-5, atol=1e-5)


def test_llama(device: CpuDevice) -> None:
    """Token ids to hidden states: grouped heads, rotary positions, RMSNorm, SiLU-gated; by transformers' own code."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=48,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
    )
    module = randomised(transformers.LlamaModel(config))
    norm = Norm(kind="rms", width=48, epsilon=1e-5, bias=False)
    block = Block(
        self_attention=make.attention(
            48,
            6,
            kv_heads=2,
            causal=True,
            rotary=Rotary(width=8, base=1e4),
            **dict.fromkeys(("query_bias", "key_bias", "value_bias", "output_bias"), False),
        ),
        cross_attention=None,
        feed_forward=FeedForward(width=48, hidden=100, activation="silu", gated=True, up_bias=False, down_bias=False),
        norm=norm,
        pre_norm=True,
    )
    architecture = Transformer(blocks=2, block=block, embedding=Embedding(width=48, vocabulary=60), final_norm=norm)
    names = {
        "self.query": "self_attn.q_proj",
        "self.key": "self_attn.k_proj",
        "self.value": "self_attn.v_proj",
        "self.output": "self_attn.o_proj",
        "self.norm": "input_layernorm",
        "feed_forward.norm": "post_attention_layernorm",
        "feed_forward.up": "mlp.up_proj",
        "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.down": "mlp.down_proj",
    }
    state = module.state_dict()
    parameters = {"embedding.token.weight": state["embed_tokens.weight"], "norm.weight": state["norm.weight"]}
    for number in range(2):
        for ours, theirs in names.items():
            parameters[f"blocks.{number}.{ours}.weight"] = state[f"layers.{number}.{theirs}.weight"]
    layer = make.layer_of(architecture, parameters, device)
    ids = torch.randint(60, (2, 19), generator=torch.Generator().manual_seed(0))
    wanted = module(ids).last_hidden_state
    first, second, shifted = make.run(
        layer,
        LayerInput(input=ids[0], lengths=[19]),
        LayerInput(input=ids[1], lengths=[19]),
        LayerInput(input=ids[1], lengths=[19], offsets=[7]),
    )
    torch.testing.assert_close(torch.stack([first.output, second.output]), wanted, rtol=0, atol=1e-5)
    # Rotations are relative: a sequence's position makes no difference to it.
    torch.testing.assert_close(shifted.output, second.output, rtol=0, atol=1e-5)


EMBEDDING = Embedding(
    width=24,
    vocabulary=40,
    scale=3.0,
    positions=30,
    position_offset=2,
    sinusoidal=True,
    segments=2,
    norm=Norm(kind="layer", width=24, epsilon=1e-12),
)


@pytest.mark.parametrize("dtype", make.DTYPES)
def test_embeddings(device: CpuDevice, dtype: Dtype) -> None:
    """A stack without blocks is its embedding: every table, the sinusoids and the norm, in float64."""
    architecture = Transformer(blocks=0, block=make.block(24, 3), embedding=EMBEDDING)
    parameters = make.random_parameters(architecture, 0, dtype)
    ids, segments = torch.tensor([1, 39, 0, 7, 7, 2]), torch.tensor([0, 1, 1, 0, 1, 0])
    request = LayerInput(input=ids, lengths=[4, 2], offsets=[5, -2], segments=segments)
    (reply,) = make.run(make.layer_of(architecture, parameters, device, dtype), request)

    arrays = make.doubles(parameters)
    positions = np.array([5, 6, 7, 8, -2, -1])
    angles = positions[:, None] / 10000.0 ** (np.arange(0, 24, 2) / 24)
    rows = 3.0 * arrays["embedding.token.weight"][ids] + arrays["embedding.position.weight"][positions + 2]
    rows[:, 0::2] += np.sin(angles)
    rows[:, 1::2] += np.cos(angles)
    rows += arrays["embedding.segment.weight"][segments]
    rows = (rows - rows.mean(1, keepdims=True)) / np.sqrt(rows.var(1, keepdims=True) + 1e-12)
    rows = rows * arrays["embedding.norm.weight"] + arrays["embedding.norm.bias"]
    bounds = {"float32": 3e-6, "float64": 1e-13, "float16": 4e-3, "bfloat16": 3e-2}
    np.testing.assert_allclose(reply.output.double().numpy(), rows, rtol=0, atol=bounds[dtype])
    (without,) = make.run(
        make.layer_of(architecture, parameters, device, dtype),
        replace(request, segments=torch.zeros_like(segments)),
    )
    (absent,) = make.run(make.layer_of(architecture, parameters, device, dtype), replace(request, segments=None))
    make.assert_same_replies(without, absent)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("unit_offset", [True, False])
@pytest.mark.parametrize("there", [(True, True), (True, False), (False, False)])
def test_norms(device: CpuDevice, kind: Any, unit_offset: bool, there: tuple[bool, bool]) -> None:
    norm = Norm(kind=kind, width=20, epsilon=0.1, weight=there[0], bias=there[1], unit_offset=unit_offset)
    architecture = Transformer(blocks=0, block=make.block(20, 2), final_norm=norm)
    parameters = make.random_parameters(architecture, 0, "float64")
    rows = make.random_rows(7, 20, 0, "float64") + 0.5
    (reply,) = make.run(make.layer_of(architecture, parameters, device, "float64"), make.packed(rows))
    arrays, x = make.doubles(parameters), rows.numpy()
    centred = x - x.mean(1, keepdims=True) if kind == "layer" else x
    wanted = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 0.1)
    wanted = wanted * (arrays["norm.weight"] + unit_offset if there[0] else 1.0) + arrays.get("norm.bias", 0.0)
    np.testing.assert_allclose(reply.output.numpy(), wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("gated", [True, False])
def test_half_precisions(device: CpuDevice, dtype: Dtype, activation: Activation, gated: bool) -> None:
    """Against the same numbers in float64: only the rounding error of two blocks."""
    feed_forward = FeedForward(width=64, hidden=100, activation=activation, gated=gated)
    architecture = Transformer(blocks=2, block=make.block(64, 4, feed_forward=feed_forward, pre_norm=True))
    parameters = make.random_parameters(architecture, 0, dtype)
    rows = make.random_rows(37, 64, 0, dtype)
    (reply,) = make.run(make.layer_of(architecture, parameters, device, dtype), make.packed(rows))
    wide = {name: values.double() for name, values in parameters.items()}
    (exact,) = make.run(make.layer_of(architecture, wide, device, "float64"), make.packed(rows.double()))
    assert reply.output.dtype == make.torch_dtype(dtype)
    error = (reply.output.double() - exact.output).abs().max() / exact.output.abs().max()
    assert error < {"float16": 3e-3, "bfloat16": 2e-2}[dtype]


def test_causal_blocks_do_not_depend_on_later_rows(device: CpuDevice) -> None:
    architecture = Transformer(blocks=2, block=make.block(32, 4, crossed=True))
    layer = make.layer_of(architecture, make.random_parameters(architecture), device)
    rows, context = make.random_rows(15, 32, 0), make.random_rows(4, 32, 1)
    spoilt = torch.cat([rows[:9], torch.full((6, 32), torch.nan)])
    requests = [LayerInput(input=each, lengths=[15], context=context, context_lengths=[4]) for each in (rows, spoilt)]
    one, other = make.run(layer, *requests)
    torch.testing.assert_close(one.output[:9], other.output[:9], rtol=0, atol=2e-6)
    assert other.output[9:].isnan().all()


def test_without_positions_an_encoder_permutes_with_its_inputs(device: CpuDevice) -> None:
    architecture = Transformer(blocks=2, block=make.block(32, 4))
    layer = make.layer_of(architecture, make.random_parameters(architecture), device)
    rows, order = make.random_rows(15, 32, 0), torch.randperm(15, generator=torch.Generator().manual_seed(0))
    plain, permuted = make.run(layer, make.packed(rows), make.packed(rows[order]))
    torch.testing.assert_close(permuted.output, plain.output[order], rtol=0, atol=5e-6)


def test_the_order_of_a_decoders_context_changes_nothing(device: CpuDevice) -> None:
    architecture = Transformer(blocks=2, block=make.block(32, 4, crossed=True, pre_norm=True))
    layer = make.layer_of(architecture, make.random_parameters(architecture), device)
    request = LayerInput(
        input=make.random_rows(6, 32, 0), lengths=[6], context=make.random_rows(12, 32, 1), context_lengths=[12]
    )
    assert request.context is not None
    one, other = make.run(layer, request, replace(request, context=request.context.flip(0)))
    torch.testing.assert_close(one.output, other.output, rtol=0, atol=5e-6)
