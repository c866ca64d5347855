"""The text of `layers.toml`: what it says about each layer, before any checkpoint is opened.

In: a file. Out: a `Definition` for each layer (one per number where `numbers` makes several), and all that is wrong
with the keys and their values. docs/layers.md describes the file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from attnserve_server.layers.errors import Defect, LayerError, unnamed, words_of
from attnserve_server.layers.keys import KEYS, KINDS, SOURCE, Wrong, check, flatten
from attnserve_server.layers.presets import PRESETS
from attnserve_server.layers.sources import Reference, numbered
from attnserve_server.layers.specification import Dtype, LayerKind

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,127}")
"""What layers may be called: callers send the names, and metrics are labelled with them."""
MAX_LAYERS: Final = 10_000
"""The most layers of a file: mistyped numbers are an error rather than an endless list."""
_RANGE: Final = re.compile(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?")
_PLACE: Final = "{n}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What a file of definitions says about one layer. `file` and `config` are relative to the model directory.

    `options` are flat, by dotted name. `parameters` has None for those that are left out; in a transformer, `{n}` in
    their names is a block's number.
    """

    name: str
    kind: LayerKind
    file: str
    dtype: Dtype | None
    preset: str | None
    prefix: str | None
    number: int | None
    config: str | Literal[False] | None
    options: Mapping[str, Any]
    parameters: Mapping[str, Reference | None]


def read_document(path: Path) -> tuple[list[Definition], list[Defect]]:
    """The definitions of a file, and what is wrong with the others.

    Raises LayerError if it is not a file of definitions at all.
    """
    try:
        document = tomllib.loads(path.read_bytes().decode())
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise LayerError([Defect("", "", path.name, "TOML", str(error))]) from None
    except OSError as error:
        raise LayerError([Defect("", "", path.name, "a readable file", words_of(error))]) from None
    tables = document.pop("layers", None)
    defects = [Defect("", key, path.name, "nothing but [[layers]]", "another key") for key in document]
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        found = "nothing" if tables is None else repr(tables)[:100]
        raise LayerError([*defects, Defect("", "layers", path.name, "[[layers]], one or more", found)])
    definitions: dict[str, Definition] = {}
    for index, table in enumerate(tables, start=1):
        name = table.get("name")
        label = name if isinstance(name, str) and name else unnamed(index)
        wrong = list(_check(table))
        if not wrong:
            for definition in _definitions(table, wrong):
                if definition.name in definitions:
                    wrong.append(Wrong("name", "a name that no other layer has", repr(definition.name)))
                definitions[definition.name] = definition
        defects += [Defect(label, key, path.name, expected, found) for key, expected, found in wrong]
        if len(definitions) > MAX_LAYERS:
            raise LayerError([*defects, Defect(label, "numbers", path.name, f"at most {MAX_LAYERS} layers", "more")])
    return list(definitions.values()), defects


def _kind(table: Mapping[str, Any]) -> LayerKind | None:
    """The kind of a table's layers; None if it names none that there is."""
    preset = PRESETS.get(str(table.get("preset")))
    declared = table.get("kind", preset.kind if preset else None)
    return next((kind for kind in KINDS if kind == declared), None)


def _check(table: Mapping[str, Any]) -> Iterator[Wrong]:
    """What is wrong with a table by itself."""
    kind = _kind(table)
    keys = KEYS[kind] if kind else {name: key for keys in KEYS.values() for name, key in keys.items()}
    yield from check(table, keys, what=f"{kind or 'such'} layers")
    if kind is None and "kind" not in table and "preset" not in table:
        yield Wrong("kind", f"{' or '.join(KINDS)}, or a preset", "nothing")
    yield from (Wrong(key, "text", "nothing") for key in ("name", "file") if key not in table)
    preset = PRESETS.get(str(table.get("preset")))
    if preset is None and "preset" not in table and "parameters" not in table:
        yield Wrong("parameters", "a table of tensors by parameter, or a preset", "nothing")
    if preset is not None and kind != preset.kind:
        yield Wrong("kind", f"{preset.kind}, which the preset is", repr(kind))
    if table.get("config") and (preset is None or preset.family is None):
        yield Wrong("config", "a preset that reads one (bert, gpt2, llama)", repr(table.get("preset")))
    if preset is not None and "numbers" not in table and not preset.many and preset.has_blocks:
        yield Wrong("numbers", "the number of the block that has the attention", "nothing")
    if isinstance(table.get("parameters"), dict):
        for name, value in _leaves(table["parameters"]):
            yield from _check_parameter(name, value, table, kind)
    if "numbers" not in table:
        for key in ("name", "file", "prefix"):
            if _PLACE in str(table.get(key, "")):
                yield Wrong(key, f"numbers, for {_PLACE} to stand for", "none")
    elif isinstance(declared := table["numbers"], list | str | int) and not isinstance(declared, bool):
        numbers, named = _numbers(declared), table.get("name")
        if not numbers:
            yield Wrong("numbers", KEYS["multi_head"]["numbers"].expected, repr(declared)[:100])
        elif len(set(map(str, numbers))) < len(numbers):
            yield Wrong("numbers", "each number once", repr(declared)[:100])
        elif len(numbers) > 1 and isinstance(named, str) and _PLACE not in named:
            yield Wrong("name", f"{_PLACE} in it, for there are several numbers", repr(named)[:100])


