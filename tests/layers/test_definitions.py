"""`layers.toml`: what it defines, what is inferred from the shapes, and its defects."""

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
from defined import MULTI_HEAD, PLAIN, SHAPES, TRANSFORMER, define, directory, one, wrong
from safetensors.torch import save_file

from attnserve_server.layers.architecture import parameters_of
from attnserve_server.layers.checkpoint import load
from attnserve_server.layers.definitions import examine, load_definitions
from attnserve_server.layers.errors import NoSuchLayerError
from attnserve_server.layers.keys import KEYS, SOURCE
from attnserve_server.layers.presets import PRESETS
from attnserve_server.layers.specification import (
    Attention,
    Block,
    Embedding,
    FeedForward,
    LearnedScore,
    Norm,
    ParameterSource,
    Rotary,
    Transformer,
)

__all__ = ["directory"]

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "layers.md"


def test_dimensions_are_told_from_the_shapes(directory: Path) -> None:
    """Four heads of 4, half as many for keys and values, with values 6 wide."""
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
    parameters = {name: tensor.double().numpy() for name, tensor in load(layer, directory, "cpu").items()}
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
    tensors, loaded = load_file(directory), load(layer, directory, "cpu")
    for index, name in enumerate(("query", "key", "value")):
        np.testing.assert_array_equal(
            loaded[f"{name}.weight"].numpy(), tensors["fused"].T[16 * index : 16 * index + 16].astype(np.float32)
        )


def test_axes_of_length_one_do_not_count(tmp_path: Path) -> None:
    """For matrices and norms, which all determine dimensions: the same layers as without those axes."""
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
        loaded.append(([layer.architecture for layer in layers], [load(layer, tmp_path, "cpu") for layer in layers]))
    for architectures, parameters in loaded[1:]:
        assert architectures == loaded[0][0]
        for found, expected in zip(parameters, loaded[0][1], strict=True):
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_transformer_by_its_tensors(directory: Path) -> None:
    attention = Attention(inputs=16, contexts=16, outputs=16, heads=4, kv_heads=4, head_dim=4, value_dim=4)
    norm = Norm(kind="layer", width=16, epsilon=1e-5, bias=False)
    forward_part = FeedForward(width=16, hidden=40, activation="gelu", up_bias=False, down_bias=False)
    block = Block(self_attention=attention, cross_attention=None, feed_forward=forward_part, norm=norm, pre_norm=False)
    assert one(directory, TRANSFORMER) == Transformer(blocks=3, block=block)
    assert one(directory, "blocks = 2\n" + TRANSFORMER) == Transformer(blocks=2, block=block)


def test_every_parameter_that_a_transformer_can_have() -> None:
    attentions = [
        f"{attention}.{map_}" for attention in ("self", "cross") for map_ in ("query", "key", "value", "output")
    ]
    maps = [*attentions, *(f"feed_forward.{map_}" for map_ in ("up", "gate", "down"))]
    norms = [f"{part}.norm" for part in ("self", "cross", "feed_forward")]
    tables = {f"embedding.{table}.weight" for table in ("token", "position", "segment")}
    owners = [*(f"blocks.0.{owner}" for owner in maps + norms), "embedding.norm", "norm"]
    found = parameters_of("transformer")
    assert set(found) == tables | {f"{owner}.{name}" for owner in owners for name in ("weight", "bias")}
    assert len(found) == len(set(found))


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


@pytest.mark.parametrize(
    ("name", "numbers", "key", "expected"),
    [
        ("layer", '"0-1"', "name", "{n} in it, for there are several numbers"),
        ("layer/{n}", '"1,1"', "numbers", "each number once"),
        ("layer", "[1, 1]", "numbers", "each number once"),
        ("layer", "true", "numbers", "numbers"),
        ("layer", '"1-0"', "numbers", "numbers"),
    ],
)
def test_numbers_that_make_no_layers(directory: Path, name: str, numbers: str, key: str, expected: str) -> None:
    text = 'file = "file.safetensors"\nkind = "general"\nparameters = { score.weight = "1.square" }\n'
    (defect,) = wrong(directory, f'name = "{name}"\nnumbers = {numbers}\n{text}')
    assert defect.parameter == key
    assert expected in defect.expected


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
    sizes = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
    for dtype, size in sizes.items():
        (declared,) = define(directory, f'dtype = "{dtype}"\n' + both)
        assert declared.parameter_bytes() == size * 32


def test_some_layers_of_a_file(directory: Path) -> None:
    """Layers that are not asked for may be wrong: their checkpoints are not even opened."""
    path = directory / "layers.toml"
    tables = (PLAIN, PLAIN.replace('"a"', '"b"').replace("file.s", "nothing.s"))
    path.write_text("".join(f"[[layers]]\n{table}" for table in tables))
    assert [layer.name for layer in load_definitions(path, directory, ["a"])] == ["a"]
    with pytest.raises(NoSuchLayerError) as caught:
        load_definitions(path, directory, ["a", "z"])
    assert [(defect.layer, defect.parameter) for defect in caught.value.defects] == [("z", "name")]


def blocks() -> list[str]:
    return re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def test_the_documents_examples_are_definitions(tmp_path: Path) -> None:
    """Each is valid, except that the checkpoints are missing."""
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
