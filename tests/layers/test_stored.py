"""Tensors in files are read piece by piece, and a file that changes meanwhile is an error, not the process's end."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from attnserve_server.layers import stored
from attnserve_server.layers.checkpoint import open_checkpoint
from attnserve_server.layers.sources import TensorInfo
from attnserve_server.layers.specification import ParameterSource
from attnserve_server.layers.stored import ChangedFileError, StoredTensors

FILE = "weights.safetensors"


@pytest.mark.parametrize("piece_bytes", [1, 40, 100, 1 << 20])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(None, None), (1, 4), (5, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_pieces_make_the_whole(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    piece_bytes: int,
    transposed: bool,
    start: int | None,
    stop: int | None,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(stored, "PIECE_BYTES", piece_bytes)
    tensor = torch.randn(7, 6).to(dtype)
    save_file({"before": torch.ones(5), "weight": tensor, "zero": torch.ones(3)}, tmp_path / FILE)
    expected = (tensor.T if transposed else tensor)[start:stop].float()
    parameter = torch.full(expected.shape, torch.nan)
    source = ParameterSource(tensor="weight", transposed=transposed, start=start, stop=stop)
    count = 0
    with StoredTensors(tmp_path / FILE) as file:
        info = TensorInfo(str(dtype).removeprefix("torch."), (7, 6))
        for part, piece in file.pieces(source, info, parameter):
            part.copy_(piece)
            count += 1
    assert torch.equal(parameter, expected)
    rows = 7 if transposed else len(expected)
    assert count == ceil(rows / max(1, piece_bytes // (6 * dtype.itemsize)))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(6,), (), (1, 6, 1)], ids=str)
def test_vectors_and_numbers(tmp_path: Path, shape: tuple[int, ...], transposed: bool) -> None:
    tensor = torch.randn(shape)
    save_file({"bias": tensor}, tmp_path / FILE)
    parameter = torch.full((tensor.numel(),), torch.nan)
    with StoredTensors(tmp_path / FILE) as file:
        source = ParameterSource(tensor="bias", transposed=transposed)
        for part, piece in file.pieces(source, TensorInfo("float32", shape), parameter):
            part.copy_(piece)
    assert torch.equal(parameter, tensor.flatten())


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a mapping of the file, its last pages would be gone, and reading them would end the process."""
    monkeypatch.setattr(stored, "PIECE_BYTES", 4096)
    save_file({"weight": torch.ones(64, 1024)}, tmp_path / FILE)
    parameter = torch.empty(64, 1024)
    with StoredTensors(tmp_path / FILE) as file:
        pieces = file.pieces(ParameterSource(tensor="weight"), TensorInfo("float32", (64, 1024)), parameter)
        next(pieces)
        os.truncate(tmp_path / FILE, 10_000)
        with pytest.raises(ChangedFileError, match="has become shorter"):
            list(pieces)


def headed(header: bytes) -> bytes:
    """A file that consists of a header."""
    return len(header).to_bytes(8, "little") + header


OTHERS = {
    "empty": b"",
    "a part of the length": b"\x10\0",
    "a header that is not there": (1 << 40).to_bytes(8, "little"),
    "a part of the header": headed(b'{"weight": {}}')[:-4],
    "no JSON": headed(b"nope"),
    "no object": headed(b"[[]]"),
    "no such tensor": headed(b"{}"),
    "another size": headed(b'{"weight": {"data_offsets": [0, 8]}}'),
    "before the file": headed(b'{"weight": {"data_offsets": [-16, 0]}}'),
    "far away": headed(b'{"weight": {"data_offsets": [99999999999999999999, 100000000000000000015]}}'),
    "no places": headed(b'{"weight": {"data_offsets": "0, 8"}}'),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_file_that_has_become_another_after_its_header_was_checked(tmp_path: Path, other: bytes) -> None:
    save_file({"weight": torch.ones(2, 2)}, tmp_path / FILE)
    opened = open_checkpoint(tmp_path, FILE)
    (tmp_path / FILE).write_bytes(other)
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(ChangedFileError), StoredTensors(tmp_path / FILE) as file:
        list(file.pieces(ParameterSource(tensor="weight"), opened.tensors["weight"], torch.empty(2, 2)))
    assert os.listdir("/proc/self/fd") == descriptors
