"""What a `config.json` of a pretrained model says about its layers.

In: the file's JSON object, the family that a preset takes it for (`bert`, `gpt2`, `llama`), a block's number if one
block is asked for, and whether the definition says that the layer is causal. Out: options of a layer, as a definition
would declare them, and the fields that describe a model that resident layers do not support: silently wrong results are
worse than none. A field that transformers does not read for a model is not read here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeGuard

Family: TypeAlias = Literal["bert", "gpt2", "llama"]
Options: TypeAlias = dict[str, Any]

MODEL_TYPES: Final[Mapping[Family, tuple[str, ...]]] = {
    "bert": ("bert",),
    "gpt2": ("gpt2",),
    "llama": ("llama", "mistral", "qwen2"),
}
"""The models of each family, by `model_type`. Other models use the same tensor names for other computations."""
ACTIVATION_NAMES: Final = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
"""The activations by their names in transformers, and here."""
DEFAULT_WINDOW: Final = 4096
"""The sliding window of a Mistral, or of a Qwen2 that has them, that does not say how wide they are."""


def _is_whole(value: object) -> TypeGuard[int]:
    return type(value) is int


class Objection(NamedTuple):
    """A field with an unsupported value, and the option for which it matters ("": always)."""

    field: str
    expected: str
    found: str
    option: str


class _Reader:
    """Reads a config's fields, collecting options and objections."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.options: Options = {}
        self.objections: list[Objection] = []

    def wrong(self, field: str, expected: str, found: object, option: str = "") -> None:
        self.objections.append(Objection(field, expected, repr(found), option))

    def number(self, field: str, option: str, *, whole: bool = True) -> None:
        """Takes a positive number; a field that is absent or null says nothing."""
        value = self.config.get(field)
        if value is None:
            return
        if (_is_whole(value) or (not whole and type(value) is float and math.isfinite(value))) and value > 0:
            self.options[option] = value
        else:
            words = "a positive whole number" if whole else "a positive number"
            self.wrong(field, words, value, option)

    def whole(self, field: str, default: int, option: str, *, least: int = 1) -> int | None:
        """A whole number on which an option depends: the default if it is absent or null, None if it is no such."""
        value = self.config.get(field)
        if value is None:
            return default
        if _is_whole(value) and value >= least:
            return value
        self.wrong(field, "a positive whole number" if least else "a whole number of at least 0", value, option)
        return None

    def activation(self, field: str) -> None:
        value = self.config.get(field)
        if value is None:
            return
        if isinstance(value, str) and value in ACTIVATION_NAMES:
            self.options["activation"] = ACTIVATION_NAMES[value]
        else:
            self.wrong(field, f"one of {', '.join(ACTIVATION_NAMES)}", value, "activation")

    def only(self, field: str, value: object, why: str, option: str = "") -> None:
        """A field for which one value is supported; absent means that value."""
        if self.config.get(field, value) != value:
            self.wrong(field, f"{value!r} ({why})", self.config[field], option)


def options_of(
    config: Mapping[str, Any], family: Family, number: int | None, causal: bool | None = None
) -> tuple[Options, list[Objection]]:
    """The options that a config implies, and what is wrong with it.

    `causal` is what the definition declares, whatever the config says: what a window means depends on it.
    """
    reader = _Reader(config)
    model = config.get("model_type")
    if model is not None and model not in MODEL_TYPES[family]:
        reader.wrong("model_type", " or ".join(MODEL_TYPES[family]), model)
    else:
        _own_code(reader)
        _READERS[family](reader, number, causal)
    return reader.options, reader.objections


def _own_code(reader: _Reader) -> None:
    """Models that publishers' own code computes, under a `model_type` and with tensors of one of transformers'.

    A tokenizer of their own says nothing of the model.
    """
    classes = reader.config.get("auto_map")
    if isinstance(classes, dict) and any(name.startswith(("AutoConfig", "AutoModel")) for name in classes):
        reader.wrong("auto_map", "no model of the publisher's own code (it may compute anything)", classes)


def _causal(reader: _Reader, by_default: bool) -> bool:
    """Whether tokens see only those before them. transformers lets a config make a causal model look both ways."""
    causal = reader.config.get("is_causal", by_default)
    if type(causal) is not bool:
        reader.wrong("is_causal", "true or false", causal, "causal")
    elif causal and not by_default:
        # transformers' kernels differ: its eager attention looks both ways, its SDPA does not.
        reader.wrong("is_causal", "false, or is_decoder to be true, too (declare causal)", causal, "causal")
    elif not causal and by_default:
        reader.options["causal"] = False
    return by_default and causal is not False


