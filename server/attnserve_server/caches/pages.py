"""The pages of resident caches: tokens are written to them and read from them.

In: keys and values, and where a `Placement` puts them; pages to read. Out: strided views of keys and values. Nothing is
decided here, and no result depends on a slot of a page that has not been written for its reader.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from attnserve_server.caches.finite_pages import FinitePages
from attnserve_server.caches.layer import Placement, Write
from attnserve_server.caches.page_memory import STORAGE, PageMemory, PageViews, as_array
from attnserve_server.caches.shape import CacheShape
from attnserve_server.kernels.finite import surely_finite
from attnserve_server.native.tokens import TOKEN, Tokens

if TYPE_CHECKING:
    from attnserve_server.devices.compute import Compute

FEW_PAGES: Final = 256
"""Up to so many pages, comparing their numbers one by one is faster than calling NumPy."""


class Block(NamedTuple):
    """key [n, Hk, t, D] and value [n, Hk, t, Dv] of n adjacent pages; `finite`: known to be finite."""

    key: torch.Tensor
    value: torch.Tensor
    first_token: int
    first_page: int
    finite: bool


class PagePool:
    """Pages on a device, and what is known of them. Used by one thread at a time on a CPU; elsewhere the device keeps
    the order.
    """

    def __init__(self, pool_bytes: int, page_bytes: int, device: torch.device, tokens: Tokens | None) -> None:
        """Allocates as many whole pages as fit. `tokens` writes single tokens on a CPU. Raises ValueError if pages
        would not be aligned.
        """
        self.memory = PageMemory(pool_bytes, page_bytes, device)
        self.finite = FinitePages(self.memory.count)
        self._looks = device.type == "cpu"
        self._tokens = tokens

    @staticmethod
    def of(device: Compute, pool_bytes: int, page_bytes: int) -> PagePool:
        """The pages of a device."""
        tokens = None if device.native is None else device.native.tokens
        return PagePool(pool_bytes, page_bytes, device.torch_device, tokens)

    def tokens_per_page(self, shape: CacheShape) -> int:
        """P for tokens of this shape."""
        return self.memory.views(shape).tokens_per_page

    def write(self, shape: CacheShape, placement: Placement, key: torch.Tensor, value: torch.Tensor) -> None:
        """Copies pages as the placement says, then key [Hk, T, D] and value [Hk, T, Dv] to their places.

        Both are cast to the storage dtype; T is the number of tokens of the placement.
        """
        self.copy(placement.copies)
        views = self.memory.views(shape)
        begin = 0
        for page, count, slot, tokens in _joined(placement.writes, views.tokens_per_page):
            end = begin + count * tokens
            for whole, part in ((views.key, key), (views.value, value)):
                written = part[:, begin:end].reshape(len(part), count, tokens, part.shape[2])
                written = _rounded_once(written, whole.dtype)
                whole[page : page + count, :, slot : slot + tokens].copy_(written.transpose(0, 1))
            if self._looks:
                if not slot and tokens < views.tokens_per_page:
                    # What earlier owners left there will be weighted by 0, and NaN would survive that.
                    views.value[page, :, tokens:].zero_()
                self._look(views, page, count, slot, tokens)
            begin = end

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies pages, each from the first to the second of a pair."""
        for source, copy in copies:
            self.memory.copy(source, copy)
            self.finite.copied(source, copy)

    def write_tokens(self, shape: CacheShape, places: Sequence[Write], key: torch.Tensor, value: torch.Tensor) -> None:
        """As `write`, for n single tokens: copies key [n, Hk, D] and value [n, Hk, Dv] to places in different pages."""
        if self._tokens is not None and _lies_as_read(shape, key) and _lies_as_read(shape, value):
            self._append(self._tokens, shape, places, key, value)
            return
        views = self.memory.views(shape)
        key, value = (_rounded_once(each, views.key.dtype).to(views.key.dtype) for each in (key, value))
        if self._looks:
            self.write_arrays(shape, places, as_array(key), as_array(value))
            return
        if len(places) == 1:  # without sending its place to the device
            page, slot, _ = places[0]
            views.key[page, :, slot], views.value[page, :, slot] = key[0], value[0]
            return
        pages, slots = sent([place[:2] for place in places], key.device).unbind(1)
        views.key[pages, :, slots], views.value[pages, :, slots] = key, value

    def write_arrays(self, shape: CacheShape, places: Sequence[Write], key: NDArray[Any], value: NDArray[Any]) -> None:
        """Writes tokens from arrays of at most 32 bits an element, on a CPU."""
        keys, values = self.memory.arrays(shape)
        if key.dtype != keys.dtype:
            with np.errstate(over="ignore"):
                key, value = key.astype(keys.dtype), value.astype(values.dtype)
        if len(places) == 1:
            page, slot, _ = places[0]
            keys[page, :, slot], values[page, :, slot] = key[0], value[0]
        else:
            pages, slots = np.array([place[:2] for place in places]).T
            keys[pages, :, slots], values[pages, :, slots] = key, value
        finite = bool(np.isfinite(key).all() and np.isfinite(value).all())
        for n, (page, slot, _) in enumerate(places):
            own = finite or bool(np.isfinite(key[n]).all() and np.isfinite(value[n]).all())
            self.note(shape, page, slot, finite=own)

    def _append(
        self, tokens: Tokens, shape: CacheShape, places: Sequence[Write], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Writes tokens by the native library, which have the dtype of the shape."""
        packed = bytearray()
        key_at, value_at = key.data_ptr(), value.data_ptr()
        key_step, value_step = (each.stride(0) * each.itemsize for each in (key, value))
        for page, slot, _ in places:
            packed += TOKEN.pack(key_at, value_at, *self.memory.page(page), slot, 1)
            key_at, value_at = key_at + key_step, value_at + value_step
        each_finite = tokens.append(self.memory.packed_layout(shape), packed)
        for (page, slot, _), finite in zip(places, each_finite, strict=True):
            self.note(shape, page, slot, finite=bool(finite))

    def note(self, shape: CacheShape, page: int, slot: int, *, finite: bool) -> None:
        """Notes that a token was written to a slot of a page, and whether it is known to be finite. On a CPU only."""
        if not slot:
            self.clean(shape, page)
        self.finite.know(page, slot, finite=finite)

    def clean(self, shape: CacheShape, page: int) -> None:
        """Puts 0 into all values of a page but those of its first slot, where others may have left anything. On a CPU
        only.
        """
        self.memory.arrays(shape)[1][page, :, 1:] = 0

    def blocks(self, shape: CacheShape, pages: Sequence[int], tokens: int) -> list[Block]:
        """The content of the first `tokens` slots of pages. The last of these slots is in the last page.

        Adjacent full pages are one block; a last page that is not full is another.
        """
        views, blocks = self.memory.views(shape), []
        per_page = views.tokens_per_page
        full, rest = divmod(tokens, per_page)
        for start, stop in _runs(pages, full):
            first, last = pages[start], pages[stop - 1] + 1
            finite = self.finite.all(first, last)
            blocks.append(Block(views.key[first:last], views.value[first:last], start * per_page, first, finite))
        if rest:
            page = pages[full]
            key, value = (whole.narrow(0, page, 1).narrow(2, 0, rest) for whole in (views.key, views.value))
            blocks.append(Block(key, value, full * per_page, page, page in self.finite))
        return blocks

    def whole(self, shape: CacheShape, pages: Sequence[int], tokens: int) -> list[Block] | None:
        """As `blocks`, but with all slots of the pages that hold `tokens` tokens, at least one of them in the last.

        None unless all the tokens are finite. The values in slots behind the tokens are finite, too; the keys in such
        slots are unspecified.
        """
        views, blocks = self.memory.views(shape), []
        per_page = views.tokens_per_page
        for start, stop in _runs(pages, len(pages)):
            begin = start
            for page in self.finite.others(pages[start], pages[stop - 1] + 1):
                at = start + page - pages[start]
                if at > begin:
                    blocks.append(_block(views, pages, begin, at))
                block = self._cleaned(views, page, min(tokens - at * per_page, per_page))
                if block is None:
                    return None
                blocks.append(block._replace(first_token=at * per_page))
                begin = at + 1
            if begin < stop:
                blocks.append(_block(views, pages, begin, stop))
        return blocks

    def gather(self, shape: CacheShape, pages: Sequence[int], tokens: int, dtype: torch.dtype) -> Block:
        """What `blocks` gives as one sequence, key [1, Hk, tokens, D] and value [1, Hk, tokens, Dv], in a dtype.

        A copy, unless it is part of one page and has that dtype already.
        """
        blocks = self.blocks(shape, pages, tokens)
        if len(blocks) == 1 and len(blocks[0].key) == 1 and dtype == STORAGE[shape.dtype]:
            return blocks[0]
        key = torch.empty(1, shape.num_kv_heads, tokens, shape.head_dim, dtype=dtype, device=self.memory.device)
        value = key.new_empty(1, shape.num_kv_heads, tokens, shape.value_dim)
        for block in blocks:
            end = block.first_token + block.key.shape[0] * block.key.shape[2]
            for whole, part in ((key, block.key), (value, block.value)):
                count, heads, slots, width = part.shape
                whole[0, :, block.first_token : end].view(heads, count, slots, width).transpose(0, 1).copy_(part)
        first_page = blocks[0].first_page if blocks else 0
        return Block(key, value, 0, first_page, all(block.finite for block in blocks))

    def _look(self, views: PageViews, page: int, count: int, slot: int, tokens: int) -> None:
        """Notes whether what was written to adjacent pages is finite."""
        parts = [whole[page : page + count, :, slot : slot + tokens] for whole in (views.key, views.value)]
        each = [surely_finite(*parts)] * count
        if not each[0]:
            each = torch.logical_and(*(torch.isfinite(part).flatten(1).all(1) for part in parts)).tolist()
        for place, finite in enumerate(each, page):
            self.finite.know(place, slot, finite=finite)

    def _cleaned(self, views: PageViews, page: int, tokens: int) -> Block | None:
        """A copy of a page not known to be finite, with values of 0 behind its first `tokens` tokens; None if not all
        of these are finite.
        """
        key, value = views.key[page : page + 1], views.value[page : page + 1]
        if not all(bool(torch.isfinite(part[:, :, :tokens]).all()) for part in (key, value)):
            return None
        key, value = key.clone(), value.clone()
        value[:, :, tokens:] = 0
        return Block(key, value, 0, page, True)


def _lies_as_read(shape: CacheShape, tokens: torch.Tensor) -> bool:
    """Whether tokens [n, Hk, width] have the dtype of the shape, and a token's heads are adjacent."""
    return tokens.dtype == STORAGE[shape.dtype] and tokens.stride()[1:] == (tokens.shape[2], 1)


def sent(numbers: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Integers, or rows of integers, as int64 on a device. On CUDA they go by way of pinned memory: a copy from other
    memory may wait for running computations, even those of other batches.
    """
    here = torch.tensor(numbers)
    if device.type == "cuda":
        here = torch.empty_like(here, pin_memory=True).copy_(here)
    return here.to(device, non_blocking=True)


def _block(views: PageViews, pages: Sequence[int], start: int, stop: int) -> Block:
    """Adjacent pages, which are finite, with all their slots."""
    first, last = pages[start], pages[stop - 1] + 1
    return Block(views.key[first:last], views.value[first:last], start * views.tokens_per_page, first, True)


def _runs(pages: Sequence[int], count: int) -> Iterator[tuple[int, int]]:
    """The first `count` pages as ranges of places whose pages are adjacent in the pool."""
    if not count:
        return
    first = pages[0]
    if count <= FEW_PAGES and list(pages[:count]) == list(range(first, first + count)):
        yield 0, count
        return
    numbers = np.asarray(pages)[:count]
    edges = [0, *(np.flatnonzero(numbers[1:] - numbers[:-1] != 1) + 1).tolist(), count]
    yield from itertools.pairwise(edges)


def _joined(writes: Sequence[Write], per_page: int) -> Iterator[tuple[int, int, int, int]]:
    """Writes as (first page, pages, first slot, tokens in each page): adjacent full pages are one write."""
    place = 0
    while place < len(writes):
        page, slot, tokens = writes[place]
        count = 1
        if tokens == per_page:
            while place + count < len(writes) and writes[place + count] == (page + count, 0, per_page):
                count += 1
        yield page, count, slot, tokens
        place += count


def _rounded_once(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that torch can round to a dtype with the result of a single rounding. On its way from float64 to half
    precision, torch rounds to float32 first, and so twice. This rounds to float32 instead, to odd, which loses nothing
    that matters for the second rounding (Boldo and Melquiond 2008).
    """
    if tensor.dtype != torch.float64 or dtype.itemsize != 2:
        return tensor
    nearest = tensor.float()
    toward_zero = torch.where(nearest.double().abs() > tensor.abs(), nearest.nextafter(nearest.new_zeros(())), nearest)
    odd = (toward_zero.view(torch.int32) | 1).view(torch.float32)
    return torch.where(toward_zero.double() == tensor, toward_zero, odd)
