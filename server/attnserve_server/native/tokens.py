"""Tokens appended to the pages of caches, unconverted.

In: how tokens lie in a page, packed, and where each one is and goes. Out: which of them are finite. The GIL is held
meanwhile: to append a token takes less time than to give that away.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Final

from attnserve_server.native import library
from attnserve_server.native.library import Strides

_LAYOUT: Final = struct.Struct("=8q")
TOKEN: Final = struct.Struct("=4Q2q")
"""The addresses of a token's keys and values, [heads, width] each, and of the first key and the first value of its
page; its index in the page; and 1, which the library may set to 0 (`FINITE`).
"""
TOKEN_FIELDS: Final = TOKEN.size // 8
FINITE: Final = 5
"""The index of a token's `finite` among its fields."""


def packed_layout(dtype: int, heads: int, head_dim: int, value_dim: int, key: Strides, value: Strides) -> bytes:
    """How tokens lie in a page, as the library reads it."""
    return _LAYOUT.pack(dtype, heads, head_dim, value_dim, *key, *value)


class Tokens:
    """The library's appends."""

    def __init__(self) -> None:
        """Raises OSError if there is no library."""
        self._append = ctypes.PyDLL(str(library.PATH)).attnserve_append_tokens
        self._append.argtypes, self._append.restype = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64], None

    def append(self, layout: bytes, tokens: bytearray) -> list[int]:
        """Copies packed tokens to their pages. Returns for each whether it is finite, 1 or 0."""
        count = len(tokens) // TOKEN.size
        if count:
            self._append(layout, ctypes.addressof(ctypes.c_char.from_buffer(tokens)), count)
        return memoryview(tokens).cast("q")[FINITE::TOKEN_FIELDS].tolist()
