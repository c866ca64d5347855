"""NaN and infinities: excluded ones never reach a result; if attended ones do, the kernel reports it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from binding import Call, assert_right, attend, each_instructions, paged
from bits import assert_same_bits
from hypothesis import assume, given
from oracle import Array
from random_calls import normal, random_call, randoms

from attnserve_server.native.library import Library

BAD = (np.nan, np.inf, -np.inf)


def with_keys(call: Call, excluded: Array, of_key: float, of_value: float) -> Call:
    """The call with other contents in the keys and values that are excluded [Hk, S]."""
    key, value = call.key.copy(), call.value.copy()
    key[excluded], value[excluded] = of_key, of_value
    return replace(call, key=key, value=value, page_tokens=0)


def attended(call: Call) -> Array:
    """Which keys [Hk, S] any row attends to."""
    rows: Array = call.expected.attended
    return np.array([of_head.any((0, 1)) for of_head in np.split(rows, len(call.key))])


@each_instructions
@given(random=randoms)
def test_what_no_row_reaches_changes_no_bits(instructions: str, random: Random) -> None:
    library, call = Library(instructions), replace(random_call(random), mask=None)
    good = with_keys(call, ~attended(call), 0.0, 0.0)
    bad = with_keys(call, ~attended(call), random.choice(BAD), random.choice(BAD))
    expected, outcome = attend(library, [good, bad])
    assert outcome.finite
    assert_same_bits(outcome.output, expected.output)
    assert_same_bits(outcome.lse, expected.lse)


@each_instructions
@given(random=randoms)
def test_what_a_mask_excludes_never_shows(instructions: str, random: Random) -> None:
    """For a masked value the kernel may report failure; for a masked key it may not."""
    library, call = Library(instructions), random_call(random)
    assume(call.mask is not None)
    keys = with_keys(call, ~attended(call), random.choice(BAD), 0.0)
    values = with_keys(call, ~attended(call), 0.0, random.choice(BAD))
    of_keys, of_values = attend(library, [keys, values])
    assert_right(keys, of_keys)
    if of_values.finite:
        assert_right(values, of_values)


@each_instructions
@given(random=randoms)
def test_what_is_attended_is_told_of(instructions: str, random: Random) -> None:
    library, call = Library(instructions), replace(random_call(random), page_tokens=0)
    seen = np.argwhere(call.expected.attended)
    assume(len(seen))
    head, query, key = random.choice(seen.tolist())
    kv_head = head // (len(call.query) // len(call.key))
    altered = {name: getattr(call, name).copy() for name in ("query", "key", "value")}
    name = random.choice(("query", "key", "value"))
    place = (head, query) if name == "query" else (kv_head, key)
    # Infinite queries and keys make infinite scores, which look like those of sums that overflowed.
    altered[name][(*place, random.randrange(altered[name].shape[2]))] = random.choice(BAD)
    calls = [call, replace(call, **altered), call]
    outcomes = attend(library, calls, threads=random.choice((1, 2)))
    assert [outcome.finite for outcome in outcomes] == [True, False, True]


@each_instructions
@pytest.mark.parametrize("keys", [1, 70])  # if the only score is -inf, there is no weight
@pytest.mark.parametrize("length", [1, 2, 40])
@pytest.mark.parametrize("bad", BAD)
def test_infinite_scores_are_told_of(instructions: str, bad: float, length: int, keys: int) -> None:
    numbers, library = np.random.default_rng(0), Library(instructions)
    call = Call(*(normal(numbers, (2, count, 16)) for count in (length, keys, keys)))
    for name in ("query", "key"):
        altered = getattr(call, name).copy()
        altered[1, 0, 3] = bad
        changed = replace(call, **{name: altered})
        assert not attend(library, [changed])[0].finite


@each_instructions
@pytest.mark.parametrize("name", ["bias", "slopes", "sinks"])
@pytest.mark.parametrize("length", [1, 40])
def test_options_that_are_no_numbers_are_told_of(instructions: str, name: str, length: int) -> None:
    numbers, library = np.random.default_rng(0), Library(instructions)
    call = Call(*(normal(numbers, (2, count, 16)) for count in (length, 70, 70)), offset=30, right=0)
    whole = normal(numbers, (2, length, 70)) if name == "bias" else normal(numbers, (2,))
    for bad in (np.nan, np.inf):
        altered = whole.copy()
        altered[(1, 0, 3) if name == "bias" else 1] = bad
        # An infinite slope excludes all but the key at distance 0, where 0 * inf is NaN.
        assert not attend(library, [replace(call, **{name: altered})])[0].finite


@each_instructions
@pytest.mark.parametrize("length", [1, 40])
def test_an_lse_beyond_float32_is_told_of(instructions: str, length: int) -> None:
    numbers, library = np.random.default_rng(0), Library(instructions)
    call = Call(*(normal(numbers, (2, count, 16)) for count in (length, 70, 70)))
    finite = [
        attend(library, [replace(call, slopes=np.array([slope, 0.0], np.float32))])[0].finite
        for slope in (-1e36, -1e37)
    ]
    assert finite == [True, False]  # the first query is at most 69 away from a key


@each_instructions
def test_causal_rows_before_a_nan_keep_it_out(instructions: str) -> None:
    """Rows of one tile reach different keys: a NaN in the last value is the last row's alone."""
    numbers, library = np.random.default_rng(0), Library(instructions)
    call = Call(*(normal(numbers, (1, 30, 16)) for _ in range(3)), right=0)
    value = call.value.copy()
    value[:, 29] = np.nan
    changed = replace(call, value=value)
    assert not attend(library, [changed])[0].finite
    before = replace(changed, query=call.query[:, :29])
    assert_right(before, attend(library, [before])[0])


@each_instructions
@pytest.mark.parametrize("rows", [1, 8, 40])  # few at once; many; and more than keys are divided into ranges for
@pytest.mark.parametrize(("page_tokens", "keys", "left"), [(16, 128, 80), (16, 140, 90), (1024, 6144, 3100)])
def test_what_only_another_call_reaches_in_shared_pages_stays_out(
    instructions: str, page_tokens: int, keys: int, left: int, rows: int
) -> None:
    """Calls that share pages meet these together; with 6144 keys, they have several ranges of them."""
    numbers, library = np.random.default_rng(keys), Library(instructions)
    query, key, value = (normal(numbers, (1, length, 16)) for length in (rows, keys, keys))
    far = Call(query, key, value, offset=keys - rows, left=left, right=0)
    few = keys // 2
    near = Call(query, key[:, :few], value[:, :few], offset=few - rows, left=left, right=0)
    unreached = keys - rows - left - 1  # by far, but near reaches it
    spoilt = value.copy()
    spoilt[:, unreached] = np.nan
    order = range(-(-keys // page_tokens))
    first = paged(replace(far, value=spoilt), page_tokens, order)
    pages = -(-few // page_tokens)
    second = replace(
        near,
        value=spoilt[:, :few],
        page_tokens=page_tokens,
        key_pages=first.key_pages[:pages],
        value_pages=first.value_pages[:pages],
        shared=pages,
    )
    assert unreached < few // page_tokens * page_tokens  # in a page that both are known to have all of
    of_far, of_near = attend(library, [first, second])
    assert not of_near.finite
    (alone,) = attend(library, [paged(far, page_tokens, order)])
    assert_right(far, of_far)
    assert_same_bits(of_far.output, alone.output)
    assert_same_bits(of_far.lse, alone.lse)
