"""The header of a safetensors file: which tensors it has, without reading them.

In: a path. Out: each tensor's dtype and shape, in the file's order, after checks that make the header credible: the
tensors lie end to end and fill the file exactly, so a file that was truncated or damaged there is recognised.

The format: 8 bytes with the little-endian length of the header; the header, JSON, which gives each tensor's `dtype`,
`shape` and `data_offsets` [begin, end) from the header's end on; the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

MAX_HEADER_BYTES: Final = 100_000_000
"""The longest header that safetensors itself reads."""

_BITS: Final = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_NAMES: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class TensorInfo(NamedTuple):
    """A tensor's dtype (`float32`, `float16`, `bfloat16`, `float64`; others as safetensors writes them) and shape."""

    dtype: str
    shape: tuple[int, ...]


class HeaderError(Exception):
    """A file that is not what it claims: what was expected, and what was found."""

    def __init__(self, expected: str, found: object) -> None:
        super().__init__(f"expected {expected}, found {found}")
        self.expected, self.found = expected, str(found)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file. Raises HeaderError, and OSError if the file cannot be read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise HeaderError(
                "a safetensors file: 8 bytes with the length of a header, and the header",
                f"{size} bytes" if size < 8 else f"{size} bytes, the first 8 of which say {length}",
            )
        text = file.read(length)
    try:
        entries = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise HeaderError("a safetensors file: a header of JSON in UTF-8", f"{error}") from None
    if not isinstance(entries, dict):
        raise HeaderError("a safetensors file: a header that is a JSON object", type(entries).__name__)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError("a safetensors file: texts by name in __metadata__", repr(metadata)[:200])
    return _tensors(entries, size - 8 - length)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name that occurs twice")
    return entries


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _tensors(entries: Mapping[str, Any], data_bytes: int) -> dict[str, TensorInfo]:
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, TensorInfo] = {}
    for name, entry in entries.items():
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if all(
                map(_is_size, (*shape, begin, end))
            ):
                pass
            case _:
                raise HeaderError(f"dtype, shape and data_offsets of tensor {name!r}", repr(entry)[:200])
        if dtype in _BITS and (end - begin) * 8 != math.prod(shape) * _BITS[dtype]:
            raise HeaderError(f"as many bytes as tensor {name!r} of {dtype} {shape} takes", end - begin)
        spans.append((begin, end, name))
        tensors[name] = TensorInfo(_NAMES.get(dtype, dtype), tuple(shape))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position or end < begin:
            raise HeaderError(f"tensor {name!r} right behind the tensor before it, at byte {position}", f"byte {begin}")
        position = end
    if position != data_bytes:
        raise HeaderError(f"{position} bytes of tensors behind the header", f"{data_bytes} bytes")
    return tensors
