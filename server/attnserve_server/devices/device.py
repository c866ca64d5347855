"""What a device is: requests in, contiguous results out; and the choice of the device.

Importing this imports torch: the rooms that a request crosses before and after use `Device` as a type only.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from attnserve_server.devices.compute import Compute
from attnserve_server.devices.failures import Blame
from attnserve_server.requests.request import Request
from attnserve_server.requests.work import BatchResult, Finish

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LEAST_CAPABILITY: Final = (8, 0)
"""The compute capability that kernels need: Ampere, which has bfloat16 and runs torch's flash kernel."""


class Device(Compute, Protocol):
    """Where attention and layers are computed."""

    name: str
    """Such as `cpu` or `cuda:0`."""

    description: str
    """What it is, in its maker's words."""

    threads: int
    """The threads that compute; 0 if it is not a CPU."""

    instructions: str
    """The instruction set of the native kernel, such as `AVX-512`; empty where there is none."""

    inline_flops: int
    """Batches of up to this many FLOPs run faster on the caller's thread than on another."""

    launch_bytes: int
    """Batches whose requests and replies have up to so many bytes together are launched on the caller's thread, if they
    take few operations: two threads that launch would take the interpreter from each other at each operation. 0: no
    batches are.
    """

    depth: int
    """How many batches it takes at a time, each on a thread of its own: 1 where staging takes the processors that
    compute, more where one batch can be staged while another computes. All calls for a batch are made on its thread,
    but for those that launch it.
    """

    def prepare_thread(self) -> None:
        """To be called by each thread that will compute batches, before its first."""

    def run(self, requests: Sequence[Request]) -> BatchResult:
        """Computes a batch of `Attend` requests of one group. No result depends on the other requests."""

    def launch(self, requests: Sequence[Request]) -> Finish | None:
        """Launches such a batch, and returns what waits for it. None if the device computes on the thread that asks, or
        if that takes many operations.
        """

    def allocate(self, size: int) -> torch.Tensor:
        """Host memory of `size` bytes, to be filled and uploaded."""

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor on the device, for what is computed from now on, without waiting for the work in flight."""

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Device tensors on the host, after waiting for them, but not for what others compute meanwhile."""

    def fetching(self, tensors: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
        """As `fetch`, but returns what waits, which may be called on another thread."""

    def take_kernel_calls(self) -> Counter[str]:
        """The kernel calls, by name, that this thread has made since they were last taken."""

    def blame(self, error: Exception) -> Blame:
        """What made a computation fail, by the exception that it raised; checks whether the device still works."""

    def warm_up(self) -> None:
        """Does what would make a first call slower than a second."""

    def memory(self) -> dict[str, int]:
        """The device's memory in bytes by state; empty for the host."""

    def kernels(self) -> list[tuple[str, str]]:
        """Names and descriptions of the kernels in use, in the order in which they are tried."""

    def close(self) -> None:
        """Releases threads and memory."""


class DeviceError(Exception):
    """The device that was asked for is not there."""


def open_device(name: str, threads: int, inline_flops: int, native_kernel: str) -> Device:
    """Opens `cpu`, `cuda`, `cuda:n`, or for `auto` CUDA where there is one. Raises DeviceError.

    `native_kernel`, for a CPU, is `auto`, `off` or an instruction set by name.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cuda" and (hindrance := _hindrance(0)) is not None:
            logger.warning("the CPU computes, because %s", hindrance)
            name = "cpu"
    if name == "cpu":
        from attnserve_server.devices.cpu import CpuDevice
        from attnserve_server.native import library

        try:
            native = library.best(native_kernel)
        except LookupError as error:
            raise DeviceError(str(error)) from None
        if native is None and native_kernel == "auto":
            logger.warning(
                "the native kernel is not available, because %s: only torch's kernels are used", library.hindrance()
            )
        return CpuDevice(threads, inline_flops, native)
    if not torch.cuda.is_available():
        raise DeviceError(f"device {name!r} is not available: torch {torch.__version__} sees no CUDA device")
    from attnserve_server.devices.cuda import CudaDevice

    index = int(name.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise DeviceError(f"device {name!r} is not available: there are {torch.cuda.device_count()} CUDA devices")
    if (hindrance := _hindrance(index)) is not None:
        raise DeviceError(f"device {name!r} is not available: {hindrance}")
    return CudaDevice(index)


def _hindrance(index: int) -> str | None:
    """Why the kernels cannot run on a CUDA device; None if they can."""
    import torch

    found = torch.cuda.get_device_capability(index)
    if found >= LEAST_CAPABILITY:
        return None
    needed, has = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, found))
    return f"{torch.cuda.get_device_name(index)} has compute capability {has}, and kernels need {needed} (Ampere)"
