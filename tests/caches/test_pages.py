"""The memory of caches: reading pages gives exactly what was written to them, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from resident import CPU, page_bytes_for, placement

from attnserve_server.caches.layer import Placement, Write
from attnserve_server.caches.page_memory import STORAGE
from attnserve_server.caches.pages import PagePool, _rounded_once
from attnserve_server.caches.shape import CacheShape
from attnserve_server.host.cpus import CACHE_LINE
from attnserve_server.native import library
from attnserve_server.native.tokens import Tokens

SHAPES = [
    CacheShape(1, 1, 1, 1, "float32"),
    CacheShape(2, 8, 8, 2, "float32"),
    CacheShape(3, 5, 7, 1, "float16"),
    CacheShape(2, 16, 4, 1, "bfloat16"),
    CacheShape(1, 3, 40, 1, "bfloat16"),
]
needs_native = pytest.mark.skipif(not library.available(), reason="no native library is here")
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)


def tokens(shape: CacheShape, count: int, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [Hk, count, D] and values [Hk, count, Dv]."""
    wanted = STORAGE[shape.dtype] if dtype is None else dtype
    heads = shape.num_kv_heads
    return torch.randn(heads, count, shape.head_dim).to(wanted), torch.randn(heads, count, shape.value_dim).to(wanted)


def pool_of(shape: CacheShape, pages: int, per_page: int, of_library: Tokens | None = None) -> PagePool:
    """A pool of `pages` pages of at least `per_page` tokens, with garbage in every page."""
    page_bytes = page_bytes_for(shape, per_page) + CACHE_LINE
    pool = PagePool(pages * page_bytes, page_bytes, CPU, of_library)
    every = list(range(pages))
    count = pages * pool.tokens_per_page(shape)
    poison = [torch.full_like(part, torch.nan) for part in tokens(shape, count)]
    pool.write(shape, placement(every, pool.tokens_per_page(shape), 0, count), *poison)
    return pool


