"""What the native library computes for a CPU: all of its parts, each with the threads that its work pays for.

In: packed calls, layers, steps, requests and messages. Out: their results, where their packed descriptions say. Kernel
calls are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attnserve_server.native.decoders import Decoders, Step
from attnserve_server.native.library import CALL_BYTES, NAME, Library, Threads
from attnserve_server.native.messages import Messages
from attnserve_server.native.multi_head import PIECE, MultiHeads
from attnserve_server.native.passages import Passages
from attnserve_server.native.products import Products
from attnserve_server.native.requests import NativeRequests
from attnserve_server.native.rotations import Rotations
from attnserve_server.native.tokens import Tokens

if TYPE_CHECKING:
    import torch


class NativeCompute:
    """The native library for one device. `threads_for` says by which threads work that costs so many FLOPs is computed,
    None being the caller's alone; `count` counts calls of the kernel.
    """

    def __init__(
        self, library: Library, threads_for: Callable[[int], Threads | None], count: Callable[[str, int], None]
    ) -> None:
        self.library = library
        self.products = Products(library.instructions, threads_for)
        """Products with weights."""
        self.passages = Passages(library.instructions, threads_for)
        """All that lies between two attentions of a stack."""
        self.rotations = Rotations()
        """The angles of rotations."""
        self.tokens = Tokens()
        """Appends single tokens to pages of caches."""
        self.messages = Messages(library, threads_for)
        """Whole messages of little work."""
        self.requests = NativeRequests(library)
        """Requests of a batch."""
        self._layers = MultiHeads(library.instructions)
        self._decoders = Decoders(library.instructions)
        self._threads_for = threads_for
        self._count = count

    def attend(self, calls: bytearray, flops: int) -> list[int]:
        """Computes packed calls, which together cost so many FLOPs. Returns the places of those whose results are not
        finite, and so have no meaning.
        """
        self._count(NAME, len(calls) // CALL_BYTES)
        return self.library.attend(calls, self._threads_for(flops))

    def apply(self, layer: bytes, pieces: bytearray, flops: int) -> list[int]:
        """As `attend`, for packed sequences and a packed multi-head layer."""
        self._count(NAME, len(pieces) // PIECE.size)
        return self._layers.apply(layer, pieces, self._threads_for(flops))

    def step(self, step: Step, flops: int) -> torch.Tensor | None:
        """Computes a decoder's step (`Decoders.step`), which costs so many FLOPs."""
        found = self._decoders.step(step, self._threads_for(flops))
        if found is not None:
            self._count(NAME, len(step.calls) // CALL_BYTES)
        return found