def _bert(reader: _Reader, number: int | None, causal: bool | None) -> None:
    reader.number("num_attention_heads", "heads")
    reader.number("num_hidden_layers", "blocks")
    reader.number("layer_norm_eps", "norm.epsilon", whole=False)
    reader.activation("hidden_act")
    reader.only("position_embedding_type", "absolute", "positions within scores are not supported")
    reader.only("add_cross_attention", False, "the preset has no cross-attention")
    if _causal(reader, by_default=reader.config.get("is_decoder") is True):
        reader.options["causal"] = True


def _gpt2(reader: _Reader, number: int | None, causal: bool | None) -> None:
    reader.number("n_head", "heads")
    reader.number("n_layer", "blocks")
    reader.number("layer_norm_epsilon", "norm.epsilon", whole=False)
    reader.activation("activation_function")
    reader.only("scale_attn_by_inverse_layer_idx", False, "all blocks have one scale", "scale")
    reader.only("add_cross_attention", False, "the preset has no cross-attention")
    if reader.config.get("scale_attn_weights") is False:
        reader.options["scale"] = 1.0
    _causal(reader, by_default=True)


def _llama(reader: _Reader, number: int | None, causal: bool | None) -> None:
    reader.number("num_attention_heads", "heads")
    reader.number("num_key_value_heads", "kv_heads")
    reader.number("head_dim", "head_dim")
    reader.number("num_hidden_layers", "blocks")
    reader.number("rms_norm_eps", "norm.epsilon", whole=False)
    reader.activation("hidden_act")
    _rotary(reader)
    said = _causal(reader, by_default=True)
    _window(reader, number, said if causal is None else causal)


def _rotary(reader: _Reader) -> None:
    """Rotary embeddings: fields of their own, or a table of them (`rope_parameters`, or `rope_scaling` instead)."""
    config = reader.config
    tables = [config[field] for field in ("rope_scaling", "rope_parameters") if isinstance(config.get(field), dict)]
    table: dict[str, Any] = next(filter(None, tables), {})
    inner = _Reader({**config, **table})
    inner.number("rope_theta", "rotary.base", whole=False)
    if (part := inner.config.get("partial_rotary_factor")) is not None and part != 1:
        # transformers 5 rotates whole heads of these models all the same, 4 fails, and other programs rotate parts.
        expected = "1 (programs differ in what they make of another: declare rotary.fraction)"
        inner.wrong("partial_rotary_factor", expected, part, "rotary.fraction")
    kind = table.get("rope_type", table.get("type", "default"))
    if kind != "default":
        inner.wrong("rope_type", "default (angles that are rescaled are not supported)", kind, "rotary")
    reader.options |= inner.options
    reader.objections += inner.objections


def _window(reader: _Reader, number: int | None, causal: bool) -> None:
    """A sliding window of W: W - 1 tokens to the left of each, or W on both sides if it looks both ways."""
    width = _width(reader)
    if width is None:
        return
    if not _is_whole(width) or width < 1:
        reader.wrong("sliding_window", "a positive whole number", width, "window")
    elif reader.config.get("model_type") != "qwen2" or _slides(reader, number):
        reader.options["window"] = [width - 1, 0] if causal else [width, width]


def _width(reader: _Reader) -> object:
    """What a config says, or by default means, of the width of windows: None if the model has none."""
    config = reader.config
    match config.get("model_type"):
        case "mistral":
            return config.get("sliding_window", DEFAULT_WINDOW)
        case "qwen2":
            return config.get("sliding_window", DEFAULT_WINDOW) if config.get("use_sliding_window") else None
        case None if config.get("sliding_window") is not None:
            reader.wrong("model_type", "mistral, qwen2 or llama (which ignores sliding_window)", None, "window")
    return None


def _slides(reader: _Reader, number: int | None) -> bool:
    """Whether a block of a Qwen2 has a window, or all its blocks have: its config may say so of each."""
    kinds = reader.config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        here = kinds if number is None else kinds[number : number + 1]
        if len(set(map(str, here))) > 1:
            reader.wrong("layer_types", "blocks of one kind (a transformer's blocks are equal)", here, "window")
            return False
        if unknown := [kind for kind in here if kind not in ("full_attention", "attention", "sliding_attention")]:
            reader.wrong("layer_types", "full_attention or sliding_attention", unknown[0], "window")
        return here == ["sliding_attention"] * len(here)
    # Without layer_types, the blocks below max_window_layers have no window. Defaults are those of transformers.
    first = reader.whole("max_window_layers", 28, "window", least=0)
    blocks = reader.whole("num_hidden_layers", 32, "window")
    if first is None or blocks is None:
        return False
    if number is None and 0 < first < blocks:
        reader.wrong("max_window_layers", f"0 or {blocks} (a transformer's blocks are equal)", first, "window")
        return False
    return first < blocks if number is None else first <= number


_READERS: Final[Mapping[Family, Callable[[_Reader, int | None, bool | None], None]]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
}
