"""The bits of a native result follow from its call alone: not from company, threads, addresses or layouts."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from binding import BFLOAT, Call, Outcome, Place, attend, each_instructions, laid, paged
from bits import assert_same_bits
from hypothesis import given, settings
from random_calls import normal, random_call, randoms

from attnserve_server.native.library import Library


def assert_same(one: Outcome, other: Outcome) -> None:
    """To the last bit; of what is not finite nothing else has any meaning."""
    assert one.finite == other.finite
    if one.finite:
        assert_same_bits(one.output, other.output)
        assert_same_bits(one.lse, other.lse)


@each_instructions
@settings(max_examples=25)
@given(random=randoms)
def test_company_and_threads_change_no_bits(instructions: str, random: Random) -> None:
    library, calls = Library(instructions), [random_call(random) for _ in range(8)]
    alone = [attend(library, [call])[0] for call in calls]
    for threads in (1, 2, 3, 4):
        order = list(range(len(calls)))
        random.shuffle(order)
        for place, outcome in zip(order, attend(library, [calls[place] for place in order], threads), strict=True):
            assert_same(outcome, alone[place])


@each_instructions
@settings(max_examples=25)
@given(random=randoms)
def test_where_tensors_lie_changes_no_bits(instructions: str, random: Random) -> None:
    library, call = Library(instructions), replace(random_call(random), page_tokens=0)
    places = [
        Place(),
        Place(address=4),
        Place(address=32),
        Place(address=1),
        Place(True),
        Place(True, 3),
        Place(False, 16),
    ]
    one, *others = attend(
        library,
        [
            replace(
                call,
                query=laid(call.query, place),
                key=laid(call.key, place),
                value=laid(call.value, place),
                output=place,
            )
            for place in places
        ],
    )
    for other in others:
        assert_same(one, other)


@each_instructions
@settings(max_examples=25)
@given(random=randoms)
def test_pages_of_whole_blocks_change_no_bits(instructions: str, random: Random) -> None:
    library, call = Library(instructions), replace(random_call(random), page_tokens=0)
    calls = [call]
    for page_tokens in (64, 128, 512):
        order = list(range(-(-call.key.shape[1] // page_tokens)))
        random.shuffle(order)
        calls.append(paged(call, page_tokens, order))
    one, *others = attend(library, calls)
    for other in others:
        assert_same(one, other)


@each_instructions
def test_the_work_of_many_threads_is_done_once(instructions: str) -> None:
    """More threads than units, and calls that are many units, over and over."""
    numbers, library = np.random.default_rng(0), Library(instructions)
    calls = [
        Call(*(normal(numbers, (heads, length, 16)) for _ in range(3)), right=0)
        for heads, length in ((1, 1), (1, 1), (3, 500), (2, 127), (1, 3))
    ]
    alone = [attend(library, [call])[0] for call in calls]
    for _ in range(10):
        for outcome, expected in zip(attend(library, calls, threads=8), alone, strict=True):
            assert_same(outcome, expected)


def sharing(random: Random, count: int, page_tokens: int) -> list[Call]:
    """Calls over pages of one pool, of which each has the first so many in common with the one before it.

    Some pages hold NaN, which windows may keep from some of the calls.
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
        # It may end within a page that others have more of.
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


@each_instructions
@pytest.mark.parametrize("page_tokens", [16, 64, 128])
@settings(max_examples=20)
@given(random=randoms)
def test_reading_shared_pages_once_changes_no_bits(instructions: str, page_tokens: int, random: Random) -> None:
    library = Library(instructions)
    calls = sharing(random, random.choice((2, 3, 7, 40)), page_tokens)
    apart = attend(library, [replace(call, shared=0) for call in calls])
    for threads in (1, 3):
        for together, alone in zip(attend(library, calls, threads), apart, strict=True):
            assert_same(together, alone)
