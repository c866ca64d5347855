"""What a CUDA device does around its batches, on CPU tensors: how it sends, when it is lost, how it warms up."""

from __future__ import annotations

import threading
import weakref
from typing import NoReturn

import numpy as np
import pytest
import torch
from cuda_here import HostTransfers

from attnserve_server.devices import cuda
from attnserve_server.devices.cuda import CudaDevice
from attnserve_server.devices.transfers import Asked
from attnserve_server.kernels import RAGGED_KERNELS, AttentionResult, efficient_cuda, varlen_cuda, written_out


class Recorded(HostTransfers):
    """Transfers that know what memory they gave, and what was uploaded."""

    def __init__(self) -> None:
        self.given: list[int] = []
        self.uploaded: list[int] = []
        self.done: list[str] = []

    def allocate(self, size: int) -> torch.Tensor:
        memory = super().allocate(size)
        self.given.append(memory.data_ptr())
        return memory

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        self.uploaded.append(tensor.data_ptr())
        return super().upload(tensor)

    def warm_up(self) -> None:
        self.done.append("transfers")

    def compute_here(self) -> None:
        self.done.append("compute here")


@pytest.fixture
def device() -> CudaDevice:
    """A device whose memory is that of the host."""
    device = object.__new__(CudaDevice)
    device._device, device._transfers = torch.device("cpu"), Recorded()  # type: ignore[assignment]
    device._kernel_calls, device._scatters = cuda._KernelCalls(), True
    return device


def test_what_is_not_pinned_is_sent_by_way_of_what_is(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is too much."""
    transfers, tensor = device._transfers, torch.randn(3, 5, dtype=torch.float64)
    assert torch.equal(device.upload(tensor), tensor)
    assert transfers.uploaded == transfers.given  # type: ignore[attr-defined]
    monkeypatch.setattr(cuda, "MAX_PINNED", tensor.nbytes - 1)
    assert torch.equal(device.upload(tensor), tensor)
    assert transfers.uploaded[1:] == [tensor.data_ptr()]  # type: ignore[attr-defined]


def test_what_is_pinned_is_sent_as_it_is(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(3, 5)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    assert torch.equal(device.upload(tensor), tensor)
    assert device._transfers.uploaded == [tensor.data_ptr()]  # type: ignore[attr-defined]


def test_integers_are_sent_by_way_of_pinned_memory(device: CudaDevice) -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert device.send(array).tolist() == array.tolist()
    assert device._transfers.uploaded == device._transfers.given  # type: ignore[attr-defined]


def test_a_device_that_has_no_memory_to_be_tried_is_not_lost(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ones(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "ones", ones)
    assert device.blame(RuntimeError("a bug")) == "memory"


def test_every_thread_that_may_compute_loads_kernels(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same time, so that no thread does the work of two; when there is memory for it."""
    loaded: list[int] = []

    def load(_: torch.device) -> None:
        assert device._transfers.done[0] == "transfers"  # type: ignore[attr-defined]
        loaded.append(threading.get_ident())

    monkeypatch.setattr(cuda, "load_kernels", load)
    monkeypatch.setattr(cuda, "load_scattered", lambda _: loaded.append(0))
    monkeypatch.setattr(cuda, "warm_requests", list)
    device.warm_up()
    assert len(set(loaded)) == len(loaded) == device.depth + 1 + 1
    assert loaded[-1] == 0
    assert device.scattering is device


def test_a_kernel_that_cannot_be_loaded_ends_the_start(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: torch.device) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(cuda, "load_kernels", load)
    monkeypatch.setattr(cuda, "warm_requests", list)
    with pytest.raises(RuntimeError, match="no kernel image is available"):
        device.warm_up()


def test_a_kernel_that_fails_as_it_runs_is_done_without(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> NoReturn:
        raise RuntimeError("not supported here")

    monkeypatch.setattr(cuda, "load_scattered", lambda _: None)
    monkeypatch.setattr(device._transfers, "asked", lambda: Asked(fail, fail))
    device._try_scattered()
    assert device.scattering is None


@pytest.mark.parametrize("launched", [False, True])
def test_a_failed_batch_is_let_go_of_though_its_error_is_kept(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch, launched: bool
) -> None:
    """Whichever thread it fails on, which by then computes on the device."""
    tensors: list[weakref.ref[torch.Tensor]] = []

    def fail(*_: object) -> NoReturn:
        tensor = torch.ones(3)
        tensors.append(weakref.ref(tensor))
        raise RuntimeError("a bug")

    monkeypatch.setattr(cuda, "run_batch", fail)
    monkeypatch.setattr(cuda, "launch_batch", lambda *_: fail)
    finish = device.launch([]) if launched else lambda: device.run([])
    assert finish is not None
    with pytest.raises(RuntimeError, match="a bug") as caught:
        finish()
    assert device._transfers.done == ["compute here"] * (2 if launched else 1)  # type: ignore[attr-defined]
    assert caught.value.__traceback__ is not None
    assert tensors[0]() is None


def test_kernel_calls_outside_of_batches_are_counted(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_cuda, "attend_scattered", lambda call: call)
    device.attend_scattered(None)  # type: ignore[arg-type]
    device.run_each([lambda: AttentionResult(torch.ones(1), None, None, "one")] * 2, 0)
    assert device.take_kernel_calls() == {varlen_cuda.NAME: 1, "one": 2}


def test_its_kernels_are_those_for_cuda_and_for_any_device(device: CudaDevice) -> None:
    """Each once, those that take any lengths in one call first."""
    kernels = device.kernels()
    assert kernels[: len(RAGGED_KERNELS)] == [(kernel.name, kernel.description) for kernel in RAGGED_KERNELS]
    assert [name for name, _ in kernels] == [varlen_cuda.NAME, efficient_cuda.NAME, written_out.NAME]


def test_free_memory_is_what_is_left_of_all(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 4))
    assert device.memory() == {"allocated": 1, "reserved": 2, "free": 3}
