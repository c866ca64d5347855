"""The parameters of layers, as they are loaded, and what is said of those that cannot be."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from one_parameter import FILE, general
from safetensors.torch import save_file

from attnserve_server.layers import checkpoint
from attnserve_server.layers.checkpoint import load, open_checkpoint, read_json
from attnserve_server.layers.errors import LayerError
from attnserve_server.layers.specification import Dtype, LayerSpecification, LearnedScore, ParameterSource


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(None, None), (1, 3), (None, 2), (4, None)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_parameters_are_taken_turned_and_cast(
    tmp_path: Path, dtype: Dtype, start: int | None, stop: int | None, transposed: bool
) -> None:
    stored = torch.randn(6, 6)
    save_file({"before": torch.ones(3), "weight": stored}, tmp_path / FILE)
    expected = (stored.T if transposed else stored)[start:stop]
    source = ParameterSource(tensor="weight", transposed=transposed, start=start, stop=stop)
    parameters = load(general(source, len(expected), 6, dtype), tmp_path, "cpu")
    assert list(parameters) == ["score.weight"]
    found = parameters["score.weight"]
    assert found.dtype == getattr(torch, dtype)
    assert found.is_contiguous()
    assert found.data_ptr() % 64 == 0
    assert torch.equal(found, expected.to(found.dtype))


def test_what_is_loaded_outlives_the_file(tmp_path: Path) -> None:
    """A parameter is a copy: the file's owner may truncate it, and the pages of a mapping would be gone."""
    save_file({"weight": torch.ones(64, 64)}, tmp_path / FILE)
    parameters = load(general(ParameterSource(tensor="weight"), 64, 64), tmp_path, "cpu")
    os.truncate(tmp_path / FILE, 0)
    assert parameters["score.weight"].sum() == 64 * 64


