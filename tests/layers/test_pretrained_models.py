"""What transformers computes by a changed `config.json`, and what a preset computes by the same one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from published import IDS, SMALL_LLAMA, bert_config, gpt2_config, pretrained, run, save, seed
from test_pretrained_configs import config_defects

__all__ = ["seed"]

TOLERANCE = 1e-4
"""transformers computes rotary angles and some norms in float32, whatever the model's dtype."""
SMALL = {key: value for key, value in SMALL_LLAMA.items() if key != "head_dim"}
CONFIGS: dict[str, Any] = {
    "Bert": bert_config,
    "GPT2": gpt2_config,
    "Llama": lambda **changes: transformers.LlamaConfig(**{**SMALL, **changes}),
    "Mistral": lambda **changes: transformers.MistralConfig(**{**SMALL, **changes}),
    "Qwen2": lambda **changes: transformers.Qwen2Config(**{**SMALL, **changes}),
}


def preset_of(name: str) -> str:
    return name.lower() if name in ("Bert", "GPT2") else "llama"


def saved(directory: Path, name: str, changes: dict[str, Any], without: tuple[str, ...] = (), **config: Any) -> Any:
    """A checkpoint whose config is changed afterwards, as transformers then loads it."""
    pretrained(directory, getattr(transformers, f"{name}Model")(CONFIGS[name](**config)))
    path = directory / "config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in fields.items() if key not in without}))
    loaded = getattr(transformers, f"{name}Model").from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager"
    )
    return loaded.eval()


def assert_same(directory: Path, name: str, model: Any, text: str = "") -> None:
    found = run(directory, f'preset = "{preset_of(name)}"\n{text}', IDS[0])
    expected = model(IDS).last_hidden_state[0].numpy()
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def assert_matters(model: Any, plain: Any) -> None:
    """The change of the config changes what transformers computes: otherwise, the comparison shows nothing."""
    plain.load_state_dict(model.state_dict())
    difference = model(IDS).last_hidden_state - plain.double().eval()(IDS).last_hidden_state
    assert difference.abs().max() > 1e-2


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral", "Qwen2"])
def test_a_decoder_that_looks_both_ways(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path, name, {"is_causal": False})
    assert_matters(model, getattr(transformers, f"{name}Model")(CONFIGS[name]()))
    assert_same(tmp_path, name, model)


def test_a_bert_that_is_a_decoder_and_looks_both_ways(tmp_path: Path) -> None:
    model = saved(tmp_path, "Bert", {"is_decoder": True, "is_causal": False})
    assert_matters(model, transformers.BertModel(bert_config(is_decoder=True)))
    assert_same(tmp_path, "Bert", model)


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral", "Qwen2", "Bert"])
def test_a_decoder_that_says_that_it_is_causal(tmp_path: Path, name: str) -> None:
    assert_same(tmp_path, name, saved(tmp_path, name, {"is_causal": True, "is_decoder": True}))


@pytest.mark.parametrize("declared", ["", "causal = false"])
@pytest.mark.parametrize("name", ["Mistral", "Qwen2"])
def test_windows_on_both_sides(tmp_path: Path, name: str, declared: str) -> None:
    """The definition may say it instead of the config: then the window is on both sides all the same."""
    more = {} if name == "Mistral" else {"use_sliding_window": True, "max_window_layers": 0}
    model = saved(tmp_path, name, {"is_causal": False, "sliding_window": 2}, **more, sliding_window=2)
    assert_matters(model, getattr(transformers, f"{name}Model")(CONFIGS[name](**more, sliding_window=2)))
    if declared:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "is_causal": True}))
    assert_same(tmp_path, name, model, text=declared)


def test_windows_of_a_layer_that_is_declared_to_be_causal(tmp_path: Path) -> None:
    model = saved(tmp_path, "Mistral", {}, sliding_window=2)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "is_causal": False}))
    assert_same(tmp_path, "Mistral", model, text="causal = true")


@pytest.mark.parametrize(
    ("name", "more", "windows"),
    [
        ("Mistral", {}, True),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0}, True),
        ("Qwen2", {"use_sliding_window": False, "max_window_layers": 0}, False),
        ("Llama", {}, False),
    ],
)
def test_the_window_of_a_config_that_does_not_say(
    tmp_path: Path, name: str, more: dict[str, Any], windows: bool
) -> None:
    """The first tokens, which no default window of the last one reaches, have keys that drown all others."""
    small = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 8}
    model = saved(tmp_path, name, more, ("sliding_window", "layer_types"), **small, **more)
    model.embed_tokens.weight[:, 0] = 0.0
    model.embed_tokens.weight[38:, 0] = torch.tensor([10.0, -10.0])
    model.layers[0].self_attn.k_proj.weight[:, 0] *= 100.0
    save(tmp_path, model)
    ids = torch.randint(0, 38, (1, 4100))
    ids[0, :4] = torch.tensor([38, 39, 38, 39])
    # Large keys magnify the rounding of transformers' angles.
    found, expected = run(tmp_path, 'preset = "llama"', ids[0]), model(ids).last_hidden_state[0].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    other = run(tmp_path, f'preset = "llama"\nwindow = [{-1 if windows else 4095}, 0]', ids[0])
    assert np.abs(other - expected).max() > 1e-2


