"""`layers.toml`: what it defines, what is told from the shapes, and what is wrong with it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import forward
import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from attnserve_server.layers.checkpoint import load
from attnserve_server.layers.definitions import examine, load_definitions
from attnserve_server.layers.errors import Defect, LayerError
from attnserve_server.layers.keys import KEYS, SOURCE
from attnserve_server.layers.presets import PRESETS
from attnserve_server.layers.specification import (
    Architecture,
    Attention,
    Block,
    Embedding,
    FeedForward,
    LayerSpecification,
    LearnedScore,
    Norm,
    ParameterSource,
    Rotary,
    Transformer,
)

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "layers.md"

SHAPES: dict[str, tuple[int, ...]] = {
    "q": (16, 12), "k": (8, 10), "v": (12, 10), "o": (7, 24), "bq": (16,), "bk": (8,), "bv": (12,), "bo": (7,),
    "square": (16, 16), "vector": (16,), "row": (1, 16), "wide": (16, 12), "context": (16, 10), "w": (12, 10),
    "fused": (12, 48), "fused_bias": (48,), "norm": (16,), "up": (40, 16), "down": (16, 40), "table": (30, 16),
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    tensors |= {f"{n}.{name}": torch.randn(SHAPES[name]) for n in range(3) for name in ("square", "norm", "up", "down")}
    save_file(tensors | {"none": torch.zeros(0, 12)}, directory / "file.safetensors")
    save_file({"half": torch.zeros(4, 4).half(), "single": torch.zeros(4, 4)}, directory / "mixed.safetensors")
    return directory


def define(directory: Path, *tables: str) -> list[LayerSpecification]:
    path = directory / "layers.toml"
    path.write_text("".join(f"[[layers]]\n{table}\n" for table in tables))
    return load_definitions(path, directory)


def one(directory: Path, text: str) -> Architecture:
    (layer,) = define(directory, f'name = "one"\nfile = "file.safetensors"\n{text}')
    return layer.architecture


def wrong(directory: Path, *tables: str) -> list[Defect]:
    path = directory / "layers.toml"
    path.write_text("".join(f"[[layers]]\n{table}\n" for table in tables))
    return list(examine(path, directory).defects)


MULTI_HEAD = """
kind = "multi_head"
heads = 4
[layers.parameters]
query.weight = "q"
query.bias = "bq"
key.weight = "k"
key.bias = "bk"
value.weight = "v"
value.bias = "bv"
output.weight = "o"
output.bias = "bo"
"""


def test_dimensions_are_told_from_the_shapes(directory: Path) -> None:
    """Four heads of 4, half as many for keys and values, which are 6 wide."""
    expected = Attention(
        inputs=12,
        contexts=10,
        outputs=7,
        heads=4,
        kv_heads=2,
        head_dim=4,
        value_dim=6,
        query_bias=True,
        key_bias=True,
        value_bias=True,
        output_bias=True,
    )
    assert one(directory, MULTI_HEAD) == expected
    assert one(directory, MULTI_HEAD.replace("heads = 4", "head_dim = 4")) == expected
    declared = "heads = 4\nkv_heads = 2\nhead_dim = 4\nvalue_dim = 6\ninputs = 12\ncontexts = 10\noutputs = 7"
    assert one(directory, MULTI_HEAD.replace("heads = 4", declared)) == expected


def test_what_is_loaded_is_what_the_definition_says(directory: Path) -> None:
    (layer,) = define(directory, f'name = "one"\nfile = "file.safetensors"\n{MULTI_HEAD}')
    assert isinstance(layer.architecture, Attention)
    parameters = {name: tensor.double().numpy() for name, tensor in load(layer, directory).items()}
    tensors = load_file(directory)
    rng = np.random.default_rng(1)
    x, context = rng.standard_normal((5, 12)), rng.standard_normal((6, 10))
    query = (x @ tensors["q"].T + tensors["bq"]).reshape(5, 4, 4).swapaxes(0, 1)
    key = (context @ tensors["k"].T + tensors["bk"]).reshape(6, 2, 4).swapaxes(0, 1)
    value = (context @ tensors["v"].T + tensors["bv"]).reshape(6, 2, 6).swapaxes(0, 1)
    heads = oracle.attend(query, key, value).output.swapaxes(0, 1).reshape(5, 24)
    found = forward.attention(x, context, layer.architecture, parameters)
    np.testing.assert_allclose(found, heads @ tensors["o"].T + tensors["bo"], rtol=1e-12)


def load_file(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor.double().numpy() for name, tensor in load_file(directory / "file.safetensors").items()}


def test_options_of_attention(directory: Path) -> None:
    options = """
    causal = true
    window = [7, -1]
    scale = 1
    softcap = 30
    alibi = "geometric"
    rotary = { base = 500.0, fraction = 0.5, interleaved = true, offset = 3 }
    """
    found = one(directory, options + MULTI_HEAD)
    assert isinstance(found, Attention)
    assert (found.causal, found.window, found.scale, found.softcap) == (True, (7, -1), 1, 30.0)
    assert found.alibi == (2**-2, 2**-4, 2**-6, 2**-8)
    assert found.rotary == Rotary(width=2, base=500.0, interleaved=True, offset=3)
    found = one(directory, "alibi = [1, 0.5, 0.25, 0]\nrotary = { base = 10, width = 4 }" + MULTI_HEAD)
    assert isinstance(found, Attention)
    assert (found.alibi, found.rotary) == ((1.0, 0.5, 0.25, 0.0), Rotary(width=4, base=10.0))
    assert getattr(one(directory, "rotary = false" + MULTI_HEAD), "rotary", "") is None


def test_no_output_projection(directory: Path) -> None:
    found = one(
        directory,
        'kind = "multi_head"\nheads = 4\nparameters = {query.weight = "q", key.weight = "k", value.weight = "v"}',
    )
    assert isinstance(found, Attention)
    assert (found.output, found.outputs, found.query_bias) == (False, 24, False)


def test_single_head(directory: Path) -> None:
    found = one(
        directory,
        'kind = "single_head"\nparameters = {query.weight = "wide", key.weight = "context", value.weight = "v"}',
    )
    assert isinstance(found, Attention)
    assert (found.heads, found.kv_heads, found.head_dim, found.value_dim, found.outputs) == (1, 1, 16, 12, 12)
    assert [
        item.parameter
        for item in wrong(
            directory, 'name = "a"\nkind = "single_head"\nfile = "file.safetensors"\nheads = 2\nparameters = {}'
        )
    ] == ["heads"]


def test_learned_scores(directory: Path) -> None:
    additive = """
    kind = "additive"
    causal = true
    scale = 0.5
    [layers.parameters]
    query.weight = "wide"
    key.weight = "context"
    bias = "vector"
    score.weight = "row"
    value.weight = "v"
    """
    assert one(directory, additive) == LearnedScore(
        score="additive",
        inputs=12,
        contexts=10,
        outputs=12,
        units=16,
        bias=True,
        value=True,
        causal=True,
        scale=0.5,
    )
    summed = 'kind = "additive"\nparameters = { query.weight = "wide", key.weight = "context" }'
    assert one(directory, summed) == LearnedScore(
        score="additive", inputs=12, contexts=10, outputs=10, units=16, score_weight=False
    )
    general = (
        'kind = "general"\nwindow = [1, 2]\nparameters = { score.weight = "w", value.weight = "v", value.bias = "bv" }'
    )
    assert one(directory, general) == LearnedScore(
        score="general", inputs=12, contexts=10, outputs=12, value=True, value_bias=True, window=(1, 2)
    )


def test_rows_parts_and_transposition(directory: Path) -> None:
    text = """
    name = "one"
    file = "file.safetensors"
    kind = "multi_head"
    heads = 4
    [layers.parameters]
    query.weight = { tensor = "fused", transposed = true, rows = [0, 16] }
    "key.weight" = { tensor = "fused", transposed = true, part = [1, 3] }
    [layers.parameters.value]
    weight = { tensor = "fused", transposed = true, part = [2, 3] }
    bias = { tensor = "fused_bias", part = [2, 3] }
    """
    (layer,) = define(directory, text)
    assert layer.parameters["query.weight"] == ParameterSource(tensor="fused", transposed=True, start=0, stop=16)
    assert layer.parameters["value.bias"] == ParameterSource(tensor="fused_bias", start=32, stop=48)
    tensors, loaded = load_file(directory), load(layer, directory)
    for index, name in enumerate(("query", "key", "value")):
        np.testing.assert_array_equal(
            loaded[f"{name}.weight"].numpy(), tensors["fused"].T[16 * index : 16 * index + 16].astype(np.float32)
        )


def test_axes_of_length_one_do_not_count(tmp_path: Path) -> None:
    """Of matrices and of norms, all of which tell dimensions: the same layers as without them."""
    torch.manual_seed(4)
    flat = {name: torch.randn(SHAPES[name]) for name in ("q", "k", "v", "o", "bq", "bk", "bv", "bo", "fused")}
    flat |= {f"0.{name}": torch.randn(SHAPES[name]) for name in ("square", "norm", "up", "down")}
    parts = "".join(
        f'{name}.weight = {{ tensor = "fused", transposed = true, part = [{index}, 3] }}\n'
        for index, name in enumerate(("query", "key", "value"))
    )
    texts = MULTI_HEAD, f'kind = "multi_head"\nheads = 4\n[layers.parameters]\n{parts}', TRANSFORMER
    tables = [f'name = "{n}"\nfile = "file.safetensors"\n{text}' for n, text in enumerate(texts)]
    loaded = []
    for axis in (None, 0, -1):
        tensors = flat if axis is None else {name: tensor.unsqueeze(axis) for name, tensor in flat.items()}
        save_file(tensors, tmp_path / "file.safetensors")
        layers = define(tmp_path, *tables)
        loaded.append(([layer.architecture for layer in layers], [load(layer, tmp_path) for layer in layers]))
    for architectures, parameters in loaded[1:]:
        assert architectures == loaded[0][0]
        for found, expected in zip(parameters, loaded[0][1], strict=True):
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_rows_that_make_no_heads_are_named_with_their_file(directory: Path) -> None:
    """Either the definition or the tensor is wrong: the defect says where both are."""
    (defect,) = wrong(directory, HEAD + MULTI_HEAD.replace("4", "3"))
    assert (defect.file, defect.parameter, defect.found) == ("layers.toml", "heads", "3")
    assert defect.expected == "a divisor of the 16 rows of query.weight in file.safetensors"


TRANSFORMER = """
kind = "transformer"
heads = 4
pre_norm = false
activation = "gelu"
norm = { kind = "layer", epsilon = 1e-5 }
[layers.parameters]
"blocks.{n}.self.query.weight" = "{n}.square"
"blocks.{n}.self.key.weight" = "{n}.square"
"blocks.{n}.self.value.weight" = "{n}.square"
"blocks.{n}.self.output.weight" = "{n}.square"
"blocks.{n}.self.norm.weight" = "{n}.norm"
"blocks.{n}.feed_forward.up.weight" = "{n}.up"
"blocks.{n}.feed_forward.down.weight" = "{n}.down"
"blocks.{n}.feed_forward.norm.weight" = "{n}.norm"
"""


def test_a_transformer_by_its_tensors(directory: Path) -> None:
    attention = Attention(inputs=16, contexts=16, outputs=16, heads=4, kv_heads=4, head_dim=4, value_dim=4)
    norm = Norm(kind="layer", width=16, epsilon=1e-5, bias=False)
    forward_part = FeedForward(width=16, hidden=40, activation="gelu", up_bias=False, down_bias=False)
    block = Block(self_attention=attention, cross_attention=None, feed_forward=forward_part, norm=norm, pre_norm=False)
    assert one(directory, TRANSFORMER) == Transformer(blocks=3, block=block)
    assert one(directory, "blocks = 2\n" + TRANSFORMER) == Transformer(blocks=2, block=block)


def test_a_decoder_with_everything(directory: Path) -> None:
    options = """
    causal = true
    window = [8, 0]
    rotary = { base = 100.0 }
    cross = { heads = 2, softcap = 5.0 }
    embedding = { scale = 4.0, sinusoidal = true, position_offset = 2 }
    """
    norm = 'norm = { kind = "rms", epsilon = 1e-6, unit_offset = true }'
    text = TRANSFORMER.replace('norm = { kind = "layer", epsilon = 1e-5 }', norm)
    more = """
    "blocks.{n}.feed_forward.gate.weight" = "{n}.up"
    "blocks.{n}.cross.query.weight" = "{n}.square"
    "blocks.{n}.cross.key.weight" = { tensor = "{n}.up", rows = [0, 16] }
    "blocks.{n}.cross.value.weight" = { tensor = "{n}.up", rows = [0, 16] }
    "blocks.{n}.cross.output.weight" = "{n}.square"
    "blocks.{n}.cross.norm.weight" = "{n}.norm"
    embedding.token.weight = "table"
    embedding.position.weight = { tensor = "table", rows = [0, 20] }
    embedding.segment.weight = { tensor = "table", rows = [0, 2] }
    embedding.norm.weight = "norm"
    "norm.weight" = "norm"
    """
    found = one(directory, options + text + more)
    assert isinstance(found, Transformer)
    rms = Norm(kind="rms", width=16, epsilon=1e-6, bias=False, unit_offset=True)
    assert found.block.norm == found.final_norm == rms
    assert found.embedding == Embedding(
        width=16,
        vocabulary=30,
        scale=4.0,
        positions=20,
        position_offset=2,
        sinusoidal=True,
        segments=2,
        norm=rms,
    )
    cross = found.block.cross_attention
    assert cross is not None
    assert (cross.heads, cross.head_dim, cross.softcap, cross.causal, cross.rotary) == (2, 8, 5.0, False, None)
    own = found.block.self_attention
    assert (own.heads, own.softcap, own.causal, own.window, own.rotary) == (
        4,
        0.0,
        True,
        (8, 0),
        Rotary(width=4, base=100.0),
    )
    assert found.block.feed_forward.gated


def test_numbers_make_a_layer_each(directory: Path) -> None:
    text = """
    name = "layer/{n}"
    file = "file.safetensors"
    kind = "general"
    parameters = { score.weight = "{n}.square" }
    """
    for numbers, expected in (
        ('"0-2"', [0, 1, 2]),
        ('"0, 2"', [0, 2]),
        ("[2, 1]", [2, 1]),
        ("1", [1]),
        ('"0-0,1-2"', [0, 1, 2]),
    ):
        layers = define(directory, f"numbers = {numbers}\n{text}")
        assert [layer.name for layer in layers] == [f"layer/{n}" for n in expected]
        assert [layer.parameters["score.weight"].tensor for layer in layers] == [f"{n}.square" for n in expected]
    (layer,) = define(
        directory, "numbers = 2\n" + text.replace("{n}.square", "square").replace("file =", 'prefix = "{n}."\nfile =')
    )
    assert layer.parameters["score.weight"].tensor == "2.square"


def test_dtypes(directory: Path) -> None:
    text = 'name = "a"\nfile = "mixed.safetensors"\nkind = "general"\n'
    (half,) = define(directory, text + 'parameters.score.weight = "half"')
    assert half.dtype == "float16"
    both = text + 'parameters = { score.weight = "half", value.weight = "single" }\n'
    (defect,) = wrong(directory, both)
    assert (defect.parameter, defect.found) == ("dtype", "float16 and float32")
    (declared,) = define(directory, 'dtype = "bfloat16"\n' + both)
    assert declared.dtype == "bfloat16"
    assert declared.parameter_bytes() == 2 * declared.parameter_count() == 64


HEAD = 'name = "a"\nfile = "file.safetensors"\n'
GENERAL = HEAD + 'kind = "general"\n'
PLAIN = GENERAL + 'parameters = { score.weight = "w" }\n'
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
    "whole numbers": (HEAD + MULTI_HEAD.replace("heads = 4", "heads = 4.0"), "heads", "a whole number of at least 1"),
    "truth is no number": (HEAD + "head_dim = true" + MULTI_HEAD, "head_dim", "a whole number of at least 1"),
    "truth": (PLAIN + 'causal = "yes"', "causal", "true or false"),
    "a name with blanks": (PLAIN.replace('"a"', '"a b"'), "name", "1 to 128 letters"),
    "an empty name": (PLAIN.replace('"a"', '""'), "name", "1 to 128 letters"),
    "a name that is no text": (PLAIN.replace('"a"', "3"), "name", "text"),
    "window": (PLAIN + "window = [1]", "window", "[left, right]"),
    "window below -1": (PLAIN + "window = [-2, 0]", "window", "[left, right]"),
    "infinite scale": (PLAIN + "scale = inf", "scale", "a finite number"),
    "NaN": (HEAD + "softcap = nan" + MULTI_HEAD, "softcap", "a finite number of at least 0"),
    "inner key": (HEAD + "rotary = { bass = 1.0 }" + MULTI_HEAD, "rotary.bass", "a key of rotary, such as base"),
    "inner value": (HEAD + 'rotary = { base = "x" }' + MULTI_HEAD, "rotary.base", "a finite number above 0"),
    "rotary without base": (HEAD + "rotary = { width = 4 }" + MULTI_HEAD, "rotary.base", "the base of the angles"),
    "odd rotary": (HEAD + "rotary = { base = 1.0, width = 3 }" + MULTI_HEAD, "rotary", "an even number of a head's 4"),
    "wide rotary": (HEAD + "rotary = { base = 1.0, width = 6 }" + MULTI_HEAD, "rotary", "an even number of a head's 4"),
    "number of slopes": (HEAD + "alibi = [1.0]" + MULTI_HEAD, "alibi", "4 slopes, one a head"),
    "heads that do not divide": (HEAD + MULTI_HEAD.replace("4", "3"), "heads", "a divisor of the 16 rows"),
    "no heads": (HEAD + MULTI_HEAD.replace("heads = 4", ""), "heads", "a number of heads"),
    "odd groups": (HEAD + "kv_heads = 3" + MULTI_HEAD, "kv_heads", "a divisor of the 4 query heads"),
    "a parameter that there is not": (GENERAL + 'parameters.query.weight = "w"', "contexts", "a length"),
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
    "one name for several": (PLAIN + 'numbers = "0-1"', "name", "a name that no other layer has"),
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


def test_all_that_is_wrong_is_told_at_once(directory: Path) -> None:
    """In the keys of several layers, in a checkpoint and in a file that is not there."""
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
        load_definitions(tmp_path / "layers.toml", tmp_path)


def test_a_file_of_definitions_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LayerError, match=r"layers\.toml: expected a readable file, found No such file"):
        load_definitions(tmp_path / "layers.toml", tmp_path)


def test_another_key_beside_the_layers(directory: Path) -> None:
    path = directory / "layers.toml"
    path.write_text(f"version = 1\n[[layers]]\n{PLAIN}")
    (defect,) = examine(path, directory).defects
    assert (defect.parameter, defect.layer) == ("version", "")


def test_some_layers_of_a_file(directory: Path) -> None:
    """Those that are not asked for may be wrong: their checkpoints are not even opened."""
    path = directory / "layers.toml"
    tables = (PLAIN, PLAIN.replace('"a"', '"b"').replace("file.s", "nothing.s"))
    path.write_text("".join(f"[[layers]]\n{table}" for table in tables))
    assert [layer.name for layer in load_definitions(path, directory, ["a"])] == ["a"]
    with pytest.raises(LayerError) as caught:
        load_definitions(path, directory, ["a", "z"])
    assert [(defect.layer, defect.parameter) for defect in caught.value.defects] == [("z", "name")]


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
    """No combination of shapes and options ends in another exception, or in a layer that cannot be loaded."""
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
        parameters = load(layer, directory)
        assert {name: tuple(tensor.shape) for name, tensor in parameters.items()} == layer.architecture.shapes()


def blocks() -> list[str]:
    return re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def test_the_documents_examples_are_definitions(tmp_path: Path) -> None:
    """Each is read, and nothing is wrong with it but that the checkpoints are not there."""
    assert len(blocks()) >= 5
    for block in blocks():
        assert tomllib.loads(block)
        (tmp_path / "layers.toml").write_text(block)
        defects = examine(tmp_path / "layers.toml", tmp_path).defects
        assert defects
        assert all(defect.found.startswith("no such file") for defect in defects), defects


def test_the_document_names_every_key_and_every_preset() -> None:
    text = DOCUMENT.read_text()
    for keys in KEYS.values():
        for name, key in keys.items():
            assert f"| `{name}` |" in text, name
            for inner in key.table:
                assert f"`{inner}`" in text, (name, inner)
    for name in (*SOURCE, *PRESETS, *KEYS):
        assert f"`{name}`" in text, name
