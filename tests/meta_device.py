"""A CUDA device without CUDA: its tensors have shapes but no contents, and of kernels only the output shapes are known.

The host cannot read such memory: inputs must have been uploaded, and what replies carry must be fetched. Such tensors
are on the device `meta` or, where torch was built with CUDA, claim to be on a CUDA device: then tensors on different
devices are detected as on a GPU. Neither needs a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from attnserve_server.devices import cuda
from attnserve_server.devices.cuda import CudaDevice
from attnserve_server.devices.transfers import Asked
from attnserve_server.kernels import KERNELS, efficient_cuda, table

META = torch.device("meta")
CUDA = torch.device("cuda", 0)
SEVEN = 7.0


class _OthersAsEver(TorchDispatchMode):
    """Inside a mode without contents, limits it to tensors on the CUDA device. Nothing is pinned, since that would need
    a driver.
    """

    def __init__(self, hollow: FakeTensorMode) -> None:
        super().__init__()
        self._hollow = hollow

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], arguments: Sequence[Any] = (), options: Any = None
    ) -> Any:
        options = options or {}
        leaves = tree_leaves((arguments, options))
        if any(isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.device) and leaf == CUDA) for leaf in leaves):
            arguments, options = tree_map(self._emptied, (arguments, options))
            return function(*arguments, **options)
        with unset_fake_temporarily():
            return function(*arguments, **{**options, "pin_memory": False} if "pin_memory" in options else options)

    def _emptied(self, leaf: Any) -> Any:
        real = isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor)
        return self._hollow.from_tensor(leaf) if real else leaf


@contextmanager
def hollow(device: torch.device) -> Iterator[None]:
    """Within, tensors on a device have no contents."""
    if device == META:
        yield
        return
    if not torch.backends.cuda.is_built():
        pytest.skip("this torch was built without CUDA")
    with FakeTensorMode() as mode, _OthersAsEver(mode), warnings.catch_warnings():
        # Where the pages begin, which a device never looks at here. torch warns of it once in a process.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        yield


class MetaTransfers:
    """Transfers to memory without contents; floats fetched from there are all 7, everything else is 0 or false."""

    def __init__(self, device: torch.device = META, computes_first: bool = False) -> None:
        self._device = device
        self.computes_first = computes_first
        """Whether waiting for the computation alone is allowed, to time it."""
        self.waits = 0
        self.fetched: list[torch.Tensor] = []
        self.allocated: set[int] = set()
        self.uploaded: list[torch.Tensor] = []
        """Kept alive, so that no other memory gets the same address."""

    def compute_here(self) -> None:
        """Wherever it is called, there is nothing to be done."""

    def allocate(self, size: int) -> torch.Tensor:
        memory = torch.empty(size, dtype=torch.uint8)
        self.allocated.add(memory.data_ptr())
        return memory

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device.type == "cpu"
        self.uploaded.append(tensor)
        return tensor.to(self._device, non_blocking=True)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device == self._device
        self.fetched.append(tensor)
        return torch.full(tensor.shape, SEVEN if tensor.is_floating_point() else 0, dtype=tensor.dtype)

    def asked(self) -> Asked:
        return Asked(self._wait_until_computed, self._wait_until_fetched)

    def _wait_until_computed(self) -> None:
        assert self.computes_first, "to wait until results are here is enough"

    def _wait_until_fetched(self) -> None:
        self.waits += 1


class NothingWaits(TorchFunctionMode):
    """Within, asserts that no torch call of this thread copies to the device and waits for it."""

    def __init__(self, device: torch.device = META) -> None:
        super().__init__()
        self._device = device

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
            assert result.device != self._device, "numbers are copied there"
        elif function is torch.Tensor.to and arguments[0].device != result.device:
            assert options.get("non_blocking")
        elif function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and arguments[0].device == self._device:
            index = arguments[1] if isinstance(arguments[1], tuple) else (arguments[1],)
            assert not any(isinstance(each, list) for each in index), "numbers are copied there"
            assert all(each.device == self._device for each in index if isinstance(each, torch.Tensor))
        return result


class Operations(TorchDispatchMode):
    """Counts what is launched on `meta`."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        first = result[0] if isinstance(result, tuple | list) and result else result
        on_device = isinstance(first, torch.Tensor) and first.device == META
        self.count += on_device and not function.is_view and "empty" not in str(function)
        return result


@pytest.fixture
def meta_device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """The device `meta`."""
    return hollow_device(META, monkeypatch)


def hollow_device(where: torch.device, monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """A CUDA device whose tensors are on `where`; its only kernel is the memory-efficient one."""
    rows = [replace(kernel, device=where.type) for kernel in KERNELS if kernel.name == efficient_cuda.NAME]
    monkeypatch.setattr(table, "KERNELS", tuple(rows))
    device = object.__new__(CudaDevice)
    device._device = device.torch_device = where
    device._transfers = MetaTransfers(where)  # type: ignore[assignment]
    device._kernel_calls = cuda._KernelCalls()
    device._scatters = True
    return device
