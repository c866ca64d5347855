"""The memory of resident caches: one pool of bytes on the device, cut into equal pages, each half keys, half values.

In: shapes of tokens, numbers of pages. Out: strided views of keys and values, layouts, addresses. What is where is not
known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from attnserve_server.caches.layer import PageTable
from attnserve_server.caches.shape import CacheDtype, CacheShape, half_page
from attnserve_server.host import huge_pages
from attnserve_server.host.cpus import CACHE_LINE
from attnserve_server.native.dtypes import NATIVE_FROM_TORCH
from attnserve_server.native.library import Strides
from attnserve_server.native.tokens import packed_layout

STORAGE: Final[dict[CacheDtype, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""The dtype that keys and values are stored in, as torch has it."""

REMEMBERED_SHAPES = 64
"""For how many shapes of tokens the views of the pool are kept: bounded, because callers choose shapes."""


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
class PageViews:
    """The whole pool as keys [pages, Hk, P, D] and as values [pages, Hk, P, Dv] of one shape."""

    key: torch.Tensor
    value: torch.Tensor
    tokens_per_page: int

    @property
    def layout(self) -> PageLayout:
        """How tokens lie."""
        key, value = ((whole.stride(2), whole.stride(1)) for whole in (self.key, self.value))
        return PageLayout(self.tokens_per_page, key, value)


class PageMemory:
    """Pages of memory on a device. Addresses are those of a CPU's memory; elsewhere they have no meaning."""

    def __init__(self, pool_bytes: int, page_bytes: int, device: torch.device) -> None:
        """Allocates as many whole pages as fit. Raises ValueError if pages would not be aligned."""
        if page_bytes < 1 or page_bytes % CACHE_LINE:
            raise ValueError(f"page_bytes: expected a multiple of {CACHE_LINE}, found {page_bytes}")
        self.device = device
        self.page_bytes = page_bytes
        self.count = pool_bytes // page_bytes
        self._keys, self._values = (_committed(self.count, half_page(page_bytes), device) for _ in range(2))
        self.views = lru_cache(REMEMBERED_SHAPES)(self._views_of)
        self.arrays = lru_cache(REMEMBERED_SHAPES)(self._arrays_of)
        self.layout = lru_cache(REMEMBERED_SHAPES)(lambda shape: self.views(shape).layout)
        self.packed_layout = lru_cache(REMEMBERED_SHAPES)(self._packed_layout_of)
        self._keys_at, self._values_at = self._keys.data_ptr(), self._values.data_ptr()
        self._halves = np.array([[self._keys_at], [self._values_at]])
        self._page_stride = self._keys.stride(0)

    def copy(self, source: int, copy: int) -> None:
        """Copies a page."""
        for half in (self._keys, self._values):
            half[copy] = half[source]

    def page(self, number: int) -> tuple[int, int]:
        """The addresses of a page's keys and of its values."""
        offset = number * self._page_stride
        return self._keys_at + offset, self._values_at + offset

    def addresses(self, table: PageTable) -> PageAddresses:
        """The addresses of the keys and of the values of each page of a table."""
        found = table.addresses
        if found is None:
            pages = np.asarray(table.numbers, np.int32)
            array: NDArray[np.int64] = np.multiply(pages, self._page_stride, dtype=np.int64) + self._halves
            found = table.addresses = PageAddresses(array.ctypes.data, array.ctypes.data + array.strides[0], array)
        return found

    @torch.inference_mode(False)  # views are cached, and those made in inference mode could not be written to later
    def _views_of(self, shape: CacheShape) -> PageViews:
        """The views of the pool for a shape."""
        per_page, dtype = shape.tokens_per_page(self.page_bytes), STORAGE[shape.dtype]

        def block(half: torch.Tensor, width: int) -> torch.Tensor:
            elements = half.view(dtype)
            size = (len(elements), shape.num_kv_heads, per_page, width)
            per_head = shape.head_bytes(self.page_bytes, width) // dtype.itemsize
            return elements.as_strided(size, (elements.shape[1], per_head, width, 1))

        return PageViews(block(self._keys, shape.head_dim), block(self._values, shape.value_dim), per_page)

    def _arrays_of(self, shape: CacheShape) -> tuple[NDArray[Any], NDArray[Any]]:
        """The views of a shape as arrays in the same memory: keys [pages, Hk, P, D], values [pages, Hk, P, Dv]."""
        views = self.views(shape)
        return as_array(views.key), as_array(views.value)

    def _packed_layout_of(self, shape: CacheShape) -> bytes:
        """How tokens lie in a page, as the native library reads it."""
        layout = self.layout(shape)
        dtype, widths = NATIVE_FROM_TORCH[STORAGE[shape.dtype]], (shape.num_kv_heads, shape.head_dim, shape.value_dim)
        return packed_layout(dtype, *widths, Strides(*layout.key), Strides(*layout.value))


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor on the host as an array, in the same memory."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _committed(count: int, size: int, device: torch.device) -> torch.Tensor:
    """Zeros [count, size], written once, so that the memory is there from the start, not when the first tokens come."""
    if device.type == "cpu":
        return torch.from_numpy(huge_pages.zeros(count * size)).view(count, size)
    return torch.zeros(count, size, dtype=torch.uint8, device=device).fill_(0)
