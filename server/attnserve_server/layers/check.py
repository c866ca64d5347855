"""`attnserve-server layers check layers.toml`: which layers could be loaded, and which could not.

In: a file of definitions and the model directory. Out: on standard output a line for each layer and the total, or JSON;
on standard error a line for everything that is missing or wrong. Exit status: 0, or 1 if anything is wrong, or 2 for an
invalid command line. Reads headers only, whatever the size of the files, and starts nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attnserve_server.host import standard_output
from attnserve_server.layers.definitions import Examination, examine
from attnserve_server.layers.errors import LayerError
from attnserve_server.layers.outline import outline
from attnserve_server.layers.specification import LayerSpecification
from attnserve_server.start_errors import StartError, require


def main(argv: Sequence[str]) -> int:
    """Runs `attnserve-server layers` with its command-line arguments; returns the exit status."""
    arguments = _parser().parse_args(argv)
    definitions: Path = arguments.definitions
    try:
        require("safetensors")
    except StartError as error:
        print(f"attnserve-server: {error}", file=sys.stderr)
        return error.exit_status
    try:
        examination = examine(definitions, arguments.model_directory or definitions.parent)
    except LayerError as error:
        examination = Examination((), error.defects)
    status = 1 if examination.defects else 0
    lines = [json.dumps(_as_json(examination), indent=2)] if arguments.json else _as_text(examination)
    try:
        print(*lines, sep="\n", flush=True)
    except OSError as error:
        why, status = standard_output.give_up(error), 1
        if not isinstance(error, BrokenPipeError):  # where the reader has enough, as `head` does
            print(f"attnserve-server: {why}", file=sys.stderr)
    if not arguments.json:
        for defect in examination.defects:
            print(defect, file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attnserve-server layers", description="Check resident layers.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check",
        help="show what would be loaded, without loading it",
        description="Show which layers a file of definitions would load, how large they are, and what is wrong.",
        allow_abbrev=False,
    )
    check.add_argument("definitions", type=Path, metavar="layers.toml", help="the file of definitions")
    check.add_argument(
        "--model-directory",
        type=_directory,
        metavar="DIRECTORY",
        help="the directory to which the checkpoints' paths are relative. Default: that of the definitions",
    )
    check.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _directory(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a directory, found {'a file' if path.exists() else 'none'}: {text}")
    return path


def _as_json(examination: Examination) -> dict[str, Any]:
    return {
        "layers": [_layer(layer) for layer in examination.layers],
        "bytes": _bytes(examination.layers),
        "defects": [asdict(defect) for defect in examination.defects],
    }


def _layer(layer: LayerSpecification) -> dict[str, Any]:
    shapes = layer.architecture.shapes()
    return {
        "name": layer.name,
        "kind": layer.kind,
        "dtype": layer.dtype,
        "file": layer.file,
        **asdict(outline(layer)),
        "parameters": layer.parameter_count(),
        "bytes": layer.parameter_bytes(),
        "tensors": {name: {**asdict(source), "shape": shapes[name]} for name, source in layer.parameters.items()},
    }


def _bytes(layers: Sequence[LayerSpecification]) -> int:
    return sum(layer.parameter_bytes() for layer in layers)


def _as_text(examination: Examination) -> Iterator[str]:
    rows = [
        (
            layer.name,
            layer.kind,
            layer.dtype,
            str(outline(layer)),
            f"{layer.parameter_count()} parameters",
            _mebibytes(layer.parameter_bytes()),
        )
        for layer in examination.layers
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    total = f"{len(rows)} layer{'s' * (len(rows) != 1)}, {_mebibytes(_bytes(examination.layers))}"
    wrong = len(examination.defects)
    yield f"total: {total}" + (f"; {wrong} thing{'s' * (wrong != 1)} wrong, nothing would be loaded" if wrong else "")


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"
