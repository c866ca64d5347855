"""The kernel compiled for the processor (`attention.h` says what it computes), and the calls that it takes.

In: addresses, shapes and strides, packed as the kernel reads them. Out: results where the calls want them, and which of
them are not finite. Where the library was not built, or the processor lacks the instructions, there is no kernel.
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
from attnserve_server.requests.scores import MAX_FACTOR, Scored

PATH: Final = Path(__file__).with_name("attention.so")
"""Where the package build puts the library."""

NAME: Final = "cpu_native"
DESCRIPTION: Final = "dot-product scores with all options but ALiBi under a mask, in pages and in one piece"

FLOAT32, FLOAT16, BFLOAT16 = range(3)
"""The dtypes, as calls encode them."""

MAX_WIDTH: Final = 1024
"""The widest head: a block of keys and one of values should stay in a cache near the processor."""

Addresses: TypeAlias = tuple[int, int, int, int, int, int, int, int, int]
"""Of query, key, value, output, lse, mask, bias, ALiBi slopes and sinks; 0 is none. Bias, slopes and sinks are float32,
masks are bytes; in pages, key and value are the addresses of arrays of page addresses.
"""
_VARYING: Final = struct.Struct("=9Qqq")
_FIXED: Final = struct.Struct("=27q2d")
_KEYS: Final = struct.Struct("=2q")
CALL_BYTES: Final = _VARYING.size + _FIXED.size
CALL_FINITE: Final = 10
"""The index of a call's `finite` among its fields."""


_NO_MEMORY: Final = -1
"""What functions return when out of memory."""


class Strides(NamedTuple):
    """The steps from token to token and from head to head, in elements."""

    token: int
    head: int


class Keys(NamedTuple):
    """How many keys a call has, the position of its first query among them, and the layout of keys and values: pages of
    `page_tokens` tokens, or one piece (0).
    """

    length: int
    offset: int
    dtype: int
    page_tokens: int
    key: Strides
    value: Strides


class Shape(NamedTuple):
    """All of a call except its addresses: see `attention.h`. Strides of 0 broadcast a mask or bias."""

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
    """[3]: the steps from head to head, from query to query, and from key to key (1 or 0)."""
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


def supports(scored: Scored, widest: int, *, hides: bool, alibi: bool) -> bool:
    """Whether the kernel supports heads of this width with these scores, as long as the scores are not to be returned.
    They must be dot products, with a scale and a softcap that keep them within float32. `hides`: a mask or a bias may
    hide keys.
    """
    if widest > MAX_WIDTH or scored.score is not None:
        return False
    # Where only distant keys are left, their ALiBi biases are so large that float32 loses its precision.
    return max(abs(scored.scale), scored.softcap) <= MAX_FACTOR and not (hides and alibi)


def pack(addresses: Addresses, shape: bytes, shared: int = 0) -> bytes:
    """A call, whose first `shared` pages are also those of the call before it."""
    return _VARYING.pack(*addresses, shared, 1) + shape


def pack_several(addresses: Addresses, steps: Sequence[int], shape: bytes, count: int) -> bytes:
    """`count` calls of one shape. `steps` says how many bytes each of the first addresses advances from call to call:
    0 for tensors that are shared or absent.
    """
    calls = np.tile(np.frombuffer(pack(addresses, shape), np.int64), (count, 1))
    calls[:, : len(steps)] += np.arange(count)[:, np.newaxis] * np.array(steps)
    return calls.tobytes()


def with_keys(shape: bytes, kv_length: int, offset: int) -> bytes:
    """A packed shape with its number of keys, and the position of its first query, replaced."""
    return shape[:8] + _KEYS.pack(kv_length, offset) + shape[8 + _KEYS.size :]


