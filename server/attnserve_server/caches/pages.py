"""The memory of resident caches: one pool of bytes on the device, cut into equal pages, each half keys, half values.

In: keys and values, and where a `Placement` puts them; pages to read. Out: strided views of keys and values. Nothing is
decided here, and no result depends on a slot of a page that has not been written for its reader.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from attnserve_server.caches.layer import PageTable, Placement, Write
from attnserve_server.caches.shape import CacheDtype, CacheShape, half_page
from attnserve_server.host import huge_pages
from attnserve_server.host.cpus import CACHE_LINE
from attnserve_server.native.dtypes import DTYPES
from attnserve_server.native.library import Strides
from attnserve_server.native.tokens import TOKEN, Tokens, packed_layout

STORAGE: Final[dict[CacheDtype, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""The dtype that keys and values are stored in, as torch has it."""

REMEMBERED_SHAPES = 64
"""For how many shapes of tokens the views of the pool are kept: bounded, because callers choose shapes."""


FEW_PAGES: Final = 256
"""Up to so many pages, comparing their numbers one by one is faster than calling NumPy."""


class Block(NamedTuple):
    """key [n, Hk, t, D] and value [n, Hk, t, Dv] of n adjacent pages; `finite`: known to be finite."""

    key: torch.Tensor
    value: torch.Tensor
    first_token: int
    first_page: int
    finite: bool


class PageLayout(NamedTuple):
    """How tokens of a shape lie in a page: from token to token and from head to head, in elements."""

    tokens_per_page: int
    key: tuple[int, int]
    value: tuple[int, int]


class PageAddresses(NamedTuple):
    """Pointers to the addresses of keys and of values, one address per page of a table; and the array of these."""

    key: int
    value: int
    array: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Views:
    """The whole pool as keys [pages, Hk, P, D] and as values [pages, Hk, P, Dv] of one shape."""

    key: torch.Tensor
    value: torch.Tensor
    tokens_per_page: int

    @property
    def layout(self) -> PageLayout:
        """How tokens lie."""
        key, value = ((whole.stride(2), whole.stride(1)) for whole in (self.key, self.value))
        return PageLayout(self.tokens_per_page, key, value)