IGNORED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Llama", {}, {"sliding_window": 2}),
    ("Llama", {}, {"sliding_window": 2, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}),
    ("Mistral", {"sliding_window": 2}, {"layer_types": ["full_attention"] * 2}),
    ("Mistral", {"sliding_window": 2}, {"layer_types": ["full_attention", "sliding_attention"]}),
    ("Mistral", {"sliding_window": 2}, {"use_sliding_window": False, "max_window_layers": 2}),
    ("Mistral", {}, {"sliding_window": None, "use_sliding_window": True}),
    ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0}, {"sliding_window": None, "layer_types": None}),
    ("GPT2", {}, {"sliding_window": 2}),
    ("Bert", {}, {"sliding_window": 2, "attention_window": 2}),
    (
        "Llama",
        {},
        {"rope_scaling": {"type": "default", "rope_theta": 100.0}, "rope_parameters": {"rope_theta": 1e4}},
    ),
]


@pytest.mark.parametrize(("name", "config", "changes"), IGNORED)
def test_fields_that_a_model_does_not_read(
    tmp_path: Path, name: str, config: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert_same(tmp_path, name, saved(tmp_path, name, changes, **config))


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "llama3"])
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_rescaled_angles_are_refused_whatever_else_of_them_is_declared(tmp_path: Path, field: str, kind: str) -> None:
    """Only a definition without angles, or one that does not read the config, is not about them."""
    saved(tmp_path, "Llama", {})
    changes = {field: {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}}
    declared = "rotary.base = 1e4\nrotary.fraction = 1.0\nrotary.interleaved = false\nrotary.offset = 0"
    for text in ("", "rotary.base = 1e4", declared, "rotary = {}"):
        assert set(config_defects(tmp_path, "llama", changes, text)) == {"rope_type"}
    assert config_defects(tmp_path, "llama", {}, "rotary = false") == {}
    assert (
        config_defects(tmp_path, "llama", {}, "config = false\nheads = 4\nnorm.epsilon = 1e-6\nrotary.base = 1e4") == {}
    )


def test_parts_of_heads_are_refused_unless_they_are_declared(tmp_path: Path) -> None:
    """In transformers, whole heads are rotated, which the author of such a config hardly meant."""
    for name in ("Llama", "Mistral", "Qwen2"):
        model = saved(tmp_path, name, {"partial_rotary_factor": 0.5})
        assert set(config_defects(tmp_path, "llama", {})) == {"partial_rotary_factor"}
        assert set(config_defects(tmp_path, "llama", {}, "rotary.base = 1e4")) == {"partial_rotary_factor"}
        assert_same(tmp_path, name, model, text="rotary.fraction = 1.0")
        assert config_defects(tmp_path, "llama", {}, "rotary.width = 4") == {}
        table = {"partial_rotary_factor": None, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}
        assert set(config_defects(tmp_path, "llama", table)) == {"partial_rotary_factor"}


def test_a_bert_that_says_that_it_is_causal_is_refused(tmp_path: Path) -> None:
    """The SDPA of transformers is causal then, and its eager attention is not."""
    saved(tmp_path, "Bert", {})
    assert set(config_defects(tmp_path, "bert", {"is_causal": True})) == {"is_causal"}
    assert set(config_defects(tmp_path, "bert.attention", {}, "numbers = 0")) == {"is_causal"}
    assert config_defects(tmp_path, "bert", {}, "causal = true") == {}
    assert config_defects(tmp_path, "bert", {}, "causal = false") == {}


def test_models_of_the_publishers_own_code(tmp_path: Path) -> None:
    saved(tmp_path, "Llama", {})
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization.Tokenizer", None]}}
    assert config_defects(tmp_path, "llama", tokenizer) == {}
    own = {"auto_map": {"AutoConfig": "configuration.Config", "AutoModel": "modeling.Bidirectional"}}
    assert set(config_defects(tmp_path, "llama", own)) == {"auto_map"}
    assert (
        config_defects(tmp_path, "llama", {}, "config = false\nheads = 4\nnorm.epsilon = 1e-6\nrotary.base = 1e4") == {}
    )


def test_a_window_of_a_model_that_does_not_say_which_it_is(tmp_path: Path) -> None:
    saved(tmp_path, "Mistral", {"model_type": None})
    assert set(config_defects(tmp_path, "llama", {"sliding_window": 4})) == {"model_type"}
    assert config_defects(tmp_path, "llama", {}, "window = [3, 0]") == {}
    assert config_defects(tmp_path, "llama", {"sliding_window": None}) == {}


def test_kinds_of_blocks_that_a_qwen2_does_not_have(tmp_path: Path) -> None:
    saved(tmp_path, "Qwen2", {})
    changes = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["chunked_attention"] * 2}
    assert set(config_defects(tmp_path, "llama", changes)) == {"layer_types"}
    assert config_defects(tmp_path, "llama", {}, "window = [3, 0]") == {}
