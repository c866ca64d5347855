"""Random calls of the native kernel: every option, shape, dtype and place in memory, alone and together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
from binding import BFLOAT, Call, Place, laid, paged
from hypothesis import strategies as st
from oracle import Array

WIDTHS = (1, 3, 7, 8, 15, 16, 17, 31, 32, 33, 40, 64, 65, 80, 96, 128, 129, 200, 256)
LENGTHS = (0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 13, 17, 33, 66, 130)
KEYS = (0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 66, 100, 127, 128, 129, 200, 257)
FLOATS = (np.dtype(np.float32), np.dtype(np.float32), np.dtype(np.float16), BFLOAT)

randoms = st.integers(0, 2**32 - 1).map(Random)
"""Random generators to draw calls with."""


def random_call(random: Random, lengths: Sequence[int] = LENGTHS, many_keys: Sequence[int] = KEYS) -> Call:
    """A call of any kind, with query and key counts from these. Arrays are unit-normal, rounded to their dtypes."""
    numbers = np.random.default_rng(random.randrange(2**32))
    kv_heads, group = random.choice((1, 1, 2, 3)), random.choice((1, 1, 2, 3, 4, 7))
    heads, length, keys = kv_heads * group, random.choice(lengths), random.choice(many_keys)
    width, value_width = random.choice(WIDTHS), random.choice(WIDTHS)
    query_dtype = random.choice(FLOATS)
    kv_dtype = random.choice((query_dtype, query_dtype, *FLOATS))
    call = Call(
        query=normal(numbers, (heads, length, width)).astype(query_dtype),
        key=normal(numbers, (kv_heads, keys, width)).astype(kv_dtype),
        value=normal(numbers, (kv_heads, keys, value_width)).astype(kv_dtype),
        offset=random.choice((0, 0, keys - length, random.randint(-300, 300), 10**12, -(10**12))),
        left=random.choice((-1, -1, 0, 1, random.randrange(200))),
        right=random.choice((-1, 0, 0, 1, random.randrange(200))),
        scale=random.choice((None, None, None, 0.0, -0.25, 0.3)),
        softcap=random.choice((0.0, 0.0, 1.0, 20.0)),
        output=_place(random),
    )
    if random.random() < 0.3:
        call = replace(
            call, mask=_shrunk(random, numbers.random((heads, length, keys)) < random.choice((0.1, 0.5, 0.9)))
        )
    elif random.random() < 0.3:
        call = replace(call, slopes=numbers.standard_normal(heads).astype(np.float32), offset=min(call.offset, 300))
    if random.random() < 0.3:
        call = replace(call, bias=_shrunk(random, normal(numbers, (heads, length, keys))))
    if random.random() < 0.3:
        call = replace(call, sinks=normal(numbers, (heads,)))
    if random.random() < 0.25 and keys:
        tokens = random.choice((1, 5, 16, 32, 48, 64, 128))
        order = list(range(-(-keys // tokens)))
        random.shuffle(order)
        call = paged(call, tokens, order)
    return replace(
        call,
        query=laid(call.query, _place(random)),
        key=laid(call.key, _place(random)),
        value=laid(call.value, _place(random)),
    )


def sharing(random: Random, count: int, page_tokens: int) -> list[Call]:
    """Calls over pages of one pool; each shares some leading pages with the call before it.

    Some pages hold NaN, which windows may hide from some of the calls.
    """
    numbers = np.random.default_rng(random.randrange(2**32))
    kv_heads, group, length = random.choice((1, 2)), random.choice((1, 2, 4)), random.choice((1, 1, 2, 3, 5, 8))
    width, value_width = random.choice(((64, 64), (16, 40), (24, 8)))
    query_dtype, kv_dtype = random.choice(((np.float32, np.float32), (np.float32, BFLOAT), (np.float16, np.float16)))
    pool = [normal(numbers, (12, kv_heads, page_tokens, each)).astype(kv_dtype) for each in (width, value_width)]
    if random.random() < 0.4:
        for array in pool:
            array[random.randrange(12), :, random.randrange(page_tokens)] = random.choice((np.nan, np.inf))
    left = random.choice((-1, -1, 5, 70, 100))
    options: dict[str, object] = {"softcap": random.choice((0.0, 10.0))}
    if random.random() < 0.3:
        options["slopes"] = np.abs(normal(numbers, (kv_heads * group,)))
    if random.random() < 0.3:
        options["sinks"] = normal(numbers, (kv_heads * group,))
    calls: list[Call] = []
    table = [random.randrange(12) for _ in range(5)]
    for number in range(count):
        shared = random.randint(1, len(table)) if number else 0
        if number:
            table = table[:shared] + [random.randrange(12) for _ in range(random.randint(0, 3))]
        # The call may end within a page of which others use more.
        keys = random.randint(1, len(table) * page_tokens)
        key_pages, value_pages = (tuple(array[page] for page in table) for array in pool)
        key, value = (np.concatenate(pages, 1)[:, :keys] for pages in (key_pages, value_pages))
        calls.append(
            Call(
                query=normal(numbers, (kv_heads * group, length, width)).astype(query_dtype),
                key=key,
                value=value,
                offset=keys - length,
                left=left,
                right=0,
                page_tokens=page_tokens,
                key_pages=key_pages,
                value_pages=value_pages,
                shared=shared,
                **options,  # type: ignore[arg-type]
            )
        )
    return calls


def _place(random: Random) -> Place:
    return Place(random.random() < 0.5, random.choice((0, 0, 1, 3, 16)), random.choice((0, 0, 4, 32, 1, 2, 3, 37)))


def _shrunk(random: Random, array: Array) -> Array:
    """The array as it is, or with some axes reduced to length 1, to be broadcast."""
    for axis, length in enumerate(array.shape):
        if length and random.random() < 0.35:
            array = array.take([0], axis)
    return laid(array, Place(address=random.choice((0, 1, 2, 4, 7))))


def normal(numbers: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Unit-normal float32 numbers."""
    drawn: Array = numbers.standard_normal(shape).astype(np.float32)
    return drawn
