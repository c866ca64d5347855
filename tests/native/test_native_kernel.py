"""The native kernel against the oracle, with every instruction set of this processor."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from binding import BFLOAT, Call, Place, assert_right, attend, each_instructions, laid
from hypothesis import given
from oracle import Array
from random_calls import normal, random_call, randoms

from attnserve_server.native.library import Library

FAR = 2**63 - 1
"""The largest possible offset or window bound."""


def call_of(heads: int, length: int, keys: int, width: int = 64, kv_heads: int = 0, seed: int = 0) -> Call:
    """A call without options on unit-normal inputs."""
    numbers = np.random.default_rng(seed)
    kv_heads = kv_heads or heads
    return Call(
        query=normal(numbers, (heads, length, width)),
        key=normal(numbers, (kv_heads, keys, width)),
        value=normal(numbers, (kv_heads, keys, width)),
    )


@each_instructions
@given(random=randoms)
def test_any_call_is_as_the_oracle_has_it(instructions: str, random: Random) -> None:
    call = random_call(random)
    (outcome,) = attend(Library(instructions), [call])
    assert_right(call, outcome)


@each_instructions
@pytest.mark.parametrize(
    ("length", "keys", "width"),
    [
        (1, 8192, 64),
        (1, 8200, 64),
        (3, 8200, 40),
        (1, 8192, 256),
        (5, 8192, 128),
        (32, 4096, 256),
        (130, 2048, 64),
        (256, 256, 256),
        (512, 512, 64),
        (300, 9, 512),
        (300, 9, 1024),
    ],
)
def test_errors_do_not_grow_with_lengths_and_widths(instructions: str, length: int, keys: int, width: int) -> None:
    call = replace(call_of(2, length, keys, width, kv_heads=1), offset=max(0, keys - length), right=0)
    (outcome,) = attend(Library(instructions), [call])
    expected = call.expected
    np.testing.assert_allclose(outcome.output, expected.output, rtol=0, atol=2e-6)
    np.testing.assert_allclose(outcome.lse, expected.lse, rtol=0, atol=2e-6)


@each_instructions
@pytest.mark.parametrize(("keys", "heads", "seed"), [(16, 6250, 1), (256, 60, 9)])
def test_no_row_of_many_comes_near_the_promised_error(instructions: str, keys: int, heads: int, seed: int) -> None:
    """Some row of these is beyond 1.5e-6 where a score is one sum of 64 products; then one of a million is beyond the
    promised 2e-6.
    """
    query, key, value = np.random.default_rng(seed).standard_normal((3, heads, keys, 64), np.float32)
    call = Call(query, key, value, right=0)
    (outcome,) = attend(Library(instructions), [call])
    assert np.abs(outcome.output - call.expected.output).max() < 1.5e-6


@each_instructions
@pytest.mark.parametrize("kv_dtype", [np.float32, np.float16, BFLOAT])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT])
def test_each_pair_of_dtypes(instructions: str, dtype: type, kv_dtype: type) -> None:
    for length in (1, 4, 30):
        call = call_of(4, length, 70, 40, kv_heads=2)
        call = replace(
            call, query=call.query.astype(dtype), key=call.key.astype(kv_dtype), value=call.value.astype(kv_dtype)
        )
        (outcome,) = attend(Library(instructions), [call])
        assert_right(call, outcome)


@each_instructions
@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_masks_and_biases_are_broadcast_along_any_axes(instructions: str, name: str, length: int) -> None:
    call, numbers, library = call_of(4, length, 70, kv_heads=2), np.random.default_rng(1), Library(instructions)
    whole = normal(numbers, (4, length, 70))
    for axes in range(8):
        part: Array = whole[tuple(slice(0, 1) if axes >> axis & 1 else slice(None) for axis in range(3))]
        grid = laid(part > -0.5 if name == "mask" else part, Place(address=5))
        altered = replace(call, mask=grid) if name == "mask" else replace(call, bias=grid)
        (outcome,) = attend(library, [altered])
        assert_right(altered, outcome)


@each_instructions
@pytest.mark.parametrize("length", [1, 20])
def test_rows_with_nothing_to_attend_are_zeros(instructions: str, length: int) -> None:
    call, library = call_of(2, length, 70), Library(instructions)
    for empty in (
        call_of(2, length, 0),
        replace(call, mask=np.zeros((1, 1, 1), np.bool_)),
        replace(call, mask=np.zeros((2, length, 70), np.bool_)),
        replace(call, offset=-length, right=0),
        replace(call, offset=1000, left=10),
        replace(call, offset=FAR, left=0),
        replace(call, offset=-FAR, right=5),
    ):
        (outcome,) = attend(library, [empty])
        assert outcome.finite
        assert not outcome.output.any()
        assert np.isneginf(outcome.lse).all()
        sunk = replace(empty, sinks=np.array([0.5, -2.0], np.float32))
        (outcome,) = attend(library, [sunk])
        assert outcome.finite
        assert not outcome.output.any()
        np.testing.assert_allclose(outcome.lse, np.repeat([[0.5], [-2.0]], length, 1), atol=1e-6)
        (outcome,) = attend(library, [replace(empty, sinks=np.full(2, -np.inf, np.float32))])
        assert outcome.finite
        assert not outcome.output.any()
        assert np.isneginf(outcome.lse).all()


@each_instructions
def test_no_queries_is_nothing_to_do(instructions: str) -> None:
    calls = [call_of(2, 0, 10), call_of(2, 3, 10), call_of(2, 0, 0), call_of(2, 1, 10)]
    outcomes = attend(Library(instructions), calls)
    assert all(outcome.finite for outcome in outcomes)
    for call, outcome in zip(calls, outcomes, strict=True):
        assert_right(call, outcome)


@each_instructions
@pytest.mark.parametrize("far", [2**31 - 1, 2**31, 2**32, 2**53, 2**62, FAR])
def test_positions_and_windows_may_be_as_far_as_numbers_go(instructions: str, far: int) -> None:
    call, library = call_of(2, 4, 70), Library(instructions)
    all_attend = replace(call, left=far, right=far)
    cases = [
        (replace(call, left=far), call),
        (replace(call, right=far), call),
        (all_attend, call),
        (replace(all_attend, offset=70), call),
        (replace(call, offset=far, right=0), call),
        (replace(call, offset=far, right=far), call),
        (replace(call, offset=-far, left=0), call),
        (replace(call, offset=-far, left=far), call),
    ]
    if far < FAR - 4:  # beyond this, queries' positions coincide
        cases.append((replace(call, offset=far, left=far, right=0), replace(call, left=0)))
        cases.append((replace(call, offset=-far, right=far), replace(call, right=0)))
    for distant, near in cases:
        one, other = attend(library, [distant, near])
        np.testing.assert_array_equal(one.output, other.output)
        np.testing.assert_array_equal(one.lse, other.lse)


@each_instructions
@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("scale", [1e-45, 1e-30, 1e8, 1e30, -1e30])
def test_extreme_scales_lose_nothing_but_what_float32_cannot_hold(instructions: str, length: int, scale: float) -> None:
    call = replace(call_of(2, length, 70), scale=scale)
    (outcome,) = attend(Library(instructions), [call])
    expected = call.expected
    assert outcome.finite
    # With large scales all the weight is on the key with the greatest score, unless float32 cannot tell which it is.
    np.testing.assert_allclose(outcome.output, expected.output, atol=2e-6)
    np.testing.assert_allclose(outcome.lse, expected.lse, rtol=2e-6, atol=2e-6)


@each_instructions
def test_numbers_next_to_nothing_stay_numbers(instructions: str) -> None:
    """Subnormal inputs, and weights whose exponentials are subnormal."""
    call = call_of(2, 9, 70)
    tiny = replace(call, query=call.query * np.float32(1e-42), value=call.value * np.float32(1e-40))
    steep = replace(call, bias=np.linspace(0, -110, 70, dtype=np.float32)[None, None, :].copy())
    for each in (tiny, steep):
        (outcome,) = attend(Library(instructions), [each])
        assert outcome.finite
        np.testing.assert_allclose(outcome.output, each.expected.output, atol=2e-6, rtol=1e-4)
        assert outcome.output.any()


@each_instructions
@pytest.mark.parametrize("length", [1, 9])  # few rows at once, and many
def test_no_weight_is_subnormal(instructions: str, length: int) -> None:
    """Those that would be become 0: computing with subnormals is many times slower on some processors."""
    call = call_of(1, length, 70)
    call = replace(call, query=np.zeros_like(call.query))
    for exponent in range(1, 105):
        bias = np.full((1, length, 70), -exponent, np.float32)
        bias[:, :, 0] = 0
        value = np.full_like(call.value, 2.0**100)
        value[:, 0] = 0
        (outcome,) = attend(Library(instructions), [replace(call, bias=bias, value=value)])
        weight = np.exp(-exponent) if exponent < 87 else 0
        np.testing.assert_allclose(outcome.output / 2.0**100, 69 * weight / (1 + 69 * weight), rtol=1e-4, atol=0)


@each_instructions
def test_excluded_by_a_bias_is_not_excluded_by_a_mask(instructions: str) -> None:
    """If all scores are -inf there are no weights, which the kernel reports; beside finite scores, -inf weighs 0."""
    call, library = call_of(1, 2, 70), Library(instructions)
    bias = np.zeros((1, 2, 70), np.float32)
    bias[0, 0, 3:] = -np.inf
    some = replace(call, bias=bias)
    (outcome,) = attend(library, [some])
    assert_right(some, outcome)
    bias = bias.copy()
    bias[0, 1] = -np.inf
    assert not attend(library, [replace(call, bias=bias)])[0].finite
    assert attend(library, [replace(call, bias=bias, mask=np.array([[[True], [False]]]))])[0].finite
    mask = np.ones((1, 1, 70), np.bool_)
    mask[..., :3] = False  # and the biases of all others are -inf
    assert not attend(library, [replace(call, bias=bias, mask=mask)])[0].finite
