"""A CPU with a kernel for keys that lie anywhere, as GPUs have: a stand-in with its traps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cuda_kernels
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.kernels import RaggedResult, ScatteredCall, varlen_cuda

HALF = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


class ScatteringDevice(CpuDevice):
    """A CPU with that kernel; it keeps the calls."""

    def __init__(self) -> None:
        super().__init__(1, 0, None)
        self.scattered: list[ScatteredCall] = []
        self.looks = 0

    @property
    def scattering(self) -> Any:
        return self

    def attend_scattered(self, call: ScatteredCall) -> RaggedResult:
        self.scattered.append(call)
        return varlen_cuda.attend_scattered(call)

    def send(self, array: NDArray[np.int32]) -> torch.Tensor:
        assert array.dtype == np.int32
        return torch.from_numpy(array.copy())

    def flagged(self, flags: torch.Tensor) -> list[int]:
        self.looks += 1
        return torch.nonzero(flags).flatten().tolist()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScatteringDevice]:
    """Such a device."""
    monkeypatch.setattr(varlen_cuda, "_flash", cuda_kernels.flash)
    monkeypatch.setattr(varlen_cuda, "_DIVIDES", True)
    threads = torch.get_num_threads()
    device = ScatteringDevice()
    yield device
    device.close()
    torch.set_num_threads(threads)
