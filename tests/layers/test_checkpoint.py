"""Checkpoints: headers, shards, and paths that try to leave the model directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mappings import flags_at, needs_huge_pages
from one_parameter import FILE, general
from safetensors.torch import load_file, save, save_file

from attnserve_server.layers.checkpoint import load, open_checkpoint, read_json, resolve, resolve_file
from attnserve_server.layers.errors import LayerError, NoSuchFileError
from attnserve_server.layers.specification import ParameterSource


def content(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: list[Any], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_the_header_says_what_safetensors_itself_reads(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn)
    tensors = {str(dtype): torch.zeros(2, index + 1).to(dtype) for index, dtype in enumerate(dtypes)}
    tensors |= {"scalar": torch.tensor(1.0), "empty": torch.zeros(0, 5)}
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    found = open_checkpoint(tmp_path, FILE).tensors
    assert {name: info.shape for name, info in found.items()} == {name: (*t.shape,) for name, t in tensors.items()}
    names = ("float32", "float16", "bfloat16", "float64")
    assert [found[f"torch.{name}"].dtype for name in names] == list(names)
    assert found["torch.int64"].dtype == "I64"


BROKEN: dict[str, bytes] = {
    "empty": b"",
    "short": b"\x01\x02",
    "no header": (100).to_bytes(8, "little"),
    "a huge header": (2**63).to_bytes(8, "little") + bytes(100),
    "no JSON": content(b"{not json"),
    "not UTF-8": content(b'{"\xff": 1}'),
    "deep JSON": content(b"[" * 200_000),
    "a list": content([1]),
    "a byte order mark": content(b"\xef\xbb\xbf{}"),
    "UTF-16": content("{}".encode("utf-16")),
    "metadata that is no object": content({"__metadata__": 5}),
    "metadata that is no text": content({"__metadata__": {"a": 5}}),
    "no shape": content({"a": {"dtype": "F32", "data_offsets": [0, 0]}}),
    "a negative length": content({"a": entry([-1, -1], 0, 4)}, bytes(4)),
    "a length that is no number": content({"a": entry([True], 0, 4)}, bytes(4)),
    "too few bytes for the shape": content({"a": entry([2], 0, 4)}, bytes(4)),
    "a gap": content({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)),
    "an overlap": content({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, bytes(8)),
    "backwards": content({"a": entry([1], 4, 0, "X9")}, bytes(4)),
    "cut off": content({"a": entry([2], 0, 8)}, bytes(7)),
    "something behind": content({"a": entry([2], 0, 8)}, bytes(9)),
    "a pickle": b"\x80\x04\x95" + bytes(100),
    "a zip, as torch.save writes it": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("what", BROKEN)
def test_files_that_are_not_what_they_say(tmp_path: Path, what: str) -> None:
    (tmp_path / FILE).write_bytes(BROKEN[what])
    with pytest.raises(LayerError) as caught:
        open_checkpoint(tmp_path, FILE)
    (defect,) = caught.value.defects
    assert (defect.file, defect.parameter) == (FILE, "")
    assert str(tmp_path) not in str(caught.value)


@given(st.integers(0, 400), st.integers(0, 255))
def test_any_damage_of_a_header_is_an_error_or_a_header(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    """Only LayerError is raised, and an accepted header accounts for the whole file."""
    data = bytearray(save({"first": torch.ones(2, 3), "second": torch.ones(4)}))
    path = tmp_path_factory.getbasetemp() / "damaged"
    data[min(at, len(data) - 1)] = value
    path.write_bytes(data)
    try:
        tensors = open_checkpoint(path.parent, path.name).tensors
    except LayerError:
        return
    items = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
    known = {name: info for name, info in tensors.items() if info.dtype in items}
    if len(known) == len(tensors):
        count = sum(items[info.dtype] * torch.Size(info.shape).numel() for info in tensors.values())
        assert count + 8 + int.from_bytes(data[:8], "little") == len(data)


@given(st.integers(0, 300))
def test_every_truncation_is_found_out(tmp_path_factory: pytest.TempPathFactory, kept: int) -> None:
    data = save({"first": torch.ones(2, 3), "second": torch.ones(4)})
    path = tmp_path_factory.getbasetemp() / "truncated"
    path.write_bytes(data[: min(kept, len(data) - 1)])
    with pytest.raises(LayerError):
        open_checkpoint(path.parent, path.name)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A model directory, with a file beside it that must not be reached."""
    directory = tmp_path / "models"
    (directory / "inner").mkdir(parents=True)
    for path in (directory / FILE, tmp_path / "secret.safetensors"):
        save_file({"weight": torch.arange(6.0).reshape(2, 3)}, path)
    return directory


def link(path: Path, target: Path | str) -> Path:
    path.symlink_to(target)
    return path