def read(pool: PagePool, shape: CacheShape, pages: list[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first tokens that pages hold, by their blocks."""
    blocks = pool.blocks(shape, pages, count)
    key, value = tokens(shape, count)
    at = 0
    for block in blocks:
        assert block.first_token == at
        assert block.first_page == pages[at // pool.tokens_per_page(shape)]
        for page in range(len(block.key)):
            length = block.key.shape[2]
            key[:, at : at + length], value[:, at : at + length] = block.key[page], block.value[page]
            at += length
    assert at == count
    return key, value


@EVERY_SHAPE
@pytest.mark.parametrize("chunks", [[1] * 23, [23], [4, 1, 10, 8], [7, 16]])
def test_what_is_written_is_read(shape: CacheShape, chunks: list[int]) -> None:
    pool = pool_of(shape, 30, 4)
    key, value = tokens(shape, 23)
    pages = [3, 4, 5, 29, 11, 12, 0, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13][:23]
    start = 0
    for count in chunks:
        stop = start + count
        where = placement(pages, pool.tokens_per_page(shape), start, count)
        pool.write(shape, where, key[:, start:stop], value[:, start:stop])
        start = stop
    for count in range(24):
        got_key, got_value = read(pool, shape, pages, count)
        assert torch.equal(got_key, key[:, :count])
        assert torch.equal(got_value, value[:, :count])
        block = pool.gather(shape, pages, count, STORAGE[shape.dtype])
        assert torch.equal(block.key, key[None, :, :count])
        assert torch.equal(block.value, value[None, :, :count])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@EVERY_SHAPE
def test_what_is_written_is_cast_to_the_dtype_of_storage(shape: CacheShape, dtype: torch.dtype) -> None:
    pool = pool_of(shape, 4, 4)
    key, value = tokens(shape, 4, dtype)
    pool.write(shape, placement([2, 1, 3, 0], pool.tokens_per_page(shape), 0, 4), key, value)
    got_key, got_value = read(pool, shape, [2, 1, 3, 0], 4)
    assert torch.equal(got_key, key.to(STORAGE[shape.dtype]))
    assert torch.equal(got_value, value.to(STORAGE[shape.dtype]))
    block = pool.gather(shape, [2, 1, 3, 0], 4, torch.float64)
    assert torch.equal(block.key[0], got_key.double())
    assert torch.equal(block.value[0], got_value.double())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("count", [1, 7], ids=["single", "several"])
def test_float64_is_rounded_once(dtype: Any, count: int) -> None:
    """A number just beside the middle of two neighbours, which float32 would put into the middle."""
    shape = CacheShape(2, 64, 64, 1, dtype)
    pool = pool_of(shape, 3, 16)
    below = torch.randn(2, count, 64).to(STORAGE[dtype])
    above = below.nextafter(torch.full_like(below, torch.inf))
    middle = (below.double() + above.double()) / 2
    for share, expected in ((-(2.0**-45), below), (2.0**-45, above)):
        beside = middle + middle.abs() * share
        assert torch.equal(beside.float(), middle.float())
        if count == 1:
            pool.write_tokens(shape, [Write(0, 0, 1)], beside[:, 0][None], beside[:, 0][None])
        else:
            pool.write(shape, placement([0], 16, 0, count), beside, beside)
        for found in read(pool, shape, [0], count):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_float64_holds_besides_numbers_is_kept(dtype: Any) -> None:
    given = torch.tensor(
        [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e300, -1e300, 1e-300, 5e-324], dtype=torch.float64
    )
    found = _rounded_once(given, STORAGE[dtype]).to(STORAGE[dtype])
    expected = given.float().to(STORAGE[dtype])
    assert torch.equal(found.signbit(), expected.signbit() | found.isnan() & found.signbit())
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@EVERY_SHAPE
def test_strided_tensors_are_written_as_well(shape: CacheShape) -> None:
    """Lengths first in memory, as a caller with that layout sends them, and expanded ones."""
    pool = pool_of(shape, 8, 4)
    key, value = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in tokens(shape, 8))
    where = placement(list(range(8)), pool.tokens_per_page(shape), 0, 8)
    pool.write(shape, where, key, value)
    assert torch.equal(read(pool, shape, list(range(8)), 8)[0], key)
    expanded = [part[:, :1].expand(-1, 8, -1) for part in (key, value)]
    pool.write(shape, where, *expanded)
    assert torch.equal(read(pool, shape, list(range(8)), 8)[1], expanded[1])


def test_pages_are_copied_before_tokens_are_written() -> None:
    shape = CacheShape(2, 8, 4, 1, "float32")
    pool = pool_of(shape, 4, 4)
    per_page = pool.tokens_per_page(shape)
    key, value = tokens(shape, per_page)
    pool.write(shape, placement([1], per_page, 0, per_page - 1), key[:, :-1], value[:, :-1])
    pool.write(shape, Placement([(1, 3)], [Write(3, per_page - 2, 2)]), key[:, :2], value[:, :2])
    assert torch.equal(read(pool, shape, [1], per_page - 1)[0], key[:, :-1])
    copied = torch.cat([value[:, : per_page - 2], value[:, :2]], 1)
    assert torch.equal(read(pool, shape, [3], per_page)[1], copied)


def test_blocks_are_full_pages_that_lie_side_by_side() -> None:
    shape = CacheShape(1, 4, 4, 1, "float32")
    pool = pool_of(shape, 16, 4)
    per_page = pool.tokens_per_page(shape)
    pages = [4, 5, 6, 9, 8, 10, 11, 12]

    def lengths(count: int) -> list[tuple[int, int, int]]:
        blocks = pool.blocks(shape, pages, count)
        return [(block.first_page, len(block.key), block.key.shape[2]) for block in blocks]

    full = per_page
    assert lengths(0) == []
    assert lengths(1) == [(4, 1, 1)]
    assert lengths(3 * full) == [(4, 3, full)]
    assert lengths(8 * full - 1) == [(4, 3, full), (9, 1, full), (8, 1, full), (10, 2, full), (12, 1, full - 1)]
    assert lengths(8 * full) == [(4, 3, full), (9, 1, full), (8, 1, full), (10, 3, full)]


def test_whole_pages_of_finite_tokens() -> None:
    """Values are finite in every slot, whatever an earlier owner left; there are no pages if a token is not finite."""
    shape = CacheShape(2, 16, 16, 1, "float32")
    pool = pool_of(shape, 8, 8)
    per_page = pool.tokens_per_page(shape)
    pages, count = [2, 3, 6, 5], 3 * per_page + 3
    key, value = tokens(shape, count)

    def whole(tokens: int) -> list[tuple[int, int, int]] | None:
        blocks = pool.whole(shape, pages[: -(-tokens // per_page)], tokens)
        if blocks is None:
            return None
        for block in blocks:
            assert block.key.shape[2] == block.value.shape[2] == per_page
            assert torch.isfinite(block.value).all()
            for n in range(len(block.key)):
                at = block.first_token + n * per_page
                kept = min(tokens - at, per_page)
                assert torch.equal(block.key[n, :, :kept], key[:, at : at + kept])
                assert torch.equal(block.value[n, :, :kept], value[:, at : at + kept])
        return [(block.first_token, block.first_page, len(block.key)) for block in blocks]

    pool.write(shape, placement(pages, per_page, 0, count), key, value)
    runs = [(0, 2, 2), (2 * per_page, 6, 1), (3 * per_page, 5, 1)]
    assert whole(count) == runs
    poison = [torch.full((2, 4, 16), torch.nan)] * 2
    pool.write(shape, placement(pages, per_page, per_page + 2, 4), *poison)
    assert whole(count) is None
    assert whole(per_page + 2) == [(0, 2, 1), (per_page, 3, 1)]
    pool.write(shape, placement(pages, per_page, count, 4), *poison)
    pool.write(
        shape,
        placement(pages, per_page, per_page + 2, 4),
        key[:, per_page + 2 :][:, :4],
        value[:, per_page + 2 :][:, :4],
    )
    assert whole(count) == [(0, 2, 1), (per_page, 3, 1), *runs[1:]]


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["as stored", "converted"])
@pytest.mark.parametrize("by_library", [False, pytest.param(True, marks=needs_native)])
@pytest.mark.parametrize("poisoned", [None, 0, 1])
@EVERY_SHAPE
def test_one_token_each_is_written_as_if_by_itself(
    shape: CacheShape, poisoned: int | None, by_library: bool, dtype: torch.dtype | None
) -> None:
    """Into first slots and others, of pages that held something else before."""
    key, value = (part.transpose(0, 1).contiguous() for part in tokens(shape, 3, dtype))
    if poisoned is not None:
        (key, value)[poisoned][1] = torch.inf
        poisoned = 1
    together, apart = pool_of(shape, 8, 8, Tokens() if by_library else None), pool_of(shape, 8, 8)
    places = [Write(5, 0, 1), Write(2, 3, 1), Write(6, 1, 1)]
    for pool in (together, apart):
        for page in (2, 6):
            pool.write(shape, Placement([], [Write(page, 0, 3)]), *(torch.ones_like(part) for part in tokens(shape, 3)))
    together.write_tokens(shape, places, key, value)
    for n, place in enumerate(places):
        apart.write(shape, Placement([], [place]), key[n].unsqueeze(1), value[n].unsqueeze(1))
    for page, count in ((5, 1), (2, 4), (6, 2)):
        one, other = (pool.blocks(shape, [page], count)[0] for pool in (together, apart))
        assert one.finite == other.finite
        assert torch.equal(one.key, other.key)
        assert torch.equal(one.value, other.value)
        one_whole, other_whole = (pool.whole(shape, [page], count) for pool in (together, apart))
        assert (one_whole is None) == (other_whole is None) == (poisoned is not None and page == places[poisoned].page)
        if one_whole is not None and other_whole is not None:
            assert torch.equal(one_whole[0].value, other_whole[0].value)


def test_one_page_is_gathered_without_a_copy() -> None:
    shape = CacheShape(2, 8, 8, 1, "float32")
    pool = pool_of(shape, 4, 4)
    block = pool.blocks(shape, [2], 3)[0]
    assert pool.gather(shape, [2], 3, torch.float32).key.data_ptr() == block.key.data_ptr()
    assert pool.gather(shape, [2], 3, torch.float64).key.data_ptr() != block.key.data_ptr()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_is_not_finite_is_known(poison: float, where: str) -> None:
    """For the slots written since the page's first one was, whatever the page held before."""
    shape = CacheShape(2, 8, 8, 1, "float32")
    pool = PagePool(4096 * 4, 4096, CPU, None)
    per_page = pool.tokens_per_page(shape)
    pages = [0, 1, 2]
    key, value = tokens(shape, 3 * per_page)

    def known() -> list[bool]:
        return [pool.blocks(shape, [page], per_page)[0].finite for page in pages]

    assert known() == [False] * 3
    pool.write(shape, placement(pages, per_page, 0, 3 * per_page), key, value)
    assert known() == [True] * 3
    {"key": key, "value": value}[where][1, per_page + 3, 5] = poison
    pool.write(shape, placement(pages, per_page, per_page, 4), *(part[:, per_page:][:, :4] for part in (key, value)))
    assert known() == [True, False, True]
    pool.write(shape, placement(pages, per_page, per_page + 4, 1), *tokens(shape, 1))
    assert known() == [True, False, True]
    pool.write(shape, Placement([(1, 2)], [Write(2, 1, 1)]), *tokens(shape, 1))
    assert known() == [True, False, False]
    pool.write(shape, placement(pages, per_page, per_page, 2 * per_page), *tokens(shape, 2 * per_page))
    assert known() == [True] * 3
    pool.write(shape, placement(pages, per_page, 0, 3 * per_page), key, value)
    assert known() == [True, False, True]
    assert not pool.gather(shape, pages, 3 * per_page, torch.float32).finite
    assert pool.gather(shape, [0, 2], 2 * per_page, torch.float32).finite


def test_large_numbers_are_finite() -> None:
    shape = CacheShape(2, 8, 8, 1, "float32")
    pool = PagePool(4096, 4096, CPU, None)
    largest = torch.full((2, 4, 8), np.finfo(np.float32).max)
    pool.write(shape, placement([0], pool.tokens_per_page(shape), 0, 4), largest, largest)
    assert pool.blocks(shape, [0], 4)[0].finite


def test_what_overflows_the_dtype_of_storage_is_not_finite() -> None:
    shape = CacheShape(1, 8, 8, 1, "float16")
    pool = PagePool(4096, 4096, CPU, None)
    large = torch.full((1, 1, 8), 1e6)
    pool.write(shape, placement([0], pool.tokens_per_page(shape), 0, 1), large, large)
    assert not pool.blocks(shape, [0], 1)[0].finite


@pytest.mark.parametrize("page_bytes", [0, -64, 63, 100])
def test_pages_that_would_not_be_aligned_are_refused(page_bytes: int) -> None:
    with pytest.raises(ValueError, match="page_bytes"):
        PagePool(1 << 16, page_bytes, CPU, None)


@pytest.mark.parametrize("dtype", sorted(STORAGE))
def test_every_block_of_keys_and_values_is_aligned(dtype: Any) -> None:
    shape = CacheShape(3, 5, 7, 1, dtype)
    pool = PagePool(1 << 13, 1 << 10, CPU, None)
    for page in range(8):
        block = pool.blocks(shape, [page], 1)[0]
        assert block.key.data_ptr() % 64 == block.value.data_ptr() % 64 == 0
