"""`python guarded.py LIBRARY CALLS`: random calls, products, layers, passages and messages, in guarded memory.

Each array ends right before, or begins right after, a page that the process may not read, so that reading past it kills
the process. In: the path of a library, and the number of calls. Out: `sound` if all results match the oracle's. With a
library built with sanitizers, the library's own memory is watched as well, and so is that of messages if Python
allocates with `malloc`.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from binding import NAN_BYTE, PACKED, Call, Place, assert_right, attend, laid, steps, unaided
from oracle import Array
from random_calls import random_call, sharing
from random_messages import (
    another_step,
    assert_reads_as_others_do,
    assert_reads_steps_as_others_do,
    known_requests,
    known_steps,
    random_message,
    spoilt,
)
from random_multi_heads import random_multi_head
from random_passages import random_passage
from random_products import random_product
from stepping import Stepping, step

from attnserve import _wire
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.native import library
from attnserve_server.native.layouts import MOST_RESULT_BYTES
from attnserve_server.native.messages import Messages
from attnserve_server.native.multi_head import MultiHeads
from attnserve_server.native.passages import Passages
from attnserve_server.native.products import Products

PAGE = mmap.PAGESIZE
_protect = ctypes.CDLL(None, use_errno=True).mprotect
_protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Guarded:
    """Memory adjacent to inaccessible pages. The mappings live as long as this object."""

    def __init__(self, at_end: bool) -> None:
        self._at_end = at_end
        self._mapped: list[mmap.mmap] = []

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any], place: Place, fill: int) -> tuple[Array, Array]:
        """A `Room` with no space on one side."""
        place = Place(place.tokens_first)
        memory, offset = self._memory(int(np.prod(shape)) * dtype.itemsize, fill)
        return np.ndarray(shape, dtype, memory.data, offset, steps(shape, dtype, place)), memory

    def page(self, page: Array, tokens: int) -> Array:
        """A copy of a page [heads, tokens, width] that ends after this many tokens of the last head; same strides."""
        memory, offset = self._memory(page.nbytes - (page.shape[1] - tokens) * page.strides[1], NAN_BYTE)
        copy: Array = np.ndarray((len(page), tokens, page.shape[2]), page.dtype, memory.data, offset, page.strides)
        copy[...] = page[:, :tokens]
        return copy

    def message(self, message: bytes) -> ctypes.c_char_p:
        """A copy of a message, which no 0 follows."""
        memory, offset = self._memory(len(message), NAN_BYTE)
        memory[offset : offset + len(message)] = np.frombuffer(message, np.uint8)
        return ctypes.c_char_p(memory.ctypes.data + offset)

    def _memory(self, size: int, fill: int) -> tuple[Array, int]:
        """Pages that hold `size` bytes, and the offset at which these begin."""
        inner = max(-(-size // PAGE), 1) * PAGE
        mapped = mmap.mmap(-1, inner + 2 * PAGE)
        self._mapped.append(mapped)
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        for forbidden in (base, base + PAGE + inner):
            if _protect(forbidden, PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * inner).from_address(base + PAGE))
        memory[...] = fill
        return memory, inner - size if self._at_end else 0

    def call(self, call: Call) -> Call:
        """The call with all its inputs in guarded memory."""
        place = call.output
        call = replace(
            call,
            query=laid(call.query, place, self.room),
            key=laid(call.key, place, self.room),
            value=laid(call.value, place, self.room),
            mask=None if call.mask is None else laid(call.mask, PACKED, self.room),
            bias=None if call.bias is None else laid(call.bias, PACKED, self.room),
            slopes=None if call.slopes is None else laid(call.slopes[None, None], PACKED, self.room)[0, 0],
            sinks=None if call.sinks is None else laid(call.sinks[None, None], PACKED, self.room)[0, 0],
        )
        pages, last = [], call.key.shape[1] - (len(call.key_pages) - 1) * call.page_tokens
        for of_call in (call.key_pages, call.value_pages):
            tokens = [page.shape[1] for page in of_call[:-1]] + [last]
            pages.append(tuple(self.page(page, count) for page, count in zip(of_call, tokens, strict=bool(of_call))))
        return replace(call, key_pages=pages[0], value_pages=pages[1])


def read_references_at_the_end(caches: Stepping) -> None:
    """Reads requests that end with a reference to a cache, some of them in the middle of its append's id."""
    request, messages, guarded = step(caches.create(3)), caches.messages, Guarded(at_end=True)
    layout = caches.fast_path.layout_of(caches.read(request.SerializeToString()))
    assert layout is not None
    request.ClearField("caches")
    for reference in (b"\x0a\x01x", b"\x0a\x01x\x21", b"\x0a\x01x\x21\x01\x02"):
        name = b"x" * (len(reference) - 2)
        usual, other = (
            request.SerializeToString() + b"\x62" + bytes([len(each)]) + each
            for each in (b"\x0a" + bytes([len(name)]) + name, reference)
        )
        _, payloads = _wire.find(pb.AttendRequest, usual)
        assert messages.learn(reference, layout, payloads, 0, len(usual))
        for message in (usual, other):
            place = guarded.message(message), len(message)
            messages._read_request(
                messages._known_at, *place, messages._results_at, MOST_RESULT_BYTES, messages._asked_at
            )
            assert messages._asked[0] == (message == usual)


def main() -> None:
    """Raises, or the process is killed, if anything is wrong."""
    library.PATH = Path(sys.argv[1])  # type: ignore[misc]
    library._found.cache_clear()
    libraries = [library.Library(instructions) for instructions in library.available()]
    assert libraries
    for number in range(int(sys.argv[2])):
        random = Random(number)
        guarded = Guarded(at_end=random.random() < 0.7)
        many_keys = [(1, 2, 5), (2047, 2049, 4500)] if number % 5 == 4 else []  # enough to be divided into ranges
        call = guarded.call(random_call(random, *many_keys))
        for each in libraries:
            (outcome,) = attend(each, [call], random.choice((1, 3)), guarded.room)
            assert_right(call, outcome)
            if number % 5 == 0:
                product = random_product(random, room=guarded.room)
                product.assert_right(Products(each.instructions, unaided).multiply(product.weight, product.rows))
                passage = random_passage(random, room=guarded.room)
                passage.assert_right(passage.outcome(Passages(each.instructions, unaided)))
                layer = random_multi_head(random, room=guarded.room)
                layer.assert_right(layer.outcome(MultiHeads(each.instructions)))
                device = CpuDevice(1, 0, each)
                messages = Messages(each, lambda effort: None)
                requests = known_requests(random, messages, 3)
                for _ in range(20):
                    message = random_message(random, requests, random.choice((1, 2, 9))).SerializeToString()
                    assert assert_reads_as_others_do(messages, device, message) > 0
                    assert_reads_as_others_do(messages, device, spoilt(random, message))
                caches = Stepping(device, messages)
                read_references_at_the_end(caches)
                requests = known_steps(random, caches, 3)
                for _ in range(20):
                    message = random_message(random, requests, random.choice((1, 2)), another_step).SerializeToString()
                    assert assert_reads_steps_as_others_do(caches, message) > 0
                    assert_reads_steps_as_others_do(caches, spoilt(random, message))
                device.close()
            if number % 10 == 0:
                attend(each, sharing(random, 20, 16), random.choice((1, 3)), guarded.room)
    print("sound")


if __name__ == "__main__":
    main()
