"""Calls of the native kernel built from arrays, and the oracle's results for them.

Inputs lie where a `Place` puts them: at any address, with any strides, surrounded by bytes that are NaN in every dtype,
so that reads outside an array show. Outputs are surrounded by bytes that must not change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias, cast

import ml_dtypes
import numpy as np
import oracle
import pytest
from oracle import Array

from attnserve_server.native.library import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Addresses,
    Library,
    Shape,
    Strides,
    Team,
    Threads,
    available,
    pack,
)

BFLOAT: Final = np.dtype(ml_dtypes.bfloat16)
DTYPES: Final[dict[np.dtype[Any], int]] = {
    np.dtype(np.float32): FLOAT32,
    np.dtype(np.float16): FLOAT16,
    BFLOAT: BFLOAT16,
}
HALF_A_UNIT: Final[dict[np.dtype[Any], float]] = {
    np.dtype(np.float32): 0.0,
    np.dtype(np.float16): 2.0**-11,
    BFLOAT: 2.0**-8,
}
"""The largest relative change by rounding a result to a dtype, on top of the tolerance for float32."""

NAN_BYTE, CANARY = 0xFF, 0xA5

needs_native = pytest.mark.skipif(
    not available() and "REQUIRE_NATIVE" not in os.environ, reason="there is no native kernel here"
)
each_instructions = pytest.mark.parametrize(
    "instructions", available() or [pytest.param("", marks=needs_native, id="none")]
)
"""Runs the test with each instruction set of this processor."""


def unaided(flops: int) -> Threads:
    """The threads for work of any size: none but the caller's."""
    return Threads()


class Place(NamedTuple):
    """An array's memory layout: which of its first two axes is outermost, gaps, and the first byte's address."""

    tokens_first: bool = False
    token_gap: int = 0
    """Elements between tokens."""
    address: int = 0
    """Bytes past a multiple of 64."""


PACKED: Final = Place()
Room: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any], Place, int], tuple[Array, Array]]
"""Given shape [heads, tokens, width], dtype, place and fill byte: an array, and the filled memory that it lies in."""


def room(shape: tuple[int, ...], dtype: np.dtype[Any], place: Place, fill: int) -> tuple[Array, Array]:
    """A `Room` with some space on both sides."""
    heads, tokens, width = shape
    memory = np.full(heads * tokens * (width + place.token_gap) * dtype.itemsize + 256, fill, np.uint8)
    return np.ndarray(
        shape, dtype, memory.data, -memory.ctypes.data % 64 + 64 + place.address, steps(shape, dtype, place)
    ), memory


def steps(shape: tuple[int, ...], dtype: np.dtype[Any], place: Place) -> tuple[int, int, int]:
    """Strides between heads, tokens and elements, in bytes."""
    heads, tokens, width = shape
    row = (width + place.token_gap) * dtype.itemsize
    return (row, heads * row, dtype.itemsize) if place.tokens_first else (tokens * row, row, dtype.itemsize)


def laid(array: Array, place: Place = PACKED, room: Room = room) -> Array:
    """A copy of an array [heads, tokens, width], laid out as a place says, surrounded by NaN."""
    copy, _ = room(array.shape, array.dtype, place, NAN_BYTE)
    copy[...] = array
    return copy


@dataclass(frozen=True)
class Call:
    """One sequence. query [Hq, Lq, D], key [Hk, S, D], value [Hk, S, Dv]; any strides, but the last axis contiguous."""

    query: Array
    key: Array
    value: Array
    offset: int = 0
    left: int = -1
    right: int = -1
    mask: Array | None = None
    """[Hq or 1, Lq or 1, S or 1], as for `bias`."""
    bias: Array | None = None
    slopes: Array | None = None
    sinks: Array | None = None
    scale: float | None = None
    softcap: float = 0.0
    output: Place = PACKED
    page_tokens: int = 0
    key_pages: tuple[Array, ...] = ()
    """The keys if `page_tokens` is set: [Hk, page_tokens, D] each, of equal strides; `key` is then for the oracle."""
    value_pages: tuple[Array, ...] = ()
    shared: int = 0

    @property
    def expected(self) -> oracle.Expected:
        """The oracle's result."""
        return oracle.attend(
            self.query,
            self.key,
            self.value,
            query_offset=self.offset,
            window=(self.left, self.right),
            mask=self.mask,
            bias=self.bias,
            alibi_slopes=self.slopes,
            sinks=self.sinks,
            scale=self.scale,
            softcap=self.softcap,
        )


@dataclass(frozen=True)
class Outcome:
    """The result of a call: output [Hq, Lq, Dv], lse [Hq, Lq], and whether the kernel reported it as finite."""

    output: Array
    lse: Array
    finite: bool


