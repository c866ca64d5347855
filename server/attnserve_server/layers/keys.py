"""The keys of `layers.toml`: their names, the kinds of layers that they are for, and what their values look like.

In: a table as TOML gives it. Out: what is wrong with it, and its options flat, by dotted name: `rotary.base`. Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, get_args

from attnserve_server.layers.presets import PRESETS
from attnserve_server.layers.specification import Activation, Dtype, LayerKind, NormKind

MOST: Final = 2**31 - 1
"""The largest whole number, as an axis of a tensor can have."""
LARGEST: Final = 3.4028234e38
"""The largest number, as float32 has."""

KINDS: Final[tuple[LayerKind, ...]] = get_args(LayerKind)


@dataclass(frozen=True, slots=True)
class Key:
    """What a key's value looks like: in words, as a check, and the keys of the table that may replace it."""

    expected: str
    valid: Callable[[Any], bool]
    table: Mapping[str, Key] = field(default_factory=dict)


class Wrong(NamedTuple):
    """A key that is not as it should be."""

    key: str
    expected: str
    found: str


def _is_whole(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value <= MOST


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def _is_list(value: object, valid: Callable[[Any], bool], length: int | None = None) -> bool:
    return isinstance(value, list) and all(map(valid, value)) and length in (None, len(value))


def _one_of(*words: str) -> Key:
    return Key(" or ".join(words), lambda value: value in words)


def _table(words: str, keys: Mapping[str, Key]) -> Key:
    return Key(f"a table of {words} ({', '.join(keys)})", lambda value: isinstance(value, dict), keys)


LENGTH: Final = Key(f"a whole number from 1 to {MOST}", lambda value: _is_whole(value, 1))
INTEGER: Final = Key(f"a whole number from {-MOST} to {MOST}", lambda value: _is_whole(value, -MOST))
NUMBER: Final = Key("a number that float32 has room for", _is_number)
POSITIVE: Final = Key("a number above 0 that float32 has room for", lambda value: _is_number(value) and value > 0)
TRUTH: Final = Key("true or false", lambda value: isinstance(value, bool))
TEXT: Final = Key("text", lambda value: isinstance(value, str))
FALSE: Final = Key("false, which leaves it out", lambda value: value is False)
WINDOW: Final = Key(
    f"[left, right], each a whole number from -1 to {MOST}",
    lambda value: _is_list(value, lambda side: _is_whole(side, -1), 2),
)

_ROTARY: Final = {
    "base": POSITIVE,
    "fraction": Key("a number above 0 and at most 1", lambda value: _is_number(value) and 0 < value <= 1),
    "width": LENGTH,
    "interleaved": TRUTH,
    "offset": INTEGER,
}
_INSTEAD: Final = {"rotary.fraction": "rotary.width"}
"""Options, and those that say the same in another way."""
_NORM: Final = {"kind": _one_of(*get_args(NormKind)), "epsilon": POSITIVE, "unit_offset": TRUTH}
_EMBEDDING: Final = {
    "scale": NUMBER,
    "sinusoidal": TRUTH,
    "position_offset": Key(f"a whole number from 0 to {MOST}", _is_whole),
}
SOURCE: Final = {
    "tensor": TEXT,
    "transposed": TRUTH,
    "rows": Key(
        "[first row, row behind the last]", lambda value: _is_list(value, _is_whole, 2) and value[0] < value[1]
    ),
    "part": Key("[index, number of equal parts]", lambda value: _is_list(value, _is_whole, 2) and value[0] < value[1]),
}
"""The keys of a parameter's table."""
_COMMON: Final = {
    "name": TEXT,
    "kind": _one_of(*KINDS),
    "preset": _one_of(*PRESETS),
    "file": TEXT,
    "dtype": _one_of(*get_args(Dtype)),
    "numbers": Key(
        'block numbers, such as 3, "0-5", "0-2,5" or [0, 2]',
        lambda value: _is_whole(value) or isinstance(value, str) or _is_list(value, _is_whole),
    ),
    "prefix": TEXT,
    "config": Key("the path of a config.json, or false", lambda value: isinstance(value, str) or value is False),
    "parameters": Key("a table of tensors by parameter", lambda value: isinstance(value, dict)),
}
_HEADS: Final = {"heads": LENGTH, "kv_heads": LENGTH, "head_dim": LENGTH, "value_dim": LENGTH}
_WIDTHS: Final = {"inputs": LENGTH, "contexts": LENGTH, "outputs": LENGTH}
_SEEN: Final = {"causal": TRUTH, "window": WINDOW, "scale": NUMBER}
_SCORES: Final = {
    **_SEEN,
    "softcap": Key("a number of at least 0 that float32 has room for", lambda value: _is_number(value) and value >= 0),
    "alibi": Key(
        "slopes that float32 has room for, one a head, or geometric",
        lambda value: value == "geometric" or _is_list(value, _is_number),
    ),
    "rotary": Key(
        f"a table of rotary embedding ({', '.join(_ROTARY)}), or false",
        lambda value: isinstance(value, dict) or value is False,
        _ROTARY,
    ),
}
_CROSS: Final = _HEADS | {key: _SCORES[key] for key in ("causal", "window", "scale", "softcap")}

KEYS: Final[Mapping[LayerKind, Mapping[str, Key]]] = {
    "multi_head": _COMMON | _HEADS | _WIDTHS | _SCORES,
    "single_head": _COMMON | {"head_dim": LENGTH, "value_dim": LENGTH} | _WIDTHS | _SCORES,
    "additive": _COMMON | {"units": LENGTH} | _WIDTHS | _SEEN,
    "general": _COMMON | _WIDTHS | _SEEN,
    "transformer": _COMMON
    | {"blocks": LENGTH, "width": LENGTH, "hidden": LENGTH, "contexts": LENGTH}
    | _HEADS
    | _SCORES
    | {
        "cross": _table("the cross-attention", _CROSS),
        "pre_norm": TRUTH,
        "activation": _one_of(*get_args(Activation)),
        "norm": _table("the norms", _NORM),
        "embedding": Key(
            f"a table of the embedding ({', '.join(_EMBEDDING)}), or false, which leaves it out",
            lambda value: isinstance(value, dict) or value is False,
            _EMBEDDING,
        ),
        "final_norm": FALSE,
    },
}
"""The keys of each kind of layer."""


def check(table: Mapping[str, Any], keys: Mapping[str, Key], scope: str = "", what: str = "") -> Iterator[Wrong]:
    """What is wrong with a table's keys and values."""
    for name, value in table.items():
        key = keys.get(name)
        if key is None:
            close = difflib.get_close_matches(name, keys, n=1)
            hint = f", such as {close[0]}" if close else f" ({', '.join(keys)})"
            yield Wrong(scope + name, f"a key of {what or scope.rstrip('.')}{hint}", "one that there is not")
        elif not key.valid(value):
            yield Wrong(scope + name, key.expected, repr(value)[:100])
        elif isinstance(value, dict) and key.table:
            yield from check(value, key.table, f"{scope}{name}.")


def flatten(table: Mapping[str, Any], kind: LayerKind) -> dict[str, Any]:
    """The options of a checked table: all keys except those that every layer has. A nested table itself is true."""
    options: dict[str, Any] = {}
    for name, value in table.items():
        if name in _COMMON or name not in KEYS[kind]:
            continue
        options[name] = True if isinstance(value, dict) else value
        if isinstance(value, dict):
            options |= {f"{name}.{inner}": item for inner, item in value.items()}
    return options


def belongs(option: str, kind: LayerKind) -> bool:
    """Whether a kind of layer has an option, by its dotted name."""
    name, _, inner = option.partition(".")
    key = None if name in _COMMON else KEYS[kind].get(name)
    return key is not None and (not inner or inner in key.table)


def declares(options: Mapping[str, Any], option: str, kind: LayerKind) -> bool:
    """Whether the flat options of a definition say what an option of this kind of layer is.

    A table says it of what is in it, and of itself as a whole only if `false` takes its place.
    """
    name, _, inner = option.partition(".")
    if KEYS[kind][name].table and (options.get(name) is False or not inner):
        return options.get(name) is False
    return option in options or _INSTEAD.get(option) in options
