"""Weights on disk: safetensors files below the model directory, whole or in shards.

In: a model directory and a path within it: a file, an index of shards (`*.safetensors.index.json`), or a directory
that has one of these by its usual name. Out: which tensors there are (from the headers alone), what is missing or
misshapen for a specification, and the parameters of a layer as torch tensors on a device. Nothing here executes what a
file contains, and no path, symbolic links included, leads out of the model directory. Only `load` needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnserve_server.layers.errors import Defect, LayerError, NoSuchFileError, bracketed, words_of
from attnserve_server.layers.sources import TensorInfo, shape_of
from attnserve_server.layers.specification import LayerSpecification, ParameterSource

if TYPE_CHECKING:
    import torch

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
USUAL_FILES: Final = ("model" + SUFFIX, "model" + INDEX_SUFFIX)
"""The usual names of a directory's checkpoint."""
_NAMES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
FLOATS: Final = tuple(_NAMES.values())


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a checkpoint, and which file has each. `file` is relative to the model directory."""

    file: str
    tensors: Mapping[str, TensorInfo]
    paths: Mapping[str, Path]


def resolve(directory: Path, file: str, layer: str = "") -> Path:
    """The path of a file below the model directory.

    Raises LayerError if it is not below it, symbolic links followed, and NoSuchFileError if it does not exist.
    """
    root = directory.resolve()
    try:
        path = (root / file).resolve()
        there = _exists(path)
    except (OSError, RuntimeError, ValueError):  # circular links, a zero byte, a name that is too long
        raise LayerError([Defect(layer, "", file[:200], "a path that can be followed", "one that cannot")]) from None
    if Path(file).is_absolute() or not path.is_relative_to(root):
        raise LayerError(
            [Defect(layer, "", file, "a path below the model directory, relative to it", "one that leaves it")]
        )
    if not there:
        raise NoSuchFileError([Defect(layer, "", file, "a file", "no such file in the model directory")])
    return path


def _exists(path: Path) -> bool:
    """Whether a path exists. Unlike Path.exists, raises on every Python version if it cannot be followed."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def resolve_file(directory: Path, file: str, layer: str = "") -> Path:
    """Like `resolve`, for what must be a plain file (no directory, device or pipe)."""
    path = resolve(directory, file, layer)
    if not path.is_file():
        found = "a directory" if path.is_dir() else "something else"
        raise LayerError([Defect(layer, "", file, "a file", found)])
    return path


def open_checkpoint(directory: Path, file: str, layer: str = "") -> Checkpoint:
    """Reads the headers of a checkpoint. safetensors makes sure that its tensors lie end to end and fill the file.
    Raises LayerError with everything that is wrong with its files.
    """
    path = resolve(directory, file, layer)
    if path.is_dir():
        names = [name for name in USUAL_FILES if (path / name).exists()]
        if not names:
            raise NoSuchFileError([Defect(layer, "", file, f"a directory with {' or '.join(USUAL_FILES)}", "neither")])
        file = str(Path(file) / names[0])
    if file.endswith(INDEX_SUFFIX):
        return _open_shards(directory, file, layer)
    path = resolve_file(directory, file, layer)
    tensors = _header(path, file, layer)
    return Checkpoint(file, tensors, dict.fromkeys(tensors, path))


def _header(path: Path, file: str, layer: str) -> dict[str, TensorInfo]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            return {
                name: TensorInfo(_NAMES.get(dtype := each.get_dtype(), dtype), tuple(each.get_shape()))
                for name, each in slices.items()
            }
    except SafetensorError as error:
        raise LayerError([Defect(layer, "", file, "a safetensors file", words_of(error))]) from None
    except OSError as error:
        raise LayerError([Defect(layer, "", file, "a readable file", words_of(error))]) from None


def _open_shards(directory: Path, file: str, layer: str) -> Checkpoint:
    """A checkpoint in several files: the index says which tensor is in which."""
    match read_json(directory, file, layer):
        case {"weight_map": dict(places)} if all(isinstance(shard, str) for shard in places.values()):
            pass
        case _:
            raise LayerError([Defect(layer, "", file, "weight_map, a file for each tensor", "none")])
    headers: dict[str, Mapping[str, TensorInfo]] = {}
    paths: dict[str, Path] = {}
    defects: list[Defect] = []
    for shard in dict.fromkeys(places.values()):
        name = str(Path(file).parent / shard)
        try:
            paths[shard] = resolve_file(directory, name, layer)
            headers[shard] = _header(paths[shard], name, layer)
        except LayerError as error:
            defects += error.defects
    defects += [
        Defect(layer, "", str(Path(file).parent / shard), f"tensor {tensor!r}, as {file} says", "no such tensor")
        for tensor, shard in places.items()
        if shard in headers and tensor not in headers[shard]
    ]
    if defects:
        raise LayerError(defects)
    return Checkpoint(
        file,
        {tensor: headers[shard][tensor] for tensor, shard in places.items()},
        {tensor: paths[shard] for tensor, shard in places.items()},
    )


