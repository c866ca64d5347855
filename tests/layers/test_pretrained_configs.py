"""Defects where a checkpoint's `config.json` or its tensors ask for something that a preset cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from published import SMALL_LLAMA, bert_config, define, gpt2_config, pretrained, save, seed
from safetensors.torch import save_file

from attnserve_server.layers.definitions import examine, load_definitions
from attnserve_server.layers.errors import LayerError
from attnserve_server.layers.specification import Transformer

__all__ = ["seed"]


def config_defects(directory: Path, preset: str, changes: dict[str, Any], text: str = "") -> dict[str, str]:
    """The defects of a changed config, by field."""
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
    assert config_defects(tmp_path, "llama", {}, "rotary = false") == {}
    plain = {"rope_parameters": {"rope_theta": 1e4}}
    kinds = {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 4,
    }
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


@pytest.fixture
def qwen2(tmp_path: Path) -> Path:
    """A directory of a Qwen2 of two blocks, whose config says nothing of which of them have a window."""
    small = {key: value for key, value in SMALL_LLAMA.items() if key != "head_dim"}
    pretrained(tmp_path, transformers.Qwen2Model(transformers.Qwen2Config(**small)))
    path = tmp_path / "config.json"
    config = {**json.loads(path.read_text()), "use_sliding_window": True, "sliding_window": 4}
    path.write_text(json.dumps({key: config[key] for key in config if key not in ("layer_types", "max_window_layers")}))
    return tmp_path


def test_windows_of_single_blocks_follow_their_kind(qwen2: Path) -> None:
    path = qwen2 / "config.json"
    kinds = {"layer_types": ["full_attention", "sliding_attention"]}
    path.write_text(json.dumps({**json.loads(path.read_text()), **kinds}))
    path = qwen2 / "layers.toml"
    path.write_text(
        '[[layers]]\nname = "{n}"\npreset = "llama.attention"\nfile = "model.safetensors"\nnumbers = "0-1"\n'
    )
    windows = [getattr(layer.architecture, "window", None) for layer in load_definitions(path, qwen2, [])]
    assert windows == [(-1, -1), (3, 0)]


WINDOW = "window = [3, 0]"


@pytest.mark.parametrize("wrong", ["1", 1.5, -1, True, [1]])
def test_numbers_of_blocks_that_are_none(qwen2: Path, wrong: Any) -> None:
    changes = {"max_window_layers": wrong}
    assert set(config_defects(qwen2, "llama", changes)) == {"max_window_layers"}
    assert set(config_defects(qwen2, "llama.attention", {}, "numbers = 1")) == {"max_window_layers"}
    assert config_defects(qwen2, "llama", {}, WINDOW) == {}
    changes = {"max_window_layers": 1, "num_hidden_layers": wrong}
    assert set(config_defects(qwen2, "llama", changes)) == {"num_hidden_layers"}
    assert len(examine(qwen2 / "layers.toml", qwen2).defects) == 1, "said once, though two options depend on it"
    assert set(config_defects(qwen2, "llama", {}, "blocks = 2")) == {"num_hidden_layers"}
    assert config_defects(qwen2, "llama", {}, f"blocks = 2\n{WINDOW}") == {}


@pytest.mark.parametrize("said", [{}, {"max_window_layers": None}])
def test_which_blocks_have_a_window_is_by_default_what_transformers_takes(qwen2: Path, said: dict[str, None]) -> None:
    """The 29th and all after it."""
    assert config_defects(qwen2, "llama", said) == {}
    (specification,) = load_definitions(qwen2 / "layers.toml", qwen2, [])
    assert isinstance(specification.architecture, Transformer)
    attention = specification.architecture.block.self_attention
    assert attention is not None
    assert attention.window == (-1, -1)
    assert set(config_defects(qwen2, "llama", {"num_hidden_layers": None})) == {"max_window_layers"}
    assert config_defects(qwen2, "llama.attention", {}, "numbers = 1") == {}


def test_a_qwen2_has_no_window_unless_it_says_so(qwen2: Path) -> None:
    config = json.loads((qwen2 / "config.json").read_text())
    del config["use_sliding_window"]
    (qwen2 / "config.json").write_text(json.dumps(config))
    assert config_defects(qwen2, "llama", {"max_window_layers": 0}) == {}
    (specification,) = load_definitions(qwen2 / "layers.toml", qwen2, [])
    assert isinstance(specification.architecture, Transformer)
    attention = specification.architecture.block.self_attention
    assert attention is not None
    assert attention.window == (-1, -1)


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
    """Llama's names with query and key norms: another model."""
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
    """The first of three: the others show what it should be."""
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
