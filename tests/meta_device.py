"""A CUDA device without CUDA: its tensors have shapes and no contents (`meta`), and of its kernels only the
memory-efficient one applies, which says of such tensors what comes out.

The host cannot read such memory: what is computed with must have been brought there, what replies carry fetched.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnserve_server.devices import cuda
from attnserve_server.devices.cuda import CudaDevice
from attnserve_server.devices.transfers import Asked
from attnserve_server.kernels import KERNELS, efficient_cuda, table

META = torch.device("meta")
SEVEN = 7.0


class MetaTransfers:
    """Transfers to memory without contents; what is fetched from there is all sevens, and nothing is true."""

    def __init__(self) -> None:
        self.waits = 0
        self.fetched: list[torch.Tensor] = []

    def allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device.type == "cpu"
        return tensor.to(META)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device == META
        self.fetched.append(tensor)
        return torch.full(tensor.shape, SEVEN if tensor.is_floating_point() else 0, dtype=tensor.dtype)

    def asked(self) -> Asked:
        return Asked(self._wait_until_computed, self._wait_until_fetched)

    def _wait_until_computed(self) -> None:
        raise AssertionError("to wait until results are here is enough")

    def _wait_until_fetched(self) -> None:
        self.waits += 1


@pytest.fixture
def meta_device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """The device."""
    rows = [replace(kernel, device="meta") for kernel in KERNELS if kernel.name == efficient_cuda.NAME]
    monkeypatch.setattr(table, "KERNELS", tuple(rows))
    device = object.__new__(CudaDevice)
    device._device = device.torch_device = META
    device._transfers = MetaTransfers()  # type: ignore[assignment]
    device._kernel_calls = cuda._KernelCalls()
    return device
