"""What safetensors files hold, read piece by piece.

In: a file whose header `checkpoint.py` has checked. Out: pieces of its tensors, and where they belong in a parameter.

safetensors maps files into memory. If one became shorter while it is read, as with `cp` over it, the system would kill
the process; here that is an error. And no more than a piece of a tensor is in memory beside the parameter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from attnserve_server.host import huge_pages
from attnserve_server.layers.sources import TensorInfo, matrix_of
from attnserve_server.layers.specification import ParameterSource

PIECE_BYTES: Final = 64 << 20
"""How much of a tensor is read at a time; a whole row if that is more. Torch's threads wait for each other after each
piece, so that small ones take longer.
"""
_LENGTH_BYTES: Final = 8
"""The length of the header, at the file's begin."""


class ChangedFileError(Exception):
    """A file is no longer what it was when its header was checked."""


class StoredTensors:
    """One open file, a context manager that closes it."""

    def __init__(self, path: Path) -> None:
        """Opens it. Raises OSError, and ChangedFileError."""
        self._room = np.empty(0, np.uint8)
        """For what is read: memory of its own, which goes back to the system."""
        self._file = path.open("rb", buffering=0)
        try:
            length = int.from_bytes(self._bytes(0, _LENGTH_BYTES), "little")
            if length > os.fstat(self._file.fileno()).st_size:
                raise ChangedFileError("one that has become shorter")
            self._header: Mapping[str, Any] = json.loads(bytes(self._bytes(_LENGTH_BYTES, length)))
            self._data = _LENGTH_BYTES + length
        except (ValueError, RecursionError):
            self.close()
            raise ChangedFileError("one without a header") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def pieces(
        self, source: ParameterSource, tensor: TensorInfo, parameter: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The pieces of what a source takes from a tensor, in the dtype that it is stored in, each until the next is
        asked for; before each, the part of the contiguous parameter where it belongs. Raises OSError, and
        ChangedFileError.
        """
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        begin = self._begin(source.tensor, prod(tensor.shape) * dtype.itemsize)
        matrix = matrix_of(tensor.shape)
        first, last, _ = slice(source.start, source.stop).indices(_taken_from(matrix, source.transposed))
        columns = prod(matrix[1:])
        step = max(1, PIECE_BYTES // (columns * dtype.itemsize))
        if source.transposed and len(matrix) == 2:
            across = parameter.view(last - first, matrix[0])
            for top in range(0, matrix[0], step):
                count = min(step, matrix[0] - top)
                rows = self._elements(begin, top * columns, count * columns, dtype).view(count, columns)
                yield across[:, top : top + count], rows[:, first:last].t()
            return
        flat = parameter.view(-1)
        for top in range(first, last, step):
            count = min(step, last - top) * columns
            at = (top - first) * columns
            yield flat[at : at + count], self._elements(begin, top * columns, count, dtype)

    def _begin(self, name: str, size: int) -> int:
        """Where a tensor of so many bytes begins in the file."""
        try:
            begin, end = self._header[name]["data_offsets"]
            if end - begin != size or not 0 <= begin <= os.fstat(self._file.fileno()).st_size:
                raise ValueError(begin, end)
            return self._data + int(begin)
        except (KeyError, TypeError, ValueError):
            raise ChangedFileError("one with other tensors than before") from None

    def _elements(self, begin: int, at: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """So many elements of a tensor, `at` elements behind its begin."""
        return torch.from_numpy(self._bytes(begin + at * dtype.itemsize, count * dtype.itemsize)).view(dtype)

    def _bytes(self, begin: int, count: int) -> NDArray[np.uint8]:
        """So many bytes from one on, until the next are read."""
        if len(self._room) < count:
            self._room = huge_pages.empty(count)
        found, there = self._room[:count], 0
        self._file.seek(begin)
        while there < count:  # Linux reads at most 2 GiB at once
            read = self._file.readinto(found[there:].data)
            if not read:
                raise ChangedFileError("one that has become shorter")
            there += read
        return found


def _taken_from(matrix: tuple[int, ...], transposed: bool) -> int:
    """How many rows there are to take from a stored matrix, transposed or not; a lone number is one."""
    turned = matrix[::-1] if transposed else matrix
    return turned[0] if turned else 1
