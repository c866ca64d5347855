"""Multi-head layers by the native library, in one call from the rows received to those of the reply.

In: a layer and sequences, packed as the library reads them (`attention.h`). Out: results where the sequences want them,
and which of them are not finite.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Final

from attnserve_server.native.library import Function, Threads, not_finite
from attnserve_server.native.products import PRODUCT_BYTES, PackedWeight

PIECE: Final = struct.Struct("=2Q2q")
"""A sequence: the address of its rows, that of the reply's rows, their number, and 1, which the library may set to 0
(`_FINITE`).
"""
_FINITE: Final = 3
"""The index of a piece's `finite` among its fields."""
_COLUMNS: Final = struct.Struct("=3q")


def packed_layer(
    project: PackedWeight, columns: tuple[int, int, int], output: PackedWeight | None, call: bytes
) -> bytes:
    """A layer, valid as long as its weights live. `columns` say where the heads' queries, keys and values begin in a
    projected row; `call` is the attention of a sequence, packed without addresses and lengths.
    """
    return project.struct + _COLUMNS.pack(*columns) + (bytes(PRODUCT_BYTES) if output is None else output.struct) + call


class MultiHeads:
    """The library's layers, for one instruction set."""

    def __init__(self, instructions: str) -> None:
        """Raises OSError if there is no library."""
        address, size = ctypes.c_void_p, ctypes.c_int64
        self._apply = Function("multi_head", instructions, ctypes.c_char_p, address, size)

    def apply(self, layer: bytes, pieces: bytearray, threads: Threads | None) -> list[int]:
        """Computes pieces with a layer. Returns the places of those whose attention has NaN or infinities: no result of
        such a piece has any meaning. `threads` as for the library's attention. Raises MemoryError.
        """
        first, count = ctypes.c_char.from_buffer(pieces), len(pieces) // PIECE.size
        self._apply(threads, layer, ctypes.addressof(first), count)
        return not_finite(pieces, _FINITE, PIECE.size)
