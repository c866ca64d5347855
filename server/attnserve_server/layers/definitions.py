"""Layers by their definitions: `layers.toml` and the headers of the checkpoints that it names, together.

In: a file of definitions and the model directory. Out: a `LayerSpecification` for each layer, with dimensions inferred
from the shapes of its tensors; or all that is wrong in the definitions, configs and checkpoints. No tensor is read.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from attnserve_server.layers.architecture import (
    UndeterminedError,
    UnevenRowsError,
    UnknownLengthError,
    build,
    parameters_of,
)
from attnserve_server.layers.checkpoint import FLOATS, Checkpoint, defects_of, open_checkpoint, read_json
from attnserve_server.layers.document import Definition, read_document
from attnserve_server.layers.errors import Defect, LayerError, NoSuchFileError, NoSuchLayerError, Report, bracketed
from attnserve_server.layers.keys import belongs, declares
from attnserve_server.layers.presets import PRESETS, Preset
from attnserve_server.layers.pretrained_config import options_of
from attnserve_server.layers.sources import Reference, TensorInfo, numbered, shape_of
from attnserve_server.layers.specification import Dtype, LayerKind, LayerSpecification, ParameterSource

MAX_BLOCKS: Final = 10_000
"""The most blocks of a transformer: a mistyped number is an error rather than an endless list."""
_LEFT_OUT: Final = {"embedding": "embedding.", "final_norm": "norm."}
"""The options that remove parts of a preset when they are false, and the parameters of those parts."""


@dataclass(frozen=True, slots=True)
class Examination:
    """The layers of a file of definitions that can be loaded, and everything that is wrong with the others."""

    layers: tuple[LayerSpecification, ...]
    defects: tuple[Defect, ...]


def load_definitions(path: Path, directory: Path, names: Collection[str]) -> list[LayerSpecification]:
    """The layers that a file of definitions defines, or only those named.

    `path` is opened as it is; if a caller named it, pass it through `checkpoint.resolve_file` first. Raises LayerError
    with everything that is wrong in any layer, and NoSuchLayerError if the file lacks one.
    """
    examination = examine(path, directory, names)
    if examination.defects:
        raise LayerError(examination.defects)
    return list(examination.layers)


def examine(path: Path, directory: Path, names: Collection[str] = ()) -> Examination:
    """What can be loaded from a file of definitions and what cannot. Raises LayerError if the file is not one,
    and NoSuchLayerError if it lacks a layer of these names.
    """
    definitions, defects = read_document(path)
    known = {definition.name for definition in definitions}
    # With broken tables in the file, a name may belong to one of those.
    if not defects and (lacking := [name for name in names if name not in known]):
        raise NoSuchLayerError(Defect(name, "name", path.name, "a layer of this file", "none") for name in lacking)
    opened = _Opened(directory)
    layers: list[LayerSpecification] = []
    for definition in definitions:
        if names and definition.name not in names:
            continue
        report = Report(definition.name)
        try:
            layer = _specify(definition, opened, report, path.name)
        except LayerError as error:
            report.defects += error.defects
        else:
            if layer is not None and not report.defects:
                layers.append(layer)
        defects += report.defects
    return Examination(tuple(layers), tuple(defects))


class _Opened:
    """The checkpoints and configs of a model directory that have been read: many layers share one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._checkpoints: dict[str, Checkpoint] = {}
        self._configs: dict[str, dict[str, Any]] = {}

    def checkpoint(self, file: str, layer: str) -> Checkpoint:
        """Raises LayerError."""
        if file not in self._checkpoints:
            self._checkpoints[file] = open_checkpoint(self._directory, file, layer)
        return self._checkpoints[file]

    def config(self, file: str, layer: str) -> dict[str, Any]:
        """Raises LayerError."""
        if file not in self._configs:
            self._configs[file] = read_json(self._directory, file, layer)
        return self._configs[file]


def _specify(definition: Definition, opened: _Opened, report: Report, document: str) -> LayerSpecification | None:
    """What a layer is, by its definition and its checkpoint; the report gets all that is wrong with it."""
    checkpoint = opened.checkpoint(definition.file, definition.name)
    tensors = checkpoint.tensors
    preset = PRESETS[definition.preset] if definition.preset else None
    options = dict(preset.options) if preset else {}
    if preset is not None:
        options |= _config_options(definition, preset, checkpoint.file, opened, report)
    options |= definition.options
    references = _references(definition, preset, options, tensors, checkpoint.file, report)
    sources: dict[str, ParameterSource] = {}
    for name, reference in references.items():
        try:
            sources[name] = reference.source(tensors)
        except ValueError as error:
            expected = f"{reference.tensor!r} in {(reference.part or (0, 1))[1]} equal parts"
            report.add(checkpoint.file, name, expected, error)
    if report.defects:
        return None
    shapes = {name: shape_of(item, tensors[item.tensor]) for name, item in sources.items() if item.tensor in tensors}
    if preset is not None and preset.itself:
        options = _one_width(shapes) | options
    dtype = _dtype(definition, sources, tensors, report, document)
    try:
        architecture = build(definition.kind, options, sources.keys(), shapes)
    except UndeterminedError as error:
        for name, item in sources.items():
            if item.tensor not in tensors:
                report.add(checkpoint.file, name, f"tensor {item.tensor!r}", "no such tensor")
        _report_strangers(definition.kind, sources, checkpoint.file, report)
        if not report.defects or not isinstance(error, UnknownLengthError):
            # It cannot be known whether the definition or the tensor is wrong.
            where = f" in {checkpoint.file}" if isinstance(error, UnevenRowsError) else ""
            report.add(document, error.key, error.expected + where, error.found)
        return None
    specification = LayerSpecification(
        name=definition.name,
        kind=definition.kind,
        architecture=architecture,
        dtype=dtype,
        file=checkpoint.file,
        parameters=sources,
    )
    report.defects += defects_of(specification, tensors)
    return specification


