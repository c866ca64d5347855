"""What is read from the `config.json` of a pretrained model, field by field."""

from __future__ import annotations

from typing import Any

import pytest

from attnserve_server.layers.pretrained_config import Family, options_of

NUMBERS: dict[Family, dict[str, str]] = {
    "bert": {"num_attention_heads": "heads", "num_hidden_layers": "blocks", "layer_norm_eps": "norm.epsilon"},
    "gpt2": {"n_head": "heads", "n_layer": "blocks", "layer_norm_epsilon": "norm.epsilon"},
    "llama": {
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "head_dim": "head_dim",
        "num_hidden_layers": "blocks",
        "rms_norm_eps": "norm.epsilon",
        "rope_theta": "rotary.base",
    },
}
FRACTIONS = "norm.epsilon", "rotary.base"
EVERY_NUMBER = pytest.mark.parametrize(
    ("family", "field", "option"),
    [(family, field, option) for family, fields in NUMBERS.items() for field, option in fields.items()],
)


@EVERY_NUMBER
def test_a_number_is_an_option(family: Family, field: str, option: str) -> None:
    assert options_of({field: 1}, family, None) == ({option: 1}, [])
    assert options_of({field: None}, family, None) == ({}, [])
    if option in FRACTIONS:
        assert options_of({field: 0.5}, family, None) == ({option: 0.5}, [])


@EVERY_NUMBER
@pytest.mark.parametrize("value", [0, -1, True, "4", [4], float("inf"), float("nan"), -0.5, 1.5])
def test_what_is_no_such_number_is_objected_to(family: Family, field: str, option: str, value: object) -> None:
    if value == 1.5 and option in FRACTIONS:
        return
    words = "a positive number" if option in FRACTIONS else "a positive whole number"
    assert options_of({field: value}, family, None) == ({}, [(field, words, repr(value), option)])


CHOICES: list[tuple[Family, dict[str, Any], dict[str, Any]]] = [
    ("bert", {"hidden_act": "gelu_new"}, {"activation": "gelu_tanh"}),
    ("bert", {"is_decoder": True}, {"causal": True}),
    ("bert", {"is_decoder": False}, {}),
    ("bert", {"is_decoder": False, "is_causal": False}, {}),
    ("bert", {"is_decoder": True, "is_causal": True}, {"causal": True}),
    ("bert", {"is_decoder": True, "is_causal": False}, {"causal": False}),
    ("gpt2", {"is_causal": False}, {"causal": False}),
    ("gpt2", {"is_causal": True}, {}),
    ("llama", {"is_causal": False}, {"causal": False}),
    ("llama", {"is_causal": True}, {}),
    ("llama", {"partial_rotary_factor": 1.0}, {}),
    ("llama", {"partial_rotary_factor": None}, {}),
    ("llama", {"auto_map": {"AutoTokenizer": ["tokenization.Tokenizer", None]}}, {}),
    ("bert", {"position_embedding_type": "absolute", "add_cross_attention": False}, {}),
    ("gpt2", {"activation_function": "relu"}, {"activation": "relu"}),
    ("gpt2", {"scale_attn_weights": False}, {"scale": 1.0}),
    ("gpt2", {"scale_attn_weights": True}, {}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}, {}),
    ("llama", {"hidden_act": "swish"}, {"activation": "silu"}),
    ("llama", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"rotary.base": 5e5}),
    ("llama", {"rope_scaling": {"type": "default"}, "rope_theta": 5e5}, {"rotary.base": 5e5}),
]


@pytest.mark.parametrize(("family", "config", "options"), CHOICES)
def test_what_is_said_otherwise(family: Family, config: dict[str, Any], options: dict[str, Any]) -> None:
    assert options_of(config, family, None) == (options, [])


UNSUPPORTED: list[tuple[Family, str, Any, str]] = [
    ("bert", "hidden_act", "mish", "activation"),
    ("bert", "position_embedding_type", "relative_key", ""),
    ("bert", "add_cross_attention", True, ""),
    ("gpt2", "activation_function", 3, "activation"),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True, "scale"),
    ("gpt2", "add_cross_attention", True, ""),
    ("bert", "is_causal", True, "causal"),
    ("gpt2", "is_causal", None, "causal"),
    ("llama", "is_causal", 0, "causal"),
    ("llama", "auto_map", {"AutoModel": "modeling.Model"}, ""),
    ("llama", "hidden_act", ["silu"], "activation"),
    ("llama", "partial_rotary_factor", 0.5, "rotary.fraction"),
    ("llama", "partial_rotary_factor", "1", "rotary.fraction"),
    ("llama", "model_type", "gemma", ""),
]


