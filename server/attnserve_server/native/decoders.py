"""Rows through all blocks of a decoder whose sequences continue caches, in one call of the library.

In: rows as tensors; where each block's tokens go, and its attention over the pages of caches, packed. Out: rows.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from attnserve_server.native.library import CALL_BYTES, Function, Threads
from attnserve_server.native.passages import Passage, effort_of
from attnserve_server.native.tokens import TOKEN

_DECODER: Final = struct.Struct("=Qq")
_STEPPED: Final = struct.Struct("=3QqQqQq")


class Decoder:
    """A decoder packed for the library: the passages to the attention of each block, and from the last to the end."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = passages
        self.blocks = len(passages) - 1
        packed = b"".join(passage.struct for passage in passages)
        self._memory = ctypes.create_string_buffer(packed, len(packed))
        self.struct = _DECODER.pack(ctypes.addressof(self._memory), self.blocks)
        """The first fields of its `struct decoder` (`attention.h`), valid as long as this object lives."""

    def effort(self, rows: int, itemsize: int) -> int:
        """What the passages of so many rows cost, in FLOPs or what takes as long."""
        return effort_of(rows, itemsize, sum(passage.elements for passage in self.passages))


class Step(NamedTuple):
    """Rows [n, width] of sequences, end to end, on their way through all blocks; all tensors are contiguous.

    `page` is how tokens lie in a page (`packed_layout`). `tokens` and `calls` have, block by block, equally many
    `TOKEN`s and calls, whose addresses of keys, values, queries and outputs are offsets, as `struct stepped` has them;
    afterwards the tokens say whether they are finite.
    """

    decoder: Decoder
    page: bytes
    rows: torch.Tensor
    rotations: torch.Tensor | None
    tokens: bytearray
    calls: bytearray


class Decoders:
    """The library's decoders, for one instruction set."""

    def __init__(self, instructions: str) -> None:
        """Raises OSError if there is no library."""
        self._step = Function("step", instructions, ctypes.c_char_p, ctypes.c_char_p)

    def step(self, step: Step, threads: Threads | None) -> torch.Tensor | None:
        """The rows after all blocks; None if any result was not finite: then what was appended has no meaning. Raises
        ValueError if tensors do not fit, and MemoryError.
        """
        decoder, page, rows, rotations, tokens, calls = step
        decoder.passages[0].check(rows, None, rotations)
        output = torch.empty_like(rows)
        stepped = _STEPPED.pack(
            rows.data_ptr(),
            0 if rotations is None else rotations.data_ptr(),
            output.data_ptr(),
            len(rows),
            ctypes.addressof(ctypes.c_char.from_buffer(tokens)),
            len(tokens) // TOKEN.size // decoder.blocks,
            ctypes.addressof(ctypes.c_char.from_buffer(calls)),
            len(calls) // CALL_BYTES // decoder.blocks,
        )
        return None if self._step(threads, decoder.struct + page, stepped) else output