def _report_strangers(kind: LayerKind, names: Iterable[str], file: str, report: Report) -> None:
    """Reports parameters that no layer of this kind has, among them the misspelt ones."""
    parameters = parameters_of(kind)
    for name in names:
        if _in_first_block(name) not in parameters:
            close = difflib.get_close_matches(_in_first_block(name), parameters, n=1)
            hint = f", such as {close[0]}" if close else ""
            report.add(file, name, f"a parameter of {kind} layers{hint}", "one that they do not have")


def _in_first_block(name: str) -> str:
    return re.sub(r"^blocks\.\d+\.", "blocks.0.", name)


def _config_options(
    definition: Definition, preset: Preset, file: str, opened: _Opened, report: Report
) -> dict[str, Any]:
    """What the model's config says, if the preset reads one and the definition does not forbid it."""
    if preset.family is None or definition.config is False:
        return {}
    path = definition.config or str(Path(file).parent / "config.json")
    try:
        config = opened.config(path, definition.name)
    except NoSuchFileError:
        if definition.config:
            raise
        return {}
    declared, kind = definition.options, definition.kind
    options, objections = options_of(config, preset.family, definition.number, declared.get("causal"))
    matter = dict.fromkeys(
        (objection.field, objection.expected, objection.found)  # once, if several options depend on the field
        for objection in objections
        if not (option := objection.option) or (belongs(option, kind) and not declares(declared, option, kind))
    )
    for each in matter:
        report.add(path, *each)
    return {option: value for option, value in options.items() if belongs(option, kind)}


def _references(
    definition: Definition,
    preset: Preset | None,
    options: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    file: str,
    report: Report,
) -> dict[str, Reference]:
    """The tensors of all parameters: those of the preset, then what the definition says, block by block."""
    references: dict[str, Reference] = {}
    declared = {name: item and item.behind(definition.prefix or "") for name, item in definition.parameters.items()}
    blocks = range(1)
    if definition.kind == "transformer" and (preset is None or preset.many):
        blocks = range(min(MAX_BLOCKS, options.get("blocks") or _count_blocks(definition, preset, declared, tensors)))
        if not blocks or options.get("blocks", 0) > MAX_BLOCKS:
            found = options.get("blocks", f"no tensors of any, among {', '.join(list(tensors)[:3])}, ...")
            report.add(file, "blocks", f"1 to {MAX_BLOCKS} blocks", found)
    if preset is not None:
        numbers = (
            blocks if definition.number is None or preset.many else range(definition.number, definition.number + 1)
        )
        root = preset.root(tensors) if definition.prefix is None else definition.prefix
        references |= preset.references(tensors, root, numbers)
    used = {reference.tensor for reference in references.values()}
    for name, item in declared.items():
        for number in blocks if "{n}" in name else range(1):
            if item is None:
                references.pop(numbered(name, number), None)
            else:
                references[numbered(name, number)] = item.numbered(number) if "{n}" in name else item
    used |= {reference.tensor for reference in references.values()}
    for option, scope in _LEFT_OUT.items():
        if options.get(option) is False:
            references = {name: item for name, item in references.items() if not name.startswith(scope)}
    if preset is not None:
        for name in preset.unused(tensors, root, used, numbers):
            found = f"{bracketed(tensors[name].shape)}, which the preset {definition.preset} has no place for"
            report.add(file, name, "only tensors that take part in the computation", found)
    return references


def _count_blocks(
    definition: Definition,
    preset: Preset | None,
    declared: Mapping[str, Reference | None],
    tensors: Mapping[str, TensorInfo],
) -> int:
    """How many blocks a checkpoint has: one more than the highest number in the names of their tensors."""
    numbers: list[int] = []
    if preset is not None:
        root = preset.root(tensors) if definition.prefix is None else definition.prefix
        numbers += [number for _, number in preset.claimed(tensors, root) if number is not None]
    for item in declared.values():
        if item is not None and "{n}" in item.tensor:
            pattern = re.compile(r"(\d+)".join(map(re.escape, item.tensor.split("{n}", 1))))
            numbers += [int(match[1]) for name in tensors if (match := pattern.fullmatch(name))]
    return max(numbers, default=-1) + 1


def _one_width(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The one width of a self-attention: that of most of its weights, so that one that differs is reported."""
    widths = Counter(
        shape[0 if name == "output.weight" else 1]
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    )
    return dict.fromkeys(("inputs", "contexts", "outputs"), widths.most_common(1)[0][0]) if widths else {}


def _dtype(
    definition: Definition,
    sources: Mapping[str, ParameterSource],
    tensors: Mapping[str, TensorInfo],
    report: Report,
    document: str,
) -> Dtype:
    """The declared dtype, or the one that all parameters have in the file."""
    if definition.dtype is not None:
        return definition.dtype
    there = {tensors[item.tensor].dtype for item in sources.values() if item.tensor in tensors}
    stored = sorted(there.intersection(FLOATS))
    if len(stored) > 1:
        report.add(document, "dtype", "a dtype, as the file has parameters of several", " and ".join(stored))
    return stored[0] if stored else "float32"  # type: ignore[return-value]