class _Packed:
    """A call as the kernel reads it, and the memory that must stay alive until then."""

    def __init__(self, call: Call, room: Room) -> None:
        (heads, length, width), value_width = call.query.shape, call.value.shape[2]
        self.output, around = room((heads, length, value_width), call.query.dtype, call.output, CANARY)
        lse, around_lse = room((1, heads, length), np.dtype(np.float32), Place(address=call.output.address), CANARY)
        self.lse, self._memories = lse[0], (around, around_lse)
        key, value, self._pages = call.key, call.value, []
        key_at, value_at = key.ctypes.data, value.ctypes.data
        if call.page_tokens:
            if call.key_pages:
                key, value = call.key_pages[0], call.value_pages[0]
            for pages in (call.key_pages, call.value_pages):
                self._pages.append(np.array([page.ctypes.data for page in pages], np.uintp))
            key_at, value_at = (each.ctypes.data for each in self._pages)
        shape = Shape(
            query_length=length,
            kv_length=call.key.shape[1],
            offset=call.offset,
            query_heads=heads,
            kv_heads=call.key.shape[0],
            head_dim=width,
            value_dim=value_width,
            query_dtype=DTYPES[call.query.dtype],
            kv_dtype=DTYPES[call.key.dtype],
            page_tokens=call.page_tokens,
            query=_strides(call.query),
            key=_strides(key),
            value=_strides(value),
            output=_strides(self.output),
            lse_head=length,
            mask=_steps(call.mask),
            bias=_steps(call.bias),
            left=call.left,
            right=call.right,
            scale=1 / width**0.5 if call.scale is None else call.scale,
            softcap=call.softcap,
        )
        options = [0 if each is None else each.ctypes.data for each in (call.mask, call.bias, call.slopes, call.sinks)]
        addresses = (call.query.ctypes.data, key_at, value_at, self.output.ctypes.data, self.lse.ctypes.data, *options)
        self.bytes = pack(cast(Addresses, addresses), shape.packed(), call.shared)

    def outcome(self, finite: bool) -> Outcome:
        """The call's result. Asserts that nothing was written around it."""
        outcome = Outcome(self.output.copy(), self.lse.copy(), finite)
        for array in (self.output, self.lse):
            array[...] = np.frombuffer(bytes([CANARY] * array.itemsize), array.dtype)[0]
        assert all((memory == CANARY).all() for memory in self._memories), "something was written beside a result"
        return outcome


def attend(library: Library, calls: Sequence[Call], threads: int = 1, room: Room = room) -> list[Outcome]:
    """The results of calls that are computed together. `room` allocates the results."""
    packed = [_Packed(call, room) for call in calls]
    shared = Threads(_team(threads - 1), threads - 1) if threads > 1 else None
    not_finite = library.attend(bytearray().join(each.bytes for each in packed), shared)
    return [each.outcome(place not in not_finite) for place, each in enumerate(packed)]


@cache
def _team(helpers: int) -> Team:
    """A team whose helpers all take part in everything computed with it."""
    team = Team(helpers, patient=True)
    assert len(team) == helpers
    return team


def paged(call: Call, page_tokens: int, order: Sequence[int]) -> Call:
    """The same call with its keys and values in pages, laid out in memory in this order."""
    pages = []
    for array in (call.key, call.value):
        heads, tokens, width = array.shape
        count = -(-tokens // page_tokens)
        pool = np.full((max(count, 1), heads, page_tokens, width), np.nan, np.float32).astype(array.dtype)
        own = [pool[order[number]] for number in range(count)]
        for number, page in enumerate(own):
            part = array[:, number * page_tokens : (number + 1) * page_tokens]
            page[:, : part.shape[1]] = part
        pages.append(tuple(own))
    return replace(call, page_tokens=page_tokens, key_pages=pages[0], value_pages=pages[1])


def assert_right(call: Call, outcome: Outcome, tolerance: float = 2e-6) -> None:
    """Asserts that a call's result is finite and matches the oracle's."""
    expected = call.expected
    assert outcome.finite
    # Scores are float32: their errors grow with the products summed, and the errors of exponentials grow with them.
    seen = [np.where(expected.attended, scores, 0.0) for scores in (expected.raw, expected.masked)]
    steep = 1.0 if call.scale is None else abs(call.scale) * call.query.shape[2] ** 0.5
    tolerance *= max(1.0, steep, float(np.abs(seen).max(initial=0)) / 8)
    output, error = outcome.output.astype(np.float64), HALF_A_UNIT[call.query.dtype]
    limit = tolerance * max(1.0, float(np.abs(expected.output).max(initial=0))) + error * np.abs(expected.output)
    if call.query.dtype == np.float16:
        limit = limit + 2.0**-25  # half of the dtype's smallest number
    assert (np.abs(output - expected.output) <= limit).all(), np.abs(output - expected.output).max()
    nothing = np.isneginf(expected.lse)
    np.testing.assert_array_equal(np.isneginf(outcome.lse), nothing)
    lse = expected.lse[~nothing]
    assert (np.abs(outcome.lse[~nothing] - lse) <= tolerance * np.maximum(1.0, np.abs(lse))).all()


def _strides(array: Array) -> Strides:
    assert not array.size or array.shape[2] == 1 or array.strides[2] == array.itemsize
    return Strides(array.strides[1] // array.itemsize, array.strides[0] // array.itemsize)


def _steps(array: Array | None) -> tuple[int, ...]:
    """Strides between heads, queries and keys; 0 for an axis of length 1."""
    if array is None:
        return 0, 0, 0
    return tuple(
        0 if length == 1 else step // array.itemsize for length, step in zip(array.shape, array.strides, strict=True)
    )
