"""A CUDA device without CUDA: its tensors have shapes and no contents (`meta`), and of its kernels only the
memory-efficient one applies, which says of such tensors what comes out.

The host cannot read such memory: what is computed with must have been brought there, what replies carry fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

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
        return tensor.to(META, non_blocking=True)

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


class NothingWaits(TorchFunctionMode):
    """Within, nothing that this thread asks of torch brings something to the device and waits until it is there."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        options = options or {}
        result = function(*arguments, **options)
        if function is torch.tensor:
            assert result.device != META, "numbers are copied there"
        elif function is torch.Tensor.to and arguments[0].device != result.device:
            assert options.get("non_blocking")
        elif function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and arguments[0].device == META:
            index = arguments[1] if isinstance(arguments[1], tuple) else (arguments[1],)
            assert not any(isinstance(each, list) for each in index), "numbers are copied there"
            assert all(each.device == META for each in index if isinstance(each, torch.Tensor))
        return result


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