def not_finite(packed: bytearray, field: int, size: int) -> list[int]:
    """The places of packed structures, of `size` bytes each, into whose int64 field `field` the library has put 0: it
    has found them not to be finite.
    """
    finite = memoryview(packed).cast("q")[field :: size // 8].tolist()
    return [place for place, is_finite in enumerate(finite) if not is_finite] if 0 in finite else []


class Team:
    """Threads that help callers of the kernel to compute, and sleep until then."""

    def __init__(self, helpers: int, patient: bool = False) -> None:
        """Starts `helpers` threads, or as many as can be had. Calls wait for all helpers of a `patient` team to join.
        Raises OSError if there is no library, and MemoryError.
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
        with suppress(RuntimeError):  # the limit on threads
            while len(self._threads) < helpers:
                thread = Thread(target=help_, args=(self.address,), name="attnserve-native", daemon=True)
                thread.start()
                self._threads.append(thread)

    def __len__(self) -> int:
        """How many threads help."""
        return len(self._threads)

    def close(self) -> None:
        """Ends the threads once their work is done. Later callers of the kernel with this team compute alone."""
        self._dismiss(self.address)
        for thread in self._threads:
            thread.join()


class Threads(NamedTuple):
    """What computes: the caller, without the GIL, and at most `helpers` threads of a team."""

    team: Team | None = None
    helpers: int = 0


class Function:
    """A function of the library, for one instruction set or any, which takes a team and a number of helpers after its
    own arguments, and returns 0, or that there was no memory, or another status.
    """

    def __init__(self, what: str, instructions: str | None, *arguments: Any) -> None:
        """`arguments` are the types of its own arguments. Raises OSError if there is no library."""
        name = f"attnserve_{what}" if instructions is None else f"attnserve_{what}_{_symbol(instructions)}"
        self._aside = getattr(ctypes.CDLL(str(PATH)), name)
        # For work that takes less time than releasing the GIL and waiting to get it back.
        self._at_once = getattr(ctypes.PyDLL(str(PATH)), name)
        for function in (self._aside, self._at_once):
            function.argtypes = [*arguments, ctypes.c_void_p, ctypes.c_int64]
            function.restype = ctypes.c_int64
        self.address = ctypes.cast(self._at_once, ctypes.c_void_p).value
        """Its address, for other functions of the library."""

    def __call__(self, threads: Threads | None, *arguments: object) -> int:
        """Calls it with `threads`; without them the caller computes alone, holding the GIL. Raises MemoryError."""
        if threads is None:
            status: int = self._at_once(*arguments, None, 0)
        else:
            team, helpers = threads
            status = self._aside(*arguments, None if team is None else team.address, helpers)
        if status == _NO_MEMORY:
            raise MemoryError("no memory for what the native library keeps while it computes")
        return status


class Library:
    """The kernel for one instruction set."""

    def __init__(self, instructions: str) -> None:
        """Raises OSError if there is no library."""
        self.instructions = instructions
        self.attend_function = Function("attend", instructions, ctypes.c_void_p, ctypes.c_int64)
        """Computes a number of calls at an address."""

    def attend(self, calls: bytearray, threads: Threads | None) -> list[int]:
        """Computes packed calls. Returns the places of those whose results are not finite, not counting rows with
        nothing to attend: no result of such a call has any meaning.

        Without `threads` the caller computes alone, holding the GIL. Raises MemoryError.
        """
        first, count = ctypes.c_char.from_buffer(calls), len(calls) // CALL_BYTES
        self.attend_function(threads, ctypes.addressof(first), count)
        return not_finite(calls, CALL_FINITE, CALL_BYTES)


def best(wanted: str) -> Library | None:
    """The kernel for the best instruction set available, if any (`auto`), none (`off`), or the one for an instruction
    set given by name. Raises LookupError if that is not available.
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
    """The instruction sets that the library was built for and this processor has, best first."""
    return _found()[0]


@cache
def amx_permitted() -> bool:
    """Whether the library multiplies bfloat16 by AMX: it was built for that, the processor has it, and the system lets
    this process use it.
    """
    if not available():
        return False
    permitted = ctypes.CDLL(str(PATH)).attnserve_amx_permitted
    permitted.restype = ctypes.c_int64
    return bool(permitted())


def hindrance() -> str:
    """Why none is available; empty if one is."""
    return _found()[1]


@cache
def _found() -> tuple[tuple[str, ...], str]:
    if not PATH.exists():
        return (), "it was not built, for want of a C compiler"
    # It may compute something else, or read calls differently.
    if sources.present(PATH.parent) and not sources.made(PATH):
        why = f"{PATH} was not made of the sources beside it: python hatch_build.py"
        warnings.warn(why, RuntimeWarning, stacklevel=3)  # otherwise tests would be skipped unnoticed
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