def _leaves(table: Mapping[str, Any], scope: str = "") -> Iterator[tuple[str, Any]]:
    """The parameters of a table, at any depth: to TOML, `query.weight = ...` is a table in a table."""
    for name, value in table.items():
        if isinstance(value, dict) and "tensor" not in value and value:
            yield from _leaves(value, f"{scope}{name}.")
        else:
            yield scope + name, value


def _check_parameter(name: str, value: Any, table: Mapping[str, Any], kind: LayerKind | None) -> Iterator[Wrong]:
    key = f"parameters.{name}"
    if isinstance(value, dict):
        yield from check(value, SOURCE, scope=f"{key}.")
        if "tensor" not in value:
            yield Wrong(key, "a tensor", "an empty table")
        if "rows" in value and "part" in value:
            yield Wrong(key, "rows or part", "both")
        tensor = value.get("tensor")
    else:
        tensor = value
        if not isinstance(value, str) and value is not False:
            yield Wrong(key, "a tensor's name, a table that begins with it, or false", repr(value)[:100])
    if value is False and "preset" not in table:
        yield Wrong(key, "a tensor (false leaves out what a preset has)", "false")
    if not isinstance(tensor, str):
        return
    if kind == "transformer" and (_PLACE in name) != (_PLACE in tensor):
        yield Wrong(key, f"{_PLACE} in the names of both parameter and tensor, or neither", repr(tensor))
    elif kind != "transformer" and (_PLACE in name or (_PLACE in tensor and "numbers" not in table)):
        yield Wrong(key, f"numbers, for {_PLACE} of the tensor's name to stand for", repr(tensor))


def _numbers(declared: int | str | list[int]) -> list[int]:
    """The numbers that a key declares; none if it is malformed."""
    if isinstance(declared, int):
        return [] if isinstance(declared, bool) else [declared]
    if isinstance(declared, list):
        return declared
    numbers: list[int] = []
    for part in declared.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            return []
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return numbers


def _definitions(table: Mapping[str, Any], wrong: list[Wrong]) -> Iterator[Definition]:
    """The layers of a checked table: one, or one for each of its numbers."""
    kind = _kind(table)
    assert kind is not None  # for it is checked
    references = {name: _reference(value) for name, value in _leaves(table.get("parameters", {}))}
    for number in _numbers(table["numbers"]) if "numbers" in table else (None,):

        def filled(text: str, number: int | None = number) -> str:
            return text if number is None else numbered(text, number)

        parameters = references
        if number is not None and kind != "transformer":
            parameters = {name: item and item.numbered(number) for name, item in references.items()}
        name = filled(table["name"])
        if NAME.fullmatch(name) is None:
            wrong.append(Wrong("name", "1 to 128 letters, digits and _ . : / -, a letter or digit first", repr(name)))
            return
        yield Definition(
            name=name,
            kind=kind,
            file=filled(table["file"]),
            dtype=table.get("dtype"),
            preset=table.get("preset"),
            prefix=filled(table["prefix"]) if "prefix" in table else None,
            number=number,
            config=table.get("config"),
            options=flatten(table, kind),
            parameters=parameters,
        )


def _reference(value: Any) -> Reference | None:
    if value is False:
        return None
    if isinstance(value, str):
        return Reference(value)
    pairs = {key: (value[key][0], value[key][1]) for key in ("rows", "part") if key in value}
    return Reference(value["tensor"], value.get("transposed", False), **pairs)
