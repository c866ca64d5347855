"""Whether tensors are finite, found by a sum."""

from __future__ import annotations

import pytest
import torch

from attnserve_server.kernels.finite import surely_finite

EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)


@EVERY_DTYPE
@pytest.mark.parametrize("element", [torch.inf, -torch.inf, torch.nan])
def test_nothing_that_is_not_finite_is_missed(dtype: torch.dtype, element: float) -> None:
    finite = torch.ones(3, 5, dtype=dtype)
    assert surely_finite(finite, None, finite[:0])
    for place in range(finite.numel()):
        other = finite.clone()
        other.view(-1)[place] = element
        assert not surely_finite(other), place
        assert not surely_finite(finite, None, other), place


@EVERY_DTYPE
def test_infinities_do_not_cancel_each_other(dtype: torch.dtype) -> None:
    assert not surely_finite(torch.tensor([torch.inf, -torch.inf], dtype=dtype))
    assert not surely_finite(torch.tensor([torch.inf], dtype=dtype), torch.tensor([-torch.inf], dtype=dtype))


def test_a_sum_beyond_float16_is_no_reason_for_doubt_and_one_beyond_float32_is() -> None:
    assert surely_finite(torch.full((1000,), 60000.0, dtype=torch.float16))
    assert not surely_finite(torch.full((1000,), 3e38))
    assert surely_finite(torch.full((1000,), 3e38, dtype=torch.float64))
