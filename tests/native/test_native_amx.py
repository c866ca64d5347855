"""Products by AMX: their results, and what a row's bits may depend on. Only on a processor that has it."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
import torch
from binding import BFLOAT, unaided
from bits import assert_same_bits
from hypothesis import given, settings
from kernel_calls import array
from random_calls import randoms
from random_products import random_product as any_product

from attnserve_server.native.library import Team, Threads, amx_permitted
from attnserve_server.native.products import PANEL, PackedWeight, Products

pytestmark = pytest.mark.skipif(not amx_permitted(), reason="this processor has no AMX, or the library does not use it")

random_product = partial(any_product, dtype=BFLOAT, amx=True)
MANY = (1, 15, 16, 17, 31, 32, 33, 130, 255, 256, 257, 513, 700)


@pytest.fixture(scope="module")
def products() -> Products:
    return Products("AVX-512", unaided)


@settings(max_examples=60)
@given(random=randoms)
def test_it_is_the_product(products: Products, random: Random) -> None:
    product = random_product(random, MANY)
    product.assert_right(products.multiply(product.weight, product.rows))


@settings(max_examples=30)
@given(random=randoms)
def test_a_rows_bits_follow_from_it_alone(products: Products, random: Random) -> None:
    """Not from the other rows, their number or their addresses."""
    product = random_product(random, MANY)
    everything = products.multiply(product.weight, product.rows)
    first = random.randrange(len(product.rows))
    last = random.randint(first + 1, len(product.rows))
    some = products.multiply(product.weight, product.rows[first:last].flip(0)).flip(0)
    assert_same_bits(array(some), array(everything[first:last]))


@settings(max_examples=15)
@given(random=randoms, helpers=...)
def test_nor_from_who_computes_them(products: Products, random: Random, helpers: bool) -> None:
    product = random_product(random, (1, 30, 113, 600))
    alone = products.multiply(product.weight, product.rows)
    team = Team(3, patient=True)
    try:
        threads = Threads(team, 3 if helpers else 1)
        shared = Products("AVX-512", lambda flops: threads).multiply(product.weight, product.rows)
    finally:
        team.close()
    assert_same_bits(array(shared), array(alone))


@pytest.mark.parametrize("inputs", [4100, 33_000])
@pytest.mark.parametrize("count", [1, 129, 300])
def test_units_of_fewer_rows_where_these_are_wide(inputs: int, count: int) -> None:
    """So that the rows of a unit stay in a core's cache: 112 rows of 4,100 inputs, and 16 of 33,000."""
    torch.manual_seed(0)
    weight, rows = torch.randn(48, inputs).bfloat16(), torch.randn(count, inputs).bfloat16()
    packed = PackedWeight.of(weight, None, amx=True)
    exact, magnitude = rows.double() @ weight.double().T, rows.double().abs() @ weight.double().abs().T
    team = Team(3, patient=True)
    try:
        for threads in (Threads(), Threads(team, 3)):
            found = Products("AVX-512", lambda flops, threads=threads: threads).multiply(packed, rows)
            error = (found.double() - exact).abs()
            assert (error <= 5e-7 * magnitude + 2.0**-8 * exact.abs()).all()
    finally:
        team.close()


@settings(max_examples=20)
@given(random=randoms)
def test_a_part_has_the_bits_of_the_whole(products: Products, random: Random) -> None:
    product = random_product(random)
    panels = product.weight.outputs // PANEL
    begin = random.randrange(panels)
    columns = slice(PANEL * begin, PANEL * random.randint(begin + 1, panels))
    whole = products.multiply(product.weight, product.rows)
    part = products.multiply(product.weight.part(columns), product.rows)
    assert_same_bits(array(part), array(whole[:, columns]))


def test_what_is_not_finite_stays_in_its_row(products: Products) -> None:
    product = random_product(Random(3), (30,))
    clean = products.multiply(product.weight, product.rows)
    product.rows[7, 0], product.rows[20] = torch.inf, torch.nan
    found = products.multiply(product.weight, product.rows)
    assert not found[7].isfinite().any()
    assert found[20].isnan().all()
    others = [row for row in range(30) if row not in (7, 20)]
    assert_same_bits(array(found[others]), array(clean[others]))


def test_sums_are_rounded_once_and_to_the_nearest(products: Products) -> None:
    """Sixteen times 1 and 2^-8, of which bfloat16 could not hold any partial sum; and ties go to even."""
    weight = torch.cat([torch.ones(16, 16), torch.full((16, 16), 2.0**-8)], dim=1).bfloat16()
    bias = torch.arange(16) / 32 + 1e-4
    found = products.multiply(PackedWeight.of(weight, bias, amx=True), torch.ones(1, 32).bfloat16())[0]
    assert_same_bits(array(found), array((16 + 2.0**-4 + bias).bfloat16()))


def test_only_bfloat16_is_packed_for_it(products: Products) -> None:
    packed = {dtype: products.packed(torch.zeros(16, 8, dtype=dtype), None) for dtype in (torch.half, torch.bfloat16)}
    assert [each.amx for each in packed.values()] == [False, True]
    assert not Products("AVX2", unaided).packed(torch.zeros(16, 8, dtype=torch.bfloat16), None).amx
