"""The kernel that is compiled for the processor (`attention.h` says what it computes), and the calls that it is given.

In: addresses, shapes and strides, packed as the kernel reads them. Out: results where the calls want them, and which of
them are not finite. Where the library was not built, or the processor lacks the instructions, there is none.
"""

from __future__ import annotations

import ctypes
import struct
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from attnserve_server.native import sources

PATH: Final = Path(__file__).with_name("attention.so")
"""Where building the package puts the library."""

NAME: Final = "cpu_native"
DESCRIPTION: Final = "dot-product scores with all options but ALiBi under a mask, in pages and in one piece"

FLOAT32, FLOAT16, BFLOAT16 = range(3)
"""The dtypes, as calls have them."""

MAX_WIDTH: Final = 1024
"""Of heads: a block of keys and one of values are to stay near the processor."""

Addresses: TypeAlias = tuple[int, int, int, int, int, int, int, int, int]
"""Of query, key, value, output, lse, mask, bias, ALiBi slopes and sinks; 0 is none. Biases and what comes behind are of
float32, masks of bytes; in pages, key and value are the addresses of arrays of addresses.
"""
_VARYING: Final = struct.Struct("=9Qqq")
_FIXED: Final = struct.Struct("=27q2d")
_KEYS: Final = struct.Struct("=2q")
CALL_BYTES: Final = _VARYING.size + _FIXED.size
_FINITE: Final = 10
"""The place of a call's `finite` among its fields."""


_NO_MEMORY: Final = -1
"""What functions return."""


class Strides(NamedTuple):
    """From token to token and from head to head, in elements."""

    token: int
    head: int


class Keys(NamedTuple):
    """How many keys a call has, the position of its first query among them, and how keys and values lie: with so many
    tokens in a page, or in one piece (0).
    """

    length: int
    offset: int
    dtype: int
    page_tokens: int
    key: Strides
    value: Strides


class Shape(NamedTuple):
    """All of a call but where its tensors lie: see `attention.h`. Strides of 0 broadcast a mask or bias."""

    query_length: int
    kv_length: int
    offset: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    query_dtype: int
    kv_dtype: int
    page_tokens: int
    query: Strides
    key: Strides
    value: Strides
    output: Strides
    lse_head: int
    mask: tuple[int, ...]
    """[3]: from head to head, from query to query, and 1 or 0 from key to key."""
    bias: tuple[int, ...]
    left: int
    right: int
    scale: float
    softcap: float

    def packed(self) -> bytes:
        """As the kernel reads it."""
        head, tail = self[:10], self[17:]
        return _FIXED.pack(
            *head,
            *self.query,
            *self.key,
            *self.value,
            *self.output,
            self.lse_head,
            *self.mask,
            *self.bias,
            *tail,
        )


def computes(*, widest: int, score: object, return_scores: object, mask: bool, alibi: bool) -> bool:
    """Whether the kernel has what a call asks for: heads of such a width, no learned score, no scores to return."""
    # A mask may leave only distant keys, whose large ALiBi biases cost float32 its precision.
    return widest <= MAX_WIDTH and score is None and return_scores is None and not (mask and alibi)


def pack(addresses: Addresses, shape: bytes, shared: int = 0) -> bytes:
    """A call, of which so many first pages are also those of the call before it."""
    return _VARYING.pack(*addresses, shared, 1) + shape


def pack_several(addresses: Addresses, steps: Sequence[int], shape: bytes, count: int) -> bytes:
    """Calls of one shape, `count` of them. `steps` says by how many bytes the first addresses of each are behind those
    of the call before: 0 for what they share, or have not.
    """
    calls = np.tile(np.frombuffer(pack(addresses, shape), np.int64), (count, 1))
    calls[:, : len(steps)] += np.arange(count)[:, np.newaxis] * np.array(steps)
    return calls.tobytes()


def with_keys(shape: bytes, kv_length: int, offset: int) -> bytes:
    """A packed shape, but for so many keys, and with the first query at that position."""
    return shape[:8] + _KEYS.pack(kv_length, offset) + shape[8 + _KEYS.size :]


class Team:
    """Threads that compute with whoever calls the kernel, and sleep until then."""

    def __init__(self, helpers: int, patient: bool = False) -> None:
        """So many threads, or as many as can be had; with a `patient` team none is done without. Raises OSError if
        there is no library, and MemoryError.
        """
        library = ctypes.CDLL(str(PATH))
        gather, help_ = library.attnserve_gather, library.attnserve_help
        self._dismiss = library.attnserve_dismiss
        gather.argtypes, gather.restype = [ctypes.c_int64], ctypes.c_void_p
        for function in (help_, self._dismiss):
            function.argtypes, function.restype = [ctypes.c_void_p], None
        self.address: int = gather(patient) or 0
        if not self.address:
            raise MemoryError("no memory for a team of threads")
        self._threads: list[Thread] = []
        with suppress(RuntimeError):  # the limit of threads
            while len(self._threads) < helpers:
                thread = Thread(target=help_, args=(self.address,), name="attnserve-native", daemon=True)
                thread.start()
                self._threads.append(thread)

    def __len__(self) -> int:
        """How many threads help."""
        return len(self._threads)

    def close(self) -> None:
        """Ends the threads, when what they compute is done. Whoever calls the kernel with them computes alone."""
        self._dismiss(self.address)
        for thread in self._threads:
            thread.join()


