"""Keys and values of float32 in two parts: products of TF32, which has 10 bits of mantissa, lose nothing of them."""

from __future__ import annotations

import torch

from attnserve_server.kernels.efficient_cuda import _two_parts


def test_the_first_part_is_what_tf32_holds_and_the_second_the_rest() -> None:
    numbers = torch.randn(50, 8) * torch.logspace(-20, 20, 50)[:, None]
    held, rest = _two_parts(numbers).chunk(2, -1)
    assert not (held.view(torch.int32) & 0x1FFF).any()
    assert torch.equal(held + rest, numbers)
    assert (rest.abs() <= numbers.abs() * 2**-10).all()
