"""The bits of a native result depend on its call alone: not on the batch, threads, addresses or layouts."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from binding import Call, Outcome, Place, attend, each_instructions, laid, paged
from bits import assert_same_bits
from hypothesis import given, settings
from random_calls import normal, random_call, randoms, sharing

from attnserve_server.native.library import Library


def assert_same(one: Outcome, other: Outcome) -> None:
    """To the last bit; if not finite, only that flag is compared."""
    assert one.finite == other.finite
    if one.finite:
        assert_same_bits(one.output, other.output)
        assert_same_bits(one.lse, other.lse)


@each_instructions
@settings(max_examples=25)
@given(random=randoms)
def test_batches_and_threads_change_no_bits(instructions: str, random: Random) -> None:
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
    """More threads than work units, and calls of many units, over and over."""
    numbers, library = np.random.default_rng(0), Library(instructions)
    calls = [
        Call(*(normal(numbers, (heads, length, 16)) for _ in range(3)), right=0)
        for heads, length in ((1, 1), (1, 1), (3, 500), (2, 127), (1, 3))
    ]
    alone = [attend(library, [call])[0] for call in calls]
    for _ in range(10):
        for outcome, expected in zip(attend(library, calls, threads=8), alone, strict=True):
            assert_same(outcome, expected)


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


@each_instructions
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("width", [32, 64, 72, 128])
def test_more_than_a_processor_keeps_in_cache_changes_no_bits(instructions: str, width: int, rows: int) -> None:
    """Few queries over many keys prefetch these only where all calls together read more than caches may hold."""
    numbers, library, length = np.random.default_rng(width), Library(instructions), 2111 * 64 // width
    query, key, value = (normal(numbers, (heads, n, width)) for heads, n in ((8 * rows, 1), (8, length), (8, length)))
    call = Call(query, key, value, left=length - 3, right=0, offset=length - 1)
    assert key.nbytes + value.nbytes < 1 << 24 < 2 * (key.nbytes + value.nbytes)
    (alone,) = attend(library, [call])
    for outcome in attend(library, [call, replace(call, query=-query), call])[::2]:
        assert_same(outcome, alone)
    assert alone.finite