class PagePool:
    """Pages of memory on a device. Used by one thread at a time on a CPU; elsewhere the device keeps the order."""

    def __init__(self, pool_bytes: int, page_bytes: int, device: torch.device, tokens: Tokens | None = None) -> None:
        """Allocates as many whole pages as fit. `tokens` writes single tokens on a CPU. Raises ValueError if pages
        would not be aligned.
        """
        if page_bytes < 1 or page_bytes % CACHE_LINE:
            raise ValueError(f"page_bytes: expected a multiple of {CACHE_LINE}, found {page_bytes}")
        self.page_bytes = page_bytes
        self.count = count = pool_bytes // page_bytes
        self._keys, self._values = (_committed(count, half_page(page_bytes), device) for _ in range(2))
        # Whether everything written to a page since its first slot is known to be finite, and all slots of values
        # behind that too. On devices other than a CPU nothing is known: looking would mean waiting for the device.
        self._finite = bytearray(count)
        self._finite_of = np.frombuffer(self._finite, np.uint8)
        self._looks = device.type == "cpu"
        self._tokens = tokens
        self._views = lru_cache(REMEMBERED_SHAPES)(self._views_of)
        self._arrays = lru_cache(REMEMBERED_SHAPES)(self._arrays_of)
        self.layout = lru_cache(REMEMBERED_SHAPES)(lambda shape: self._views(shape).layout)
        self.packed_layout = lru_cache(REMEMBERED_SHAPES)(self._packed_layout_of)
        halves = self._keys, self._values
        self._keys_at, self._values_at = (half.data_ptr() for half in halves) if self._looks else (0, 0)
        self._halves = np.array([[self._keys_at], [self._values_at]])
        self._page_stride = self._keys.stride(0)

    def tokens_per_page(self, shape: CacheShape) -> int:
        """P for tokens of this shape."""
        return self._views(shape).tokens_per_page

    def everything(self, shape: CacheShape) -> tuple[torch.Tensor, torch.Tensor]:
        """All pages, as keys [pages, Hk, P, D] and values [pages, Hk, P, Dv]."""
        views = self._views(shape)
        return views.key, views.value

    def write(self, shape: CacheShape, placement: Placement, key: torch.Tensor, value: torch.Tensor) -> None:
        """Copies pages as the placement says, then key [Hk, T, D] and value [Hk, T, Dv] to their places.

        Both are cast to the storage dtype; T is the number of tokens of the placement.
        """
        self.copy(placement.copies)
        views = self._views(shape)
        begin = 0
        for page, count, slot, tokens in _joined(placement.writes, views.tokens_per_page):
            end = begin + count * tokens
            for whole, part in ((views.key, key), (views.value, value)):
                written = part[:, begin:end].reshape(len(part), count, tokens, part.shape[2])
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
            for half in (self._keys, self._values):
                half[copy] = half[source]
            self._finite[copy] = self._finite[source]

    def write_tokens(self, shape: CacheShape, places: Sequence[Write], key: torch.Tensor, value: torch.Tensor) -> None:
        """As `write`, for n single tokens: copies key [n, Hk, D] and value [n, Hk, Dv] to places in different pages."""
        if self._tokens is not None and _lies_as_read(shape, key) and _lies_as_read(shape, value):
            self._append(self._tokens, shape, places, key, value)
            return
        views = self._views(shape)
        key, value = key.to(views.key.dtype), value.to(views.value.dtype)
        if self._looks:
            self.write_arrays(shape, places, _array(key), _array(value))
            return
        if len(places) == 1:  # without sending its place to the device
            page, slot, _ = places[0]
            views.key[page, :, slot], views.value[page, :, slot] = key[0], value[0]
            return
        pages, slots = sent([place[:2] for place in places], key.device).unbind(1)
        views.key[pages, :, slots], views.value[pages, :, slots] = key, value

    def write_arrays(self, shape: CacheShape, places: Sequence[Write], key: NDArray[Any], value: NDArray[Any]) -> None:
        """Writes tokens from arrays of at most 32 bits an element, on a CPU."""
        keys, values = self._arrays(shape)
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
            packed += TOKEN.pack(key_at, value_at, *self.page(page), slot, 1)
            key_at, value_at = key_at + key_step, value_at + value_step
        for (page, slot, _), finite in zip(places, tokens.append(self.packed_layout(shape), packed), strict=True):
            self.note(shape, page, slot, finite=bool(finite))

    def page(self, number: int) -> tuple[int, int]:
        """The addresses of a page's keys and of its values. On a CPU only."""
        offset = number * self._page_stride
        return self._keys_at + offset, self._values_at + offset

    def note(self, shape: CacheShape, page: int, slot: int, *, finite: bool) -> None:
        """Notes that a token was written to a slot of a page, and whether it is known to be finite. On a CPU only."""
        if not slot:
            self.clean(shape, page)
        self.know(page, slot, finite=finite)

    def clean(self, shape: CacheShape, page: int) -> None:
        """Puts 0 into all values of a page but those of its first slot, where others may have left anything. On a CPU
        only, as for `know`.
        """
        self._arrays(shape)[1][page, :, 1:] = 0

    def know(self, page: int, slot: int, *, finite: bool) -> None:
        """Notes whether the token in a slot of a page is finite, once it is there, after those in the slots before."""
        self._finite[page] = finite and (not slot or self._finite[page])

    def addresses(self, table: PageTable) -> PageAddresses:
        """The addresses of the keys and of the values of each page of a table. On a CPU only."""
        found = table.addresses
        if found is None:
            pages = np.asarray(table.numbers, np.int32)
            array: NDArray[np.int64] = np.multiply(pages, self._page_stride, dtype=np.int64) + self._halves
            found = table.addresses = PageAddresses(array.ctypes.data, array.ctypes.data + array.strides[0], array)
        return found

    def finite_pages(self, pages: NDArray[np.int32]) -> int:
        """How many pages, from the first on without a gap, are known to be finite."""
        unknown = (self._finite_of[pages] == 0).nonzero()[0]
        return int(unknown[0]) if len(unknown) else len(pages)

    def blocks(self, shape: CacheShape, pages: Sequence[int], tokens: int) -> list[Block]:
        """The content of the first `tokens` slots of pages, which reach into the last page.

        Adjacent full pages are one block; a last page that is not full is another.
        """
        views, blocks = self._views(shape), []
        per_page = views.tokens_per_page
        full, rest = divmod(tokens, per_page)
        for start, stop in _runs(pages, full):
            first, last = pages[start], pages[stop - 1] + 1
            finite = self._finite.find(0, first, last) < 0
            blocks.append(Block(views.key[first:last], views.value[first:last], start * per_page, first, finite))
        if rest:
            page = pages[full]
            key, value = (whole.narrow(0, page, 1).narrow(2, 0, rest) for whole in (views.key, views.value))
            blocks.append(Block(key, value, full * per_page, page, bool(self._finite[page])))
        return blocks

    def whole(self, shape: CacheShape, pages: Sequence[int], tokens: int) -> list[Block] | None:
        """As `blocks`, but with all slots of the pages that hold `tokens` tokens, at least one of them in the last.

        None unless all the tokens are finite. Then all values are, in slots behind the tokens too; the keys in such
        slots are unspecified.
        """
        views, blocks = self._views(shape), []
        per_page = views.tokens_per_page
        for start, stop in _runs(pages, len(pages)):
            begin = start
            for place in self._suspects(pages[start], pages[stop - 1] + 1):
                at = start + place
                if at > begin:
                    blocks.append(_block(views, pages, begin, at))
                block = self._cleaned(views, pages[at], min(tokens - at * per_page, per_page))
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
        key = torch.empty(1, shape.num_kv_heads, tokens, shape.head_dim, dtype=dtype, device=self._keys.device)
        value = key.new_empty(1, shape.num_kv_heads, tokens, shape.value_dim)
        for block in blocks:
            end = block.first_token + block.key.shape[0] * block.key.shape[2]
            for whole, part in ((key, block.key), (value, block.value)):
                count, heads, slots, width = part.shape
                whole[0, :, block.first_token : end].view(heads, count, slots, width).transpose(0, 1).copy_(part)
        first_page = blocks[0].first_page if blocks else 0
        return Block(key, value, 0, first_page, all(block.finite for block in blocks))

    def _look(self, views: _Views, page: int, count: int, slot: int, tokens: int) -> None:
        """Notes whether what was written to adjacent pages is finite."""
        parts = [whole[page : page + count, :, slot : slot + tokens] for whole in (views.key, views.value)]
        # A sum is finite only if all its terms are. One that is not may have overflowed: then look closer.
        each = [all(isfinite(part.sum(dtype=torch.float32).item()) for part in parts)] * count
        if not each[0]:
            each = torch.logical_and(*(torch.isfinite(part).flatten(1).all(1) for part in parts)).tolist()
        for place, finite in enumerate(each, page):
            self._finite[place] = finite and (slot == 0 or self._finite[place])

    def _suspects(self, first: int, last: int) -> Iterator[int]:
        """Which of the adjacent pages are not known to be finite, counted from the first."""
        place = self._finite.find(0, first, last)
        while place >= 0:
            yield place - first
            place = self._finite.find(0, place + 1, last)

    def _cleaned(self, views: _Views, page: int, tokens: int) -> Block | None:
        """A copy of a page not known to be finite, with values of 0 behind its first tokens; None if those are not."""
        key, value = views.key[page : page + 1], views.value[page : page + 1]
        if not all(bool(torch.isfinite(part[:, :, :tokens]).all()) for part in (key, value)):
            return None
        key, value = key.clone(), value.clone()
        value[:, :, tokens:] = 0
        return Block(key, value, 0, page, True)

    @torch.inference_mode(False)  # views are cached, and those made in inference mode could not be written to later
    def _views_of(self, shape: CacheShape) -> _Views:
        per_page, dtype = shape.tokens_per_page(self.page_bytes), STORAGE[shape.dtype]

        def block(half: torch.Tensor, width: int) -> torch.Tensor:
            elements = half.view(dtype)
            size = (len(elements), shape.num_kv_heads, per_page, width)
            per_head = shape.head_bytes(self.page_bytes, width) // dtype.itemsize
            return elements.as_strided(size, (elements.shape[1], per_head, width, 1))

        return _Views(block(self._keys, shape.head_dim), block(self._values, shape.value_dim), per_page)

    def _packed_layout_of(self, shape: CacheShape) -> bytes:
        """How tokens lie in a page, as the native library reads it."""
        layout = self.layout(shape)
        widths = shape.num_kv_heads, shape.head_dim, shape.value_dim
        return packed_layout(DTYPES[STORAGE[shape.dtype]], *widths, Strides(*layout.key), Strides(*layout.value))

    def _arrays_of(self, shape: CacheShape) -> tuple[NDArray[Any], NDArray[Any]]:
        """The views of a shape as arrays in the same memory: keys [pages, Hk, P, D], values [pages, Hk, P, Dv]."""
        views = self._views(shape)
        return _array(views.key), _array(views.value)


def _lies_as_read(shape: CacheShape, tokens: torch.Tensor) -> bool:
    """Whether tokens [n, Hk, width] have the dtype of the shape, and a token's heads are adjacent."""
    return tokens.dtype == STORAGE[shape.dtype] and tokens.stride()[1:] == (tokens.shape[2], 1)


def sent(numbers: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Integers, or rows of integers, as int64 on a device: on CUDA by way of pinned memory, as a copy from other memory
    may wait for running computations, which may be those of other batches.
    """
    here = torch.tensor(numbers)
    if device.type == "cuda":
        here = torch.empty_like(here, pin_memory=True).copy_(here)
    return here.to(device, non_blocking=True)


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor on the host as an array, in the same memory."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _block(views: _Views, pages: Sequence[int], start: int, stop: int) -> Block:
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


def _committed(count: int, size: int, device: torch.device) -> torch.Tensor:
    """Zeros [count, size], written once, so that the memory is there from the start, not when the first tokens come."""
    if device.type == "cpu":
        return torch.from_numpy(huge_pages.zeros(count * size)).view(count, size)
    return torch.zeros(count, size, dtype=torch.uint8, device=device).fill_(0)
