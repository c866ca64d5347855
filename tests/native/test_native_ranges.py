"""Few rows over many keys: the native kernel processes ranges of keys on several threads, and merges the results."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from binding import Call, Outcome, assert_right, attend, each_instructions, paged
from bits import assert_same_bits
from hypothesis import given, settings
from random_calls import normal, random_call, randoms, sharing

from attnserve_server.native.library import Library

RANGE = 2048
"""Keys per range, as in the kernel."""
KEYS = (RANGE - 1, RANGE, RANGE + 1, 2 * RANGE, 2 * RANGE + 1, 6000)
LENGTHS = (1, 1, 1, 2, 5)


def assert_same(one: Outcome, other: Outcome) -> None:
    """To the last bit; if not finite, only that flag is compared."""
    assert one.finite == other.finite
    if one.finite:
        assert_same_bits(one.output, other.output)
        assert_same_bits(one.lse, other.lse)


@contextmanager
def no_more_memory_than(size: int) -> Iterator[None]:
    """Limits further memory of the process to `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@each_instructions
@settings(max_examples=25)
@given(random=randoms)
def test_many_keys_are_as_the_oracle_has_them(instructions: str, random: Random) -> None:
    call = random_call(random, LENGTHS, KEYS)
    (outcome,) = attend(Library(instructions), [call], random.choice((1, 2, 3)))
    assert_right(call, outcome)


@each_instructions
@settings(max_examples=15)
@given(random=randoms)
def test_batches_threads_and_pages_change_no_bits(instructions: str, random: Random) -> None:
    library = Library(instructions)
    calls = [replace(random_call(random, LENGTHS, KEYS), page_tokens=0), random_call(random), random_call(random)]
    order = list(range(-(-calls[0].key.shape[1] // 512)))
    random.shuffle(order)
    calls.append(paged(calls[0], 512, order))
    alone = [attend(library, [call])[0] for call in calls]
    assert_same(alone[0], alone[3])
    for threads in (1, 2, 4):
        for outcome, expected in zip(attend(library, calls, threads), alone, strict=True):
            assert_same(outcome, expected)


@each_instructions
@settings(max_examples=8)
@given(random=randoms)
def test_reading_shared_pages_once_changes_no_bits(instructions: str, random: Random) -> None:
    """Calls that share pages have different numbers of ranges, and some of their pages hold non-finite values."""
    library, calls = Library(instructions), sharing(random, random.choice((2, 3, 5)), 1024)
    apart = attend(library, [replace(call, shared=0) for call in calls])
    for threads in (1, 3):
        for together, alone in zip(attend(library, calls, threads), apart, strict=True):
            assert_same(together, alone)


@each_instructions
@pytest.mark.parametrize("place", [0, RANGE, 3 * RANGE - 1])
def test_what_is_not_finite_shows_wherever_it_is(instructions: str, place: int) -> None:
    numbers = np.random.default_rng(place)
    query, key, value = (normal(numbers, (1, length, 16)) for length in (1, 3 * RANGE, 3 * RANGE))
    for array, bad in ((key, np.nan), (value, np.nan), (value, np.inf)):
        spoiled = array.copy()
        spoiled[0, place, 3] = bad
        call = Call(query, spoiled if array is key else key, spoiled if array is value else value)
        assert not attend(Library(instructions), [call], 2)[0].finite
        mask = np.ones((1, 1, 3 * RANGE), np.bool_)
        mask[..., place] = False
        excluded = replace(call, mask=mask)
        # It may be left to other kernels, but if not, it must be right.
        (outcome,) = attend(Library(instructions), [excluded], 2)
        if outcome.finite:
            assert_right(excluded, outcome)


@each_instructions
def test_ranges_in_which_nothing_is_reached_weigh_nothing(instructions: str) -> None:
    numbers, library = np.random.default_rng(1), Library(instructions)
    query, key, value = (normal(numbers, (2, length, 16)) for length in (1, 3 * RANGE, 3 * RANGE))
    window = Call(query, key, value, offset=RANGE + 500, left=700, right=0)  # in two of three ranges
    nothing = replace(window, offset=10**6)
    behind = replace(window, offset=3 * RANGE + 700)  # its reach would begin with the next range
    sinks = replace(nothing, sinks=np.array([0.0, 1.0], np.float32))
    mask = np.zeros((1, 1, 3 * RANGE), np.bool_)
    mask[..., 2 * RANGE + 7] = True
    one_key = Call(query, key, value, mask=mask)
    far = Call(query, key, value, offset=3 * RANGE, slopes=np.array([0.5, 3.0], np.float32))  # first keys weigh nothing
    for call in (window, nothing, behind, sinks, one_key, far):
        (outcome,) = attend(library, [call], 3)
        assert_right(call, outcome)


@each_instructions
@pytest.mark.parametrize("masked", [0, 1])
def test_a_range_whose_scores_are_all_excluded_by_a_bias_has_been_reached(instructions: str, masked: int) -> None:
    """Its weights are not 0 but do not exist, whether the other range, which is masked, comes before it or after."""
    numbers = np.random.default_rng(1)
    query, key, value = (normal(numbers, (2, length, 16)) for length in (1, 2 * RANGE, 2 * RANGE))
    mask, bias = np.ones((1, 1, 2 * RANGE), np.bool_), np.zeros((1, 1, 2 * RANGE), np.float32)
    mask[..., masked * RANGE : (masked + 1) * RANGE] = False
    bias[..., (1 - masked) * RANGE : (2 - masked) * RANGE] = -np.inf
    excluded, unmasked, unbiased = attend(
        Library(instructions),
        [Call(query, key, value, mask=mask, bias=bias), Call(query, key, value, bias=bias), Call(query, key, value)],
    )
    assert [excluded.finite, unmasked.finite, unbiased.finite] == [False, True, True]


@each_instructions
def test_what_ranges_keep_is_bounded(instructions: str) -> None:
    """Beyond the bound, a thread processes one range after the other, which changes no bits."""
    numbers, library, heads = np.random.default_rng(2), Library(instructions), 32
    query = normal(numbers, (heads, 32, 1))
    widths = 1, {"AVX-512": 9, "AVX2": 17}[instructions]  # with either, 32 floats are kept of a row and range
    key, value = (normal(numbers, (1, 1 << 20, width)).astype(np.float16) for width in widths)
    # All heads share the same keys: these take little memory, and the partial results to be merged take much.
    call = Call(query, *(np.broadcast_to(array, (heads, *array.shape[1:])) for array in (key, value)))
    # The first call keeps as much as may be kept: others keep nothing.
    calls = [call, call, *(each for seed in range(12) for each in sharing(Random(seed), 3, 1024))]
    with no_more_memory_than(80 << 20):
        outcomes = attend(library, calls)
    few = (0, heads // 2, heads - 1)
    expected = attend(library, [Call(query[head : head + 1], key, value) for head in few], 2)
    for outcome in outcomes[:2]:
        for head, alone in zip(few, expected, strict=True):
            assert_same(Outcome(outcome.output[head : head + 1], outcome.lse[head : head + 1], outcome.finite), alone)
    for each, outcome in zip(calls[2:], outcomes[2:], strict=True):
        assert_same(outcome, attend(library, [replace(each, shared=0)])[0])


@each_instructions
def test_ranges_that_no_query_reaches_take_no_memory(instructions: str) -> None:
    """Nor time: the cost is that of the window's keys, however many keys there are."""
    numbers, library, length = np.random.default_rng(3), Library(instructions), 1 << 20
    query = normal(numbers, (1, 32, 1))
    key, value = (normal(numbers, (1, length, width)).astype(np.float16) for width in (1, 9))
    call = Call(query, key, value, offset=length - 32, left=100, right=0)
    near = Call(query, key[:, -132:], value[:, -132:], offset=100, left=100, right=0)
    with no_more_memory_than(48 << 20):
        outcomes = attend(library, [call] * 64)
    for outcome in outcomes:
        assert_right(near, outcome)
