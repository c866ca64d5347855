"""Wrong definitions: each defect has its own message, all are reported at once, and nothing else happens."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from defined import GENERAL, HEAD, MULTI_HEAD, PLAIN, TRANSFORMER, directory, wrong
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from attnserve_server.layers.checkpoint import load
from attnserve_server.layers.definitions import examine, load_definitions
from attnserve_server.layers.errors import LayerError
from attnserve_server.layers.keys import KEYS

__all__ = ["directory"]


def test_rows_that_make_no_heads_are_named_with_their_file(directory: Path) -> None:
    """Either the definition or the tensor is wrong: the defect locates both."""
    (defect,) = wrong(directory, HEAD + MULTI_HEAD.replace("4", "3"))
    assert (defect.file, defect.parameter, defect.found) == ("layers.toml", "heads", "3")
    assert defect.expected == "a divisor of the 16 rows of query.weight in file.safetensors"


WRONG: dict[str, tuple[str, str, str]] = {
    "unknown key": (PLAIN + "cauzal = true", "cauzal", "a key of general layers, such as causal"),
    "key of another kind": (PLAIN + "heads = 4", "heads", "a key of general layers"),
    "no name": ('kind = "general"\nfile = "x"\nparameters = {}', "name", "text"),
    "no file": ('name = "a"\nkind = "general"\nparameters = {}', "file", "text"),
    "no kind": (HEAD + "parameters = {}", "kind", "multi_head or single_head"),
    "another kind": (HEAD + 'kind = "recurrent"\nparameters = {}', "kind", "multi_head or single_head"),
    "no parameters": (GENERAL, "parameters", "a table of tensors"),
    "another preset": (HEAD + 'preset = "elmo"', "preset", "torch.multihead_attention or"),
    "a preset of another kind": (HEAD + 'kind = "multi_head"\npreset = "bert"', "kind", "transformer, which"),
    "whole numbers": (HEAD + MULTI_HEAD.replace("heads = 4", "heads = 4.0"), "heads", "a whole number from 1"),
    "truth is no number": (HEAD + "head_dim = true" + MULTI_HEAD, "head_dim", "a whole number from 1 to 2147483647"),
    "truth": (PLAIN + 'causal = "yes"', "causal", "true or false"),
    "a name with blanks": (PLAIN.replace('"a"', '"a b"'), "name", "1 to 128 letters"),
    "an empty name": (PLAIN.replace('"a"', '""'), "name", "1 to 128 letters"),
    "a name that is no text": (PLAIN.replace('"a"', "3"), "name", "text"),
    "window": (PLAIN + "window = [1]", "window", "[left, right]"),
    "window below -1": (PLAIN + "window = [-2, 0]", "window", "[left, right]"),
    "infinite scale": (PLAIN + "scale = inf", "scale", "a number that float32 has room for"),
    "NaN": (HEAD + "softcap = nan" + MULTI_HEAD, "softcap", "a number of at least 0"),
    "a window beyond any length": (PLAIN + "window = [2147483648, 0]", "window", "[left, right], each a"),
    "an offset beyond any length": (
        HEAD + "rotary = { base = 1.0, offset = 9223372036854775807 }" + MULTI_HEAD,
        "rotary.offset",
        "a whole number from -2147483647 to 2147483647",
    ),
    "a scale beyond float32": (PLAIN + "scale = 1e300", "scale", "a number that float32 has room for"),
    "a whole scale beyond any float": (PLAIN + f"scale = {10**400}", "scale", "a number that float32 has room for"),
    "a slope beyond float32": (HEAD + "alibi = [1e39, 1, 1, 1]" + MULTI_HEAD, "alibi", "slopes that float32 has room"),
    "outputs without their map": (
        HEAD + "outputs = 7" + MULTI_HEAD.replace('output.weight = "o"\noutput.bias = "bo"\n', ""),
        "outputs",
        "24, the values of the heads, as there is no output.weight",
    ),
    "outputs of contexts": (PLAIN + "outputs = 12", "outputs", "10, the width of the context"),
    "a bias without its map": (
        HEAD + MULTI_HEAD.replace('output.weight = "o"\n', ""),
        "output.bias",
        "a parameter of this layer (query.weight",
    ),
    "a bias without values": (PLAIN.replace("}", ', value.bias = "bv" }'), "value.bias", "a parameter of this layer"),
    "a block without the way back to its width": (
        HEAD
        + TRANSFORMER.replace('"blocks.{n}.self.output.weight" = "{n}.square"\n', "").replace(
            'self.value.weight" = "{n}.square"', 'self.value.weight" = { tensor = "{n}.square", rows = [0, 4] }'
        ),
        "output.weight",
        "a map of the 4 values of the heads to 16",
    ),
    "no position that is used": (
        HEAD + "embedding = { position_offset = 30 }" + TRANSFORMER + '"embedding.position.weight" = "table"',
        "embedding.position_offset",
        "less than the 30 positions that there are",
    ),
    "inner key": (HEAD + "rotary = { bass = 1.0 }" + MULTI_HEAD, "rotary.bass", "a key of rotary, such as base"),
    "inner value": (HEAD + 'rotary = { base = "x" }' + MULTI_HEAD, "rotary.base", "a number above 0"),
    "rotary without base": (HEAD + "rotary = { width = 4 }" + MULTI_HEAD, "rotary.base", "the base of the angles"),
    "odd rotary": (HEAD + "rotary = { base = 1.0, width = 3 }" + MULTI_HEAD, "rotary", "an even number of a head's 4"),
    "wide rotary": (HEAD + "rotary = { base = 1.0, width = 6 }" + MULTI_HEAD, "rotary", "an even number of a head's 4"),
    "number of slopes": (HEAD + "alibi = [1.0]" + MULTI_HEAD, "alibi", "4 slopes, one a head"),
    "heads that do not divide": (HEAD + MULTI_HEAD.replace("4", "3"), "heads", "a divisor of the 16 rows"),
    "no heads": (HEAD + MULTI_HEAD.replace("heads = 4", ""), "heads", "a number of heads"),
    "odd groups": (HEAD + "kv_heads = 3" + MULTI_HEAD, "kv_heads", "a divisor of the 4 query heads"),
    "a parameter that there is not": (GENERAL + 'parameters.query.weight = "w"', "query.weight", "a parameter of gen"),
    "a misspelt parameter": (
        HEAD + MULTI_HEAD.replace("query.weight", "query.weigth"),
        "query.weigth",
        "a parameter of multi_head layers, such as query.weight",
    ),
    "a misspelt parameter of blocks": (
        HEAD + TRANSFORMER.replace("}.self.query", "}.self.querry"),
        "blocks.2.self.querry.weight",
        "a parameter of transformer layers, such as blocks.0.self.query.weight",
    ),
    "one more parameter": (PLAIN.replace("{", '{ key.weight = "k", '), "key.weight", "a parameter of this layer"),
    "a missing tensor": (PLAIN.replace('"w"', '"nothing"'), "score.weight", "tensor 'nothing'"),
    "a number for a tensor": (PLAIN.replace('"w"', "3"), "parameters.score.weight", "a tensor's name"),
    "nothing to leave out": (PLAIN.replace('"w"', "false"), "parameters.score.weight", "a tensor (false leaves out"),
    "source key": (PLAIN.replace('"w"', '{ tensor = "w", turned = true }'), "parameters.score.weight.turned", "a key"),
    "rows backwards": (PLAIN.replace('"w"', '{ tensor = "w", rows = [3, 1] }'), "parameters.score.weight.rows", "[f"),
    "rows and part": (
        PLAIN.replace('"w"', '{ tensor = "w", rows = [0, 1], part = [0, 2] }'),
        "parameters.score.weight",
        "rows or part",
    ),
    "a tensor without rows": (HEAD + MULTI_HEAD.replace('"q"', '"none"'), "head_dim", "a length, as no tensor"),
    "uneven parts": (PLAIN.replace('"w"', '{ tensor = "w", part = [0, 5] }'), "score.weight", "'w' in 5 equal parts"),
    "rows beyond the end": (
        HEAD + MULTI_HEAD.replace('"bq"', '{ tensor = "q", rows = [0, 99] }'),
        "query.bias",
        "[16]",
    ),
    "numbers": (PLAIN + 'numbers = "0-"', "numbers", "block numbers"),
    "numbers backwards": (PLAIN + 'numbers = "3-1"', "numbers", "block numbers"),
    "no numbers": (PLAIN + "numbers = []", "numbers", "block numbers"),
    "true numbers": (PLAIN + "numbers = true", "numbers", "block numbers"),
    "a place without numbers": (PLAIN.replace('"a"', '"a{n}"'), "name", "numbers, for {n} to stand for"),
    "a tensor's place without numbers": (PLAIN.replace('"w"', '"{n}"'), "parameters.score.weight", "numbers, for {n}"),
    "one name for several": (PLAIN + 'numbers = "0-1"', "name", "{n} in it, for there are several numbers"),
    "too many": (PLAIN.replace('"a"', '"{n}"') + 'numbers = "0-99999"', "numbers", "at most 10000 layers"),
    "half a place": (
        HEAD + TRANSFORMER.replace('"{n}.square"', '"square"', 1),
        "parameters.blocks.{n}.self.query.weight",
        "{n} in the names of both",
    ),
    "no blocks": (HEAD + TRANSFORMER.replace("{n}.", "{n}.none."), "blocks", "1 to 10000 blocks"),
    "too many blocks": (HEAD + "blocks = 999999" + TRANSFORMER, "blocks", "1 to 10000 blocks"),
    "pre_norm is not guessed": (HEAD + TRANSFORMER.replace("pre_norm = false", ""), "pre_norm", "true (x + f(norm"),
    "nor is the activation": (HEAD + TRANSFORMER.replace('activation = "gelu"', ""), "activation", "an activation"),
    "nor the epsilon": (HEAD + TRANSFORMER.replace(", epsilon = 1e-5", ""), "norm.epsilon", "a small number"),
    "activation": (HEAD + TRANSFORMER.replace('"gelu"', '"mish"'), "activation", "relu or gelu"),
    "a preset of one block without number": (HEAD + 'preset = "bert.attention"', "numbers", "the number of the block"),
    "a config that nothing reads": (
        HEAD + 'preset = "torch.transformer_encoder"\nconfig = "c.json"',
        "config",
        "a preset that reads one",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_told(directory: Path, what: str) -> None:
    text, key, expected = WRONG[what]
    try:
        defects = wrong(directory, text)
    except LayerError as error:
        defects = list(error.defects)
    told = {defect.parameter: defect for defect in defects}
    assert key in told, defects
    assert told[key].expected.startswith(expected), told[key]
    name = tomllib.loads(f"[[layers]]\n{text}")["layers"][0].get("name")
    assert told[key].layer == (name if isinstance(name, str) and name else "number 1")
    assert re.fullmatch(r"(layers\.toml|file\.safetensors)", told[key].file)


def test_a_misspelt_parameter_is_all_that_is_told_of_lengths_that_it_would_have_told(directory: Path) -> None:
    defects = wrong(directory, HEAD + MULTI_HEAD.replace("query.weight", "query.weigth"))
    assert [defect.parameter for defect in defects] == ["query.weigth"]


@pytest.mark.parametrize("text", [MULTI_HEAD, TRANSFORMER])
def test_no_parameter_of_a_kind_is_taken_for_a_stranger(directory: Path, text: str) -> None:
    """Where something else is wrong, all are looked at."""
    defects = wrong(directory, HEAD + text.replace("heads = 4", "heads = 3"))
    assert [defect.parameter for defect in defects] == ["heads"]


def test_all_that_is_wrong_is_told_at_once(directory: Path) -> None:
    """In the keys of several layers, in a checkpoint and in a missing file."""
    defects = wrong(
        directory,
        PLAIN + 'cauzal = true\nscale = "x"\ndtype = "int8"',
        PLAIN.replace('"a"', '"b"').replace('"w"', '"x"'),
        PLAIN.replace('"a"', '"c"').replace("file.s", "nothing.s"),
        PLAIN.replace('"a"', '"d"'),
        PLAIN.replace('"a"', '"d"'),
        HEAD.replace('"a"', '"e"') + "inputs = 13\noutputs = 8" + MULTI_HEAD.replace('"bk"', '"bv"'),
    )
    assert [(defect.layer, defect.parameter) for defect in defects] == [
        ("a", "cauzal"),
        ("a", "scale"),
        ("a", "dtype"),
        ("d", "name"),
        ("b", "score.weight"),
        ("c", ""),
        ("e", "query.weight"),
        ("e", "key.bias"),
        ("e", "output.weight"),
        ("e", "output.bias"),
    ]
    found = {defect.parameter: (defect.expected, defect.found) for defect in defects if defect.layer == "e"}
    assert found["query.weight"] == ("[16, 13]", "[16, 12] ('q')")
    assert found["output.bias"] == ("[8]", "[7] ('bo')")


NO_DOCUMENTS = {
    "no TOML": "[[layers",
    "not UTF-8": b"\xff\xfe",
    "empty": "",
    "no layers": "[other]\nname = 1",
    "one table": "[layers]\nname = 1",
    "a list of numbers": "layers = [1]",
    "an empty list": "layers = []",
}


@pytest.mark.parametrize("what", NO_DOCUMENTS)
def test_what_is_no_file_of_definitions(tmp_path: Path, what: str) -> None:
    text = NO_DOCUMENTS[what]
    (tmp_path / "layers.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(LayerError, match=r"layers\.toml: "):
        load_definitions(tmp_path / "layers.toml", tmp_path, [])


@pytest.mark.parametrize(("text", "found"), [("", "nothing"), ("layers = []", "[]"), ("layers = 3", "3")])
def test_what_there_is_instead_of_layers_is_told(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "layers.toml").write_text(text)
    with pytest.raises(LayerError) as caught:
        load_definitions(tmp_path / "layers.toml", tmp_path, [])
    assert str(caught.value) == f"layers.toml: layers: expected [[layers]], one or more, found {found}"


def test_a_layer_without_a_name_is_told_by_its_number_without_quotes(directory: Path) -> None:
    (unnamed,) = wrong(directory, PLAIN.replace('name = "a"\n', ""))
    assert str(unnamed) == "layers.toml: layer number 1: name: expected text, found nothing"
    (named,) = wrong(directory, PLAIN + "heads = 4")
    assert str(named).startswith("layers.toml: layer 'a': heads: ")


def test_a_file_of_definitions_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LayerError, match=r"layers\.toml: expected a readable file, found No such file"):
        load_definitions(tmp_path / "layers.toml", tmp_path, [])


def test_another_key_beside_the_layers(directory: Path) -> None:
    path = directory / "layers.toml"
    path.write_text(f"version = 1\n[[layers]]\n{PLAIN}")
    (defect,) = examine(path, directory).defects
    assert (defect.parameter, defect.layer) == ("version", "")


SIDES = st.one_of(st.integers(0, 4), st.sampled_from([6, 8, 12, 16]))
NAMES = (
    "query.weight",
    "key.weight",
    "value.weight",
    "output.weight",
    "query.bias",
    "score.weight",
    "bias",
    "norm.weight",
)
OPTIONS = {
    "heads": st.integers(1, 5),
    "kv_heads": st.integers(1, 5),
    "head_dim": st.integers(1, 5),
    "value_dim": st.integers(1, 5),
    "inputs": st.integers(1, 16),
    "contexts": st.integers(1, 16),
    "units": st.integers(1, 16),
    "alibi": st.just('"geometric"'),
    "rotary": st.sampled_from(["{ base = 10.0 }", "{ base = 1, fraction = 0.3 }", "{ offset = 1 }"]),
}


@given(
    kind=st.sampled_from(["multi_head", "single_head", "additive", "general", "transformer"]),
    shapes=st.dictionaries(st.sampled_from(NAMES), st.lists(SIDES, max_size=3)),
    options=st.fixed_dictionaries({}, optional=OPTIONS),
)
def test_any_shapes_make_a_layer_that_loads_or_defects(
    tmp_path_factory: pytest.TempPathFactory, kind: str, shapes: dict[str, list[int]], options: dict[str, Any]
) -> None:
    """No combination of shapes and options causes another exception, or a layer that cannot be loaded."""
    directory = tmp_path_factory.getbasetemp()
    scope = "blocks.0.self." if kind == "transformer" else ""
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, directory / "random.safetensors")
    lines = [f"{key} = {value}" for key, value in options.items() if key in KEYS[kind]]
    if kind == "transformer":
        lines += ["pre_norm = true", 'activation = "relu"', 'norm = { kind = "rms", epsilon = 1e-5 }', "hidden = 2"]
    lines += ["[layers.parameters]", *(f'"{scope}{name}" = "{name}"' for name in shapes)]
    (directory / "random.toml").write_text(
        f'[[layers]]\nname = "a"\nfile = "random.safetensors"\nkind = "{kind}"\n' + "\n".join(lines)
    )
    examination = examine(directory / "random.toml", directory)
    assert len(examination.layers) + bool(examination.defects) == 1
    for layer in examination.layers:
        parameters = load(layer, directory, "cpu")
        assert {name: tuple(tensor.shape) for name, tensor in parameters.items()} == layer.architecture.shapes()