def read_json(directory: Path, file: str, layer: str) -> dict[str, Any]:
    """A JSON object in a file below the model directory. Raises LayerError."""
    try:
        content = json.loads(resolve_file(directory, file, layer).read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise LayerError([Defect(layer, "", file, "JSON", words_of(error))]) from None
    if not isinstance(content, dict):
        raise LayerError([Defect(layer, "", file, "a JSON object", type(content).__name__)])
    return content


def defects_of(specification: LayerSpecification, tensors: Mapping[str, TensorInfo]) -> Iterator[Defect]:
    """What is missing or misshapen for a layer in a checkpoint with these tensors.

    Axes of length 1 are ignored: a score.weight of U elements may be stored as [1, U], the weight of a linear map.
    """
    shapes = specification.architecture.shapes()
    for parameter, shape in shapes.items():
        expected, found = bracketed(shape), ""
        source = specification.parameters.get(parameter)
        if source is None:
            found = "no tensor named for it"
        elif source.tensor not in tensors:
            expected, found = f"tensor {source.tensor!r} for {expected}", "no such tensor"
        elif tensors[source.tensor].dtype not in FLOATS:
            expected, found = f"a tensor of {', '.join(FLOATS)}", f"{source.tensor!r} of {tensors[source.tensor].dtype}"
        elif _without_ones(shape_of(source, tensors[source.tensor])) != _without_ones(shape):
            found = _described(source, tensors[source.tensor])
        if found:
            yield Defect(specification.name, parameter, specification.file, expected, found)
    for parameter in specification.parameters:
        if parameter not in shapes:
            expected = f"a parameter of this layer ({', '.join(list(shapes)[:12])}{', ...' * (len(shapes) > 12)})"
            yield Defect(specification.name, parameter, specification.file, expected, "one that it does not have")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(length for length in shape if length != 1)


def _described(source: ParameterSource, tensor: TensorInfo) -> str:
    taken = bracketed(shape_of(source, tensor))
    how = ["transposed"] * source.transposed
    if source.start is not None or source.stop is not None:
        how.append(f"rows {source.start or 0} to {'the end' if source.stop is None else source.stop}")
    whole = f"{source.tensor!r}, {bracketed(tensor.shape)}, {', '.join(how)}" if how else repr(source.tensor)
    return f"{taken} ({whole})"


def load(specification: LayerSpecification, directory: Path, device: torch.device | str) -> dict[str, torch.Tensor]:
    """The parameters of a layer by their canonical names: contiguous, in the layer's dtype, on the device.

    Raises LayerError with everything that is wrong with them; torch.OutOfMemoryError if the device has no room.
    """
    import torch

    from attnserve_server.layers.stored import ChangedFileError, StoredTensors
    from attnserve_server.native.tensors import empty

    checkpoint = open_checkpoint(directory, specification.file, specification.name)
    defects = list(defects_of(specification, checkpoint.tensors))
    if defects:
        raise LayerError(defects)
    dtype: torch.dtype = getattr(torch, specification.dtype)
    parameters: dict[str, torch.Tensor] = {}
    with ExitStack() as opened:
        files: dict[Path, StoredTensors] = {}
        for name, shape in specification.architecture.shapes().items():
            source = specification.parameters[name]
            path = checkpoint.paths[source.tensor]
            parameters[name] = parameter = empty(shape, dtype, device)
            beyond = 0.0
            try:
                if path not in files:
                    files[path] = opened.enter_context(StoredTensors(path))
                for part, piece in files[path].pieces(source, checkpoint.tensors[source.tensor], parameter):
                    part.copy_(piece)
                    if _overflows(piece, dtype):
                        beyond = max(beyond, piece.abs().max().item())
            except (ChangedFileError, OSError) as error:
                defect = Defect(specification.name, name, specification.file, "a safetensors file", words_of(error))
                raise LayerError([defect]) from None
            if beyond:
                expected = f"elements within the range of {specification.dtype}"
                defects.append(Defect(specification.name, name, specification.file, expected, f"one of {beyond:.4g}"))
    if defects:
        raise LayerError(defects)
    return parameters


def _overflows(stored: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether finite elements become infinite in a dtype."""
    import torch

    if torch.finfo(dtype).max >= torch.finfo(stored.dtype).max:
        return False
    return bool((stored.isfinite() & stored.to(dtype).isinf()).any())