class Threads(NamedTuple):
    """Who computes: the caller, while others run Python, and at most so many helpers of a team."""

    team: Team | None = None
    helpers: int = 0


class Function:
    """A function of the library, for one set of instructions or any, which takes a team and a number of helpers behind
    its own arguments, and returns 0, or that there was no memory, or what else it has to say.
    """

    def __init__(self, what: str, instructions: str | None, *arguments: Any) -> None:
        """`arguments` are the types of its own. Raises OSError if there is no library."""
        name = f"attnserve_{what}" if instructions is None else f"attnserve_{what}_{_symbol(instructions)}"
        self._aside = getattr(ctypes.CDLL(str(PATH)), name)
        # Work that takes less than to hand over the interpreter's lock and wait to have it back.
        self._at_once = getattr(ctypes.PyDLL(str(PATH)), name)
        for function in (self._aside, self._at_once):
            function.argtypes = [*arguments, ctypes.c_void_p, ctypes.c_int64]
            function.restype = ctypes.c_int64
        self.address = ctypes.cast(self._at_once, ctypes.c_void_p).value
        """Where it is, for other functions of the library."""

    def __call__(self, threads: Threads | None, *arguments: object) -> int:
        """Calls it, with these `threads`; without them the caller computes, and holds the interpreter. Raises
        MemoryError.
        """
        if threads is None:
            status: int = self._at_once(*arguments, None, 0)
        else:
            team, helpers = threads
            status = self._aside(*arguments, None if team is None else team.address, helpers)
        if status == _NO_MEMORY:
            raise MemoryError("no memory for what the native library keeps while it computes")
        return status


class Library:
    """The kernel for one set of instructions."""

    def __init__(self, instructions: str) -> None:
        """Raises OSError if there is no library."""
        self.instructions = instructions
        self.attend_function = Function("attend", instructions, ctypes.c_void_p, ctypes.c_int64)
        """What computes calls at an address, so many."""

    def attend(self, calls: bytearray, threads: Threads | None = None) -> list[int]:
        """Computes packed calls. Returns the places of those that did not come out finite, but for rows with nothing to
        attend: of such a call, nothing has any meaning.

        Without `threads` the caller computes, and holds the interpreter. Raises MemoryError.
        """
        first, count = ctypes.c_char.from_buffer(calls), len(calls) // CALL_BYTES
        self.attend_function(threads, ctypes.addressof(first), count)
        finite = memoryview(calls).cast("q")[_FINITE :: CALL_BYTES // 8].tolist()
        return [place for place, is_finite in enumerate(finite) if not is_finite] if 0 in finite else []


def best(wanted: str = "auto") -> Library | None:
    """The kernel for the best instructions that there are, if there is any; none if `off` is wanted; or for those that
    are wanted by name. Raises LookupError if they are not there.
    """
    if wanted == "off":
        return None
    found = {_symbol(name): name for name in available()}
    if wanted != "auto" and wanted not in found:
        there = ", ".join(found) or f"none, since {hindrance()}"
        raise LookupError(f"the native kernel for {wanted} is not available: there is {there}")
    name = next(iter(found), None) if wanted == "auto" else wanted
    return None if name is None else Library(found[name])


def _symbol(instructions: str) -> str:
    return instructions.replace("-", "").lower()


def available() -> tuple[str, ...]:
    """The sets of instructions that the library was built for and this processor has, the best first."""
    return _found()[0]


def hindrance() -> str:
    """Why there are none; empty if there are."""
    return _found()[1]


@cache
def _found() -> tuple[tuple[str, ...], str]:
    if not PATH.exists():
        return (), "it was not built, for want of a C compiler"
    # It may compute something else, or read calls otherwise.
    if sources.present(PATH.parent) and not sources.made(PATH):
        why = f"{PATH} was not made of the sources beside it: python hatch_build.py"
        warnings.warn(why, RuntimeWarning, stacklevel=3)  # tests would be skipped otherwise, and nobody would know
        return (), why
    try:
        library = ctypes.CDLL(str(PATH))
        instructions, call_bytes = library.attnserve_instructions, library.attnserve_call_bytes
    except (OSError, AttributeError) as error:
        return (), f"it cannot be loaded: {error}"
    instructions.restype = call_bytes.restype = ctypes.c_int64
    if call_bytes() != CALL_BYTES:
        return (), f"{PATH} is of another version, which reads other calls"
    names = {512: ("AVX-512", "AVX2"), 2: ("AVX2",)}.get(instructions(), ())
    return names, "" if names else "the processor has neither AVX-512 nor AVX2"