@pytest.mark.parametrize(("family", "field", "value", "option"), UNSUPPORTED)
def test_what_is_not_supported_is_objected_to(family: Family, field: str, value: Any, option: str) -> None:
    options, objections = options_of({field: value}, family, None)
    assert options == {}
    assert [(each.field, each.found, each.option) for each in objections] == [(field, repr(value), option)]


@pytest.mark.parametrize("value", [0, "4", True, 1.5, -1])
def test_what_is_no_width_of_a_window_is_objected_to(value: object) -> None:
    for config in ({"model_type": "mistral"}, {**QWEN2, "max_window_layers": 0}):
        objection = "sliding_window", "a positive whole number", repr(value), "window"
        assert options_of({**config, "sliding_window": value}, "llama", None) == ({}, [objection])
    assert options_of({"model_type": "llama", "sliding_window": value}, "llama", None) == ({}, [])


KINDS = {"layer_types": ["full_attention", "sliding_attention"]}
MISTRAL = {"model_type": "mistral"}
QWEN2 = {"model_type": "qwen2", "use_sliding_window": True}


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({}, ["model_type", "model_type", "model_type"]),
        (MISTRAL, [True, True, True]),
        (MISTRAL | {"use_sliding_window": False}, [True, True, True]),
        (MISTRAL | KINDS, [True, True, True]),
        ({"model_type": "llama"}, [False, False, False]),
        ({"model_type": "llama"} | KINDS, [False, False, False]),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 2}, [True, True, True]),
        (QWEN2 | {"layer_types": ["full_attention"] * 2}, [False, False, False]),
        (QWEN2 | {"layer_types": ["attention"] * 2}, [False, False, False]),
        (QWEN2 | {"layer_types": ["chunked_attention"] * 2}, ["layer_types", "layer_types", "layer_types"]),
        (QWEN2 | {"use_sliding_window": False} | KINDS, [False, False, False]),
        (QWEN2 | KINDS, ["layer_types", False, True]),
        ({"model_type": "qwen2", "max_window_layers": 0}, [False, False, False]),
        (QWEN2 | {"num_hidden_layers": 2, "max_window_layers": 0}, [True, True, True]),
        (QWEN2 | {"num_hidden_layers": 2, "max_window_layers": 1}, ["max_window_layers", False, True]),
        (QWEN2 | {"num_hidden_layers": 2, "max_window_layers": 2}, [False, False, False]),
        (QWEN2 | {"num_hidden_layers": 2, "max_window_layers": 2, "layer_types": []}, [False, False, False]),
        (QWEN2 | {"num_hidden_layers": 1, "max_window_layers": 0}, [True, True, True]),
        (QWEN2 | {"num_hidden_layers": 28}, [False, False, False]),
        (QWEN2 | {"num_hidden_layers": 29}, ["max_window_layers", False, False]),
        (QWEN2 | {"max_window_layers": 31}, ["max_window_layers", False, False]),
        (QWEN2 | {"max_window_layers": 32}, [False, False, False]),
    ],
)
def test_which_blocks_have_a_window(config: dict[str, Any], windows: list[bool | str]) -> None:
    """All of them together, the first and the second; or the field that says that they differ."""
    for number, wanted in zip((None, 0, 1), windows, strict=True):
        options, objections = options_of({"sliding_window": 1, **config}, "llama", number)
        assert options.get("window") == ([0, 0] if wanted is True else None)
        assert [each.field for each in objections] == ([wanted] if isinstance(wanted, str) else [])


def test_the_first_blocks_without_a_window() -> None:
    """As many as transformers takes where a Qwen2 does not say."""
    for number, options in ((27, {}), (28, {"window": [3, 0]})):
        assert options_of({"sliding_window": 4, **QWEN2}, "llama", number) == (options, [])


@pytest.mark.parametrize("value", ["1", -1, True, 1.5])
def test_numbers_of_blocks_that_decide_on_windows(value: object) -> None:
    config = {"sliding_window": 4, **QWEN2, "max_window_layers": value}
    objection = "max_window_layers", "a whole number of at least 0", repr(value), "window"
    assert options_of(config, "llama", 0) == options_of(config, "llama", None) == ({}, [objection])
    config = {"sliding_window": 4, **QWEN2, "num_hidden_layers": value}
    wrong = "num_hidden_layers", "a positive whole number", repr(value)
    assert options_of(config, "llama", None) == ({}, [(*wrong, "blocks"), (*wrong, "window")])
