"""Products of rows with packed weights by the native library: their results, and what a row's bits may depend on."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from binding import DTYPES, each_instructions, needs_native, unaided
from bits import assert_same_bits
from hypothesis import given, settings
from kernel_calls import array
from random_calls import randoms
from random_products import random_product

from attnserve_server.native.library import Team, Threads, available
from attnserve_server.native.products import PackedWeight, Products


@each_instructions
@settings(max_examples=60)
@given(random=randoms)
def test_it_is_the_product(instructions: str, random: Random) -> None:
    product = random_product(random)
    product.assert_right(Products(instructions, unaided).multiply(product.weight, product.rows))


@each_instructions
@settings(max_examples=30)
@given(random=randoms)
def test_a_rows_bits_follow_from_it_alone(instructions: str, random: Random) -> None:
    """Not from the other rows, their number or their addresses."""
    products, product = Products(instructions, unaided), random_product(random)
    everything = products.multiply(product.weight, product.rows)
    first = random.randrange(len(product.rows))
    last = random.randint(first + 1, len(product.rows))
    some = products.multiply(product.weight, product.rows[first:last].flip(0)).flip(0)
    assert_same_bits(array(some), array(everything[first:last]))


@needs_native
@settings(max_examples=30)
@given(random=randoms)
def test_nor_from_the_instructions(random: Random) -> None:
    product = random_product(random)
    one, *others = (array(Products(each, unaided).multiply(product.weight, product.rows)) for each in available())
    for other in others:
        assert_same_bits(other, one)


@each_instructions
@settings(max_examples=15)
@given(random=randoms, helpers=...)
def test_nor_from_who_computes_them(instructions: str, random: Random, helpers: bool) -> None:
    products, product = Products(instructions, unaided), random_product(random, (1, 30, 113, 300))
    alone = products.multiply(product.weight, product.rows)
    team = Team(3, patient=True)
    try:
        shared = Products(instructions, lambda flops: Threads(team, 3 if helpers else 1)).multiply(
            product.weight, product.rows
        )
    finally:
        team.close()
    assert_same_bits(array(shared), array(alone))
    product.assert_right(shared)


@each_instructions
@settings(max_examples=20)
@given(random=randoms)
def test_a_part_has_the_bits_of_the_whole(instructions: str, random: Random) -> None:
    products, product = Products(instructions, unaided), random_product(random)
    panels = product.weight.outputs // 16
    begin = random.randrange(panels)
    columns = slice(16 * begin, 16 * random.randint(begin + 1, panels))
    whole = products.multiply(product.weight, product.rows)
    part = products.multiply(product.weight.part(columns), product.rows)
    assert_same_bits(array(part), array(whole[:, columns]))


@each_instructions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_in_its_row(instructions: str, dtype: np.dtype[Any]) -> None:
    products, product = Products(instructions, unaided), random_product(Random(3), (30,), dtype=dtype)
    clean = products.multiply(product.weight, product.rows)
    product.rows[7, 0], product.rows[20] = torch.inf, torch.nan
    found = products.multiply(product.weight, product.rows)
    assert not found[7].isfinite().any()
    assert found[20].isnan().all()
    others = [row for row in range(30) if row not in (7, 20)]
    assert_same_bits(array(found[others]), array(clean[others]))


@each_instructions
def test_rows_of_any_strides(instructions: str) -> None:
    """Such as the rows of a transposed matrix; or no rows at all."""
    products, weight = Products(instructions, unaided), torch.randn(32, 40)
    packed = PackedWeight.of(weight, None)
    rows = torch.randn(40, 9).T
    np.testing.assert_allclose(products.multiply(packed, rows), rows @ weight.T, rtol=0, atol=1e-4)
    assert products.multiply(packed, rows[:0]).shape == (0, 32)


@each_instructions
def test_a_packed_weight_is_a_copy(instructions: str) -> None:
    weight, bias = torch.randn(16, 8), torch.randn(16)
    packed, rows = PackedWeight.of(weight, bias), torch.randn(3, 8)
    expected = rows @ weight.T + bias
    weight.zero_()
    np.testing.assert_allclose(Products(instructions, unaided).multiply(packed, rows), expected, rtol=0, atol=1e-5)


@each_instructions
def test_sums_are_rounded_once_and_to_the_nearest(instructions: str) -> None:
    """Also to infinity, to subnormal numbers and to 0; a NaN stays one, whatever its bits."""
    products, one = Products(instructions, unaided), torch.ones(1, 1)
    bias = torch.tensor(
        [65519.0, 65520.0, -1e30, 3.4e38, 1 + 2**-11, 1 + 3 * 2**-11, 6e-8, 2e-8, 1e-45, torch.nan] + [0.0] * 6
    )
    bias.view(torch.int32)[10:12] = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32)  # NaNs with all bits set
    for dtype in (torch.float16, torch.bfloat16):
        packed = PackedWeight.of(torch.zeros(16, 1, dtype=dtype), bias)
        found = products.multiply(packed, one.to(dtype))[0]
        torch.testing.assert_close(found, bias.to(dtype), rtol=0, atol=0, equal_nan=True)


@each_instructions
def test_rows_that_do_not_fit_the_weight_are_refused(instructions: str) -> None:
    packed = PackedWeight.of(torch.zeros(16, 8, dtype=torch.float16), None)
    for rows in (torch.zeros(2, 8), torch.zeros(2, 9, dtype=torch.float16)):
        with pytest.raises(ValueError, match=r"expected 8 columns of torch\.float16, got [89] of torch"):
            Products(instructions, unaided).multiply(packed, rows)
