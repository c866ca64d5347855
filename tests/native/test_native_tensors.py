"""Tensors that stay for long, and which of them are in huge pages."""

from __future__ import annotations

from struct import unpack_from

import pytest
import torch
from mappings import flags_at, needs_huge_pages

from attnserve_server.host.huge_pages import HUGE_PAGE
from attnserve_server.native.products import PackedWeight
from attnserve_server.native.tensors import LARGE_BYTES, empty


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, LARGE_BYTES), (2, 3, LARGE_BYTES // 2 + 1)])
def test_they_are_as_torchs_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor, own = empty(shape, dtype), torch.empty(shape, dtype=dtype)
    assert (tensor.shape, tensor.dtype, tensor.stride()) == (own.shape, own.dtype, own.stride())
    tensor.fill_(1)
    assert (tensor == 1).all()


def test_on_another_device_they_are_torchs_own() -> None:
    assert empty((4, LARGE_BYTES), torch.float32, "meta").device.type == "meta"


def test_more_than_there_can_be_is_an_error() -> None:
    with pytest.raises((RuntimeError, MemoryError)):
        empty((1 << 40, 1 << 20), torch.uint8)


@needs_huge_pages
def test_large_ones_are_in_huge_pages_but_for_their_last_bytes() -> None:
    tensor = empty((5, HUGE_PAGE // 2), torch.uint8)
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    assert begin % HUGE_PAGE == 0
    assert ["hg" in flags_at(address) for address in (begin, begin + 2 * HUGE_PAGE - 1)] == [True, True]
    assert "hg" not in flags_at(end - 1)


@needs_huge_pages
@pytest.mark.parametrize("amx", [False, True])
def test_packed_weights_are_in_huge_pages(amx: bool) -> None:
    packed = PackedWeight.of(torch.ones(1040, HUGE_PAGE // 2048).bfloat16(), None, amx)
    (address,) = unpack_from("=Q", packed.struct)
    assert "hg" in flags_at(address)
