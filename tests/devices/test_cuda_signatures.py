"""The CUDA kernels are called as the installed torch declares them: tested with tensors that have shapes only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnserve_server.kernels import RAGGED_KERNELS, AttentionCall, RaggedCall, RaggedKernel, efficient_cuda

META = torch.device("meta")


@pytest.mark.parametrize("kernel", RAGGED_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("longest", "window"), [(7, (-1, 0)), (7, (-1, -1)), (1, (-1, 0)), (1, (-1, -1))])
def test_ragged_kernels(kernel: RaggedKernel, group: int, longest: int, window: tuple[int, int]) -> None:
    for dtype in kernel.dtypes:
        query = torch.empty(9, 2 * group, 20, dtype=dtype, device=META)
        key, value = (torch.empty(12, 2, width, dtype=dtype, device=META) for width in (20, 24))
        starts = torch.empty(4, dtype=torch.int32, device=META)
        call = RaggedCall(query, key, value, starts, starts, longest, 9, 0.5, window, True)
        result = kernel.attend(call)
        assert result.output.shape == (9, 2 * group, 24)
        assert result.output.dtype == dtype
        assert result.lse is not None
        assert result.lse.shape == (9, 2 * group)
        assert kernel.attend(replace(call, return_lse=False)).lse is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("options", [{}, {"window": (-1, 0)}, {"window": (2, 2)}, {"mask": True}, {"bias": True}])
def test_equal_lengths(dtype: torch.dtype, group: int, options: dict[str, bool]) -> None:
    query = torch.empty(3, 2 * group, 5, 20, dtype=dtype, device=META)
    key, value = (torch.empty(3, 2, 7, width, dtype=dtype, device=META) for width in (20, 24))
    dtypes = {"mask": torch.bool, "bias": torch.float32}
    given = {
        name: torch.empty(1, 1, 5, 7, dtype=dtypes[name], device=META) if name in dtypes else value
        for name, value in options.items()
    }
    result = efficient_cuda.attend(AttentionCall(query, key, value, 0.5, return_lse=True, **given))  # type: ignore[arg-type]
    assert result.output.shape == (3, 2 * group, 5, 24)
    assert result.output.dtype == dtype
    assert result.lse is not None
    assert result.lse.shape == (3, 2 * group, 5)
    assert result.suspect is not None
    assert result.suspect.shape == (3,)