ESCAPES: dict[str, Callable[[Path], str]] = {
    "parent": lambda _: "../secret.safetensors",
    "parent from within": lambda _: "inner/../../secret.safetensors",
    "absolute": lambda models: str(models.parent / "secret.safetensors"),
    "absolute, though within": lambda models: str(models / FILE),
    "link": lambda models: link(models / "link", models.parent / "secret.safetensors") and "link",
    "relative link": lambda models: link(models / "inner/link", "../../secret.safetensors") and "inner/link",
    "link to a directory": lambda models: link(models / "up", "..") and "up/secret.safetensors",
    "link over links": lambda models: (link(models / "a", ".."), link(models / "b", "a")) and "b/secret.safetensors",
    "a sibling with the same beginning": lambda models: "../models-secret",
    "links in a circle": lambda models: (link(models / "c", "d"), link(models / "d", "c")) and "c",
    "zero byte": lambda _: "a\0b",
    "too long": lambda _: "a/" * 5000,
}


@pytest.mark.parametrize("way", ESCAPES)
def test_no_path_leaves_the_model_directory(models: Path, way: str) -> None:
    (models.parent / "models-secret").write_bytes((models / FILE).read_bytes())
    file = ESCAPES[way](models)
    with pytest.raises(LayerError) as caught:
        open_checkpoint(models, file)
    assert not isinstance(caught.value, NoSuchFileError)  # nor does it reveal whether the file exists
    with pytest.raises(LayerError):
        load(general(ParameterSource(tensor="weight"), 2, 3, file=file), models, "cpu")


def test_shards_do_not_leave_it_either(models: Path) -> None:
    index = {"weight_map": {"weight": "../secret.safetensors"}}
    (models / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LayerError, match="a path below the model directory"):
        open_checkpoint(models, ".")


def test_links_within_it_are_followed(models: Path) -> None:
    """As in the file layout of a download cache."""
    link(models / "inner" / "model.safetensors", f"../{FILE}")
    assert open_checkpoint(models, "inner").tensors["weight"].shape == (2, 3)
    link(models.parent / "elsewhere", models)
    assert resolve(models.parent / "elsewhere", FILE) == (models / FILE).resolve()


def test_what_is_no_file(models: Path) -> None:
    with pytest.raises(NoSuchFileError):
        open_checkpoint(models, "none.safetensors")
    with pytest.raises(NoSuchFileError, match=r"model.safetensors or model.safetensors.index.json, found neither"):
        open_checkpoint(models, "inner")
    os.mkfifo(models / "pipe.safetensors")
    with pytest.raises(LayerError, match="expected a file, found something else"):
        open_checkpoint(models, "pipe.safetensors")
    with pytest.raises(LayerError, match="inner: expected a file, found a directory"):
        resolve_file(models, "inner")


def test_shards(tmp_path: Path) -> None:
    tensors = {f"weight.{index}": torch.randn(2, 3) for index in range(4)}
    places = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for shard in set(places.values()):
        save_file({name: tensor for name, tensor in tensors.items() if places[name] == shard}, tmp_path / shard)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for file in (index.name, "."):
        assert set(open_checkpoint(tmp_path, file).tensors) == set(tensors)
    for name, tensor in tensors.items():
        layer = general(ParameterSource(tensor=name), 2, 3, file=index.name)
        assert torch.equal(load(layer, tmp_path, "cpu")["score.weight"], tensor)

    index.write_text(
        json.dumps({"weight_map": {**places, "other": "part-0.safetensors", "more": "part-7.safetensors"}})
    )
    (tmp_path / "part-1.safetensors").write_bytes(b"nothing")
    with pytest.raises(LayerError) as caught:
        open_checkpoint(tmp_path, index.name)
    assert sorted(defect.file for defect in caught.value.defects) == [f"part-{n}.safetensors" for n in (0, 1, 7)]
    for text in ("[]", "{", '{"weight_map": {"a": 1}}', "\xff"):
        index.write_text(text)
        with pytest.raises(LayerError):
            open_checkpoint(tmp_path, index.name)


def test_a_config_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(LayerError, match="expected a JSON object, found list"):
        read_json(tmp_path, "config.json", "layer")


def test_what_was_saved_is_what_safetensors_loads(models: Path) -> None:
    layer = general(ParameterSource(tensor="weight"), 2, 3)
    assert torch.equal(load(layer, models, "cpu")["score.weight"], load_file(models / FILE)["weight"])
    assert load(layer, models, "meta")["score.weight"].device.type == "meta"


@needs_huge_pages
def test_large_parameters_are_in_huge_pages(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1024, 512)}, tmp_path / FILE)
    parameters = load(general(ParameterSource(tensor="weight"), 1024, 512), tmp_path, "cpu")
    assert "hg" in flags_at(parameters["score.weight"].data_ptr())
