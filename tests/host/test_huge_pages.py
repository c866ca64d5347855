"""Memory in huge pages: where it lies, and what Linux is asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mappings import flags_at, needs_huge_pages

from attnserve_server.caches.pages import PagePool
from attnserve_server.host import huge_pages
from attnserve_server.host.memory import resident_bytes


@pytest.mark.parametrize("size", [0, 1, 4096, huge_pages.HUGE_PAGE, 3 * huge_pages.HUGE_PAGE + 64])
def test_zeros(size: int) -> None:
    array = huge_pages.zeros(size)
    assert array.shape == (size,)
    assert not array.any()
    assert array.ctypes.data % huge_pages.HUGE_PAGE == 0
    array[:] = 255  # up to the last one
    assert np.all(array == 255)


def test_they_are_written_at_once() -> None:
    """What is there from the start is not missing later."""
    size, before = 64 << 20, resident_bytes()
    array = huge_pages.zeros(size)
    assert resident_bytes() - before > 0.9 * size
    assert array.nbytes == size


def test_more_than_any_system_has_is_an_error() -> None:
    with pytest.raises(MemoryError, match=str(1 << 60)):
        huge_pages.zeros(1 << 60)


def test_the_memory_stays_for_as_long_as_some_of_it_is_used() -> None:
    last = torch.from_numpy(huge_pages.zeros(1 << 20))[-1:]
    others = [huge_pages.zeros(1 << 20) for _ in range(8)]
    for other in others:
        other[:] = 1
    assert last.tolist() == [0]


@needs_huge_pages
def test_the_pool_of_caches_is_in_huge_pages() -> None:
    pool = PagePool(8 << 20, 64 << 10, torch.device("cpu"), None)
    for address in pool.memory.page(0):
        assert "hg" in flags_at(address)