def test_errors_of_the_system_do_not_say_where_files_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defects are reported to whoever asks for layers to be loaded."""
    save_file({"weight": torch.ones(2, 2)}, tmp_path / FILE)
    (tmp_path / "config.json").write_text("{}")

    def refuse(path: Path, *arguments: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(LayerError) as caught:
        read_json(tmp_path, "config.json", "")
    assert str(caught.value) == "config.json: expected JSON, found Permission denied"

    def vanish(*arguments: object, **options: object) -> NoReturn:
        raise FileNotFoundError(f"No such file or directory: {tmp_path / FILE}")  # safetensors' message

    monkeypatch.setattr("safetensors.safe_open", vanish)
    with pytest.raises(LayerError) as caught:
        load(general(ParameterSource(tensor="weight"), 2, 2), tmp_path, "cpu")
    assert str(tmp_path) not in str(caught.value)
    assert [defect.found for defect in caught.value.defects] == ["FileNotFoundError"]


def test_a_file_that_goes_after_its_header_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"weight": torch.ones(2, 2)}, tmp_path / FILE)
    opened = open_checkpoint(tmp_path, FILE)
    (tmp_path / FILE).unlink()
    monkeypatch.setattr(checkpoint, "open_checkpoint", lambda *_: opened)
    with pytest.raises(LayerError, match=r"score.weight: expected a safetensors file, found"):
        load(general(ParameterSource(tensor="weight"), 2, 2), tmp_path, "cpu")


def additive(inputs: int, parameters: dict[str, ParameterSource]) -> LayerSpecification:
    """A layer of an additive score, with 4 units."""
    return LayerSpecification(
        name="additive",
        kind="additive",
        architecture=LearnedScore(score="additive", inputs=inputs, contexts=5, outputs=5, units=4, bias=True),
        dtype="float32",
        file=FILE,
        parameters=parameters,
    )


def test_axes_of_length_one_do_not_count(tmp_path: Path) -> None:
    """nn.Linear(units, 1) stores the weights of an additive score as [1, units]."""
    tensors = {"q": torch.randn(4, 3), "k": torch.randn(4, 5), "v": torch.randn(1, 4), "b": torch.randn(4, 1)}
    save_file(tensors, tmp_path / FILE)
    names = {"query.weight": "q", "key.weight": "k", "score.weight": "v", "bias": "b"}
    layer = additive(3, {name: ParameterSource(tensor=tensor) for name, tensor in names.items()})
    parameters = load(layer, tmp_path, "cpu")
    assert parameters["score.weight"].shape == parameters["bias"].shape == (4,)
    assert torch.equal(parameters["score.weight"], tensors["v"][0])


@pytest.mark.parametrize("shape", [(1, 6, 4), (6, 1, 4), (6, 4, 1), (1, 6, 1, 4)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(None, None), (1, 3)])
def test_a_matrix_with_more_axes_of_length_one(
    tmp_path: Path, shape: tuple[int, ...], transposed: bool, start: int | None, stop: int | None
) -> None:
    """As in a convolution of width 1: it is transposed and its rows are sliced as if it had two axes."""
    stored = torch.randn(shape)
    save_file({"weight": stored}, tmp_path / FILE)
    matrix = stored.view(6, 4)
    expected = (matrix.T if transposed else matrix)[start:stop]
    source = ParameterSource(tensor="weight", transposed=transposed, start=start, stop=stop)
    assert torch.equal(load(general(source, *expected.shape), tmp_path, "cpu")["score.weight"], expected)


def test_everything_that_is_wrong_is_told(tmp_path: Path) -> None:
    save_file({"q": torch.randn(4, 3), "k": torch.zeros(4, 5, dtype=torch.int8), "v": torch.randn(4)}, tmp_path / FILE)
    sources = {
        "query.weight": ParameterSource(tensor="q"),
        "key.weight": ParameterSource(tensor="k"),
        "score.weight": ParameterSource(tensor="v", start=1, stop=3),
        "bias": ParameterSource(tensor="b"),
        "key.bias": ParameterSource(tensor="b"),
    }
    with pytest.raises(LayerError) as caught:
        load(additive(7, sources), tmp_path, "cpu")
    told = {defect.parameter: (defect.expected, defect.found) for defect in caught.value.defects}
    assert told["query.weight"] == ("[4, 7]", "[4, 3] ('q')")
    assert told["key.weight"] == ("a tensor of float32, float16, bfloat16, float64", "'k' of I8")
    assert told["score.weight"] == ("[4]", "[2] ('v', [4], rows 1 to 3)")
    assert told["bias"] == ("tensor 'b' for [4]", "no such tensor")
    assert told["key.bias"][1] == "one that it does not have"
    assert len(told) == 5
    assert {(defect.layer, defect.file) for defect in caught.value.defects} == {("additive", FILE)}
    assert len(str(caught.value).splitlines()) == 5


@pytest.mark.parametrize(("start", "stop", "rows"), [(1, None, "rows 1 to the end"), (None, 2, "rows 0 to 2")])
def test_the_rows_that_were_taken_are_told(tmp_path: Path, start: int | None, stop: int | None, rows: str) -> None:
    save_file({"weight": torch.zeros(4, 3)}, tmp_path / FILE)
    with pytest.raises(LayerError, match=rf"\('weight', \[4, 3\], {rows}\)"):
        load(general(ParameterSource(tensor="weight", start=start, stop=stop), 5, 3), tmp_path, "cpu")


def test_a_parameter_for_which_no_tensor_is_named(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(4, 3)}, tmp_path / FILE)
    layer = replace(general(ParameterSource(tensor="weight"), 4, 3), parameters={})
    with pytest.raises(LayerError, match=r"score.weight: expected \[4, 3\], found no tensor named for it"):
        load(layer, tmp_path, "cpu")


def test_elements_that_a_dtype_cannot_hold(tmp_path: Path) -> None:
    stored = torch.tensor([[1.0, 7e4], [-torch.inf, 2.0]])
    save_file({"weight": stored}, tmp_path / FILE)
    source = ParameterSource(tensor="weight")
    with pytest.raises(LayerError, match="elements within the range of float16, found one of"):
        load(general(source, 2, 2, "float16"), tmp_path, "cpu")
    assert torch.equal(load(general(source, 2, 2, "bfloat16"), tmp_path, "cpu")["score.weight"], stored.bfloat16())
