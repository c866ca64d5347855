"""Tensors to a CUDA device and back, while it computes.

There are three streams: one copies to the device, one computes, one copies back. Events order them, and the host waits
only for what it must know. Batches on several threads share the streams. So a batch computes after all that was
submitted before it, whatever memory they use, and its inputs are copied meanwhile. It waits for its own work and for
what others had submitted by then, but for no more: that point is marked before it waits (`asked`).

The compute stream is the device's default stream, on which layers are loaded and caches made, too. What is little is
copied on this stream, between kernels: to order streams takes the host 40 microseconds, while to copy a MiB takes the
device 20.

Host memory comes from torch's allocator of pinned blocks. Their sizes are powers of two. The allocator keeps blocks,
and reuses one only when the copies from it are done. So one block is filled while another is in transit, and replies
keep theirs for as long as they need them.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import local
from time import perf_counter, sleep
from typing import Final, NamedTuple, Protocol

import torch

MAX_PINNED: Final = 1 << 30
"""Blocks above this many bytes are ordinary memory: copying them blocks, but nothing stays pinned."""
AT_ONCE: Final = 1 << 20
"""Up to so many bytes are copied on the compute stream."""
AWAKE_S: Final = 100e-6
"""How long a thread that waits for the device stays awake."""
WARM_BLOCKS: Final = 8
"""Pinned blocks of each size that are allocated at the start: inputs and outputs of two batches, and replies that are
still being sent.
"""
WARM_DEVICE_BYTES: Final = 1 << 28
"""Memory of the device that is there from the start, for what computes and for what is copied beside it: to get more
may wait until the device is idle.
"""
WARM_POWERS: Final = range(12, 25)
"""The sizes of these blocks as powers of two: 4 KiB to 16 MiB. Others are allocated when first needed, which takes a
millisecond for each 2 MiB."""


class Asked(NamedTuple):
    """Waits for the work submitted up to some moment, whatever has been submitted since."""

    until_computed: Callable[[], None]
    """Waits until it has been computed."""
    until_fetched: Callable[[], None]
    """Waits until it has been fetched."""


class Transfers(Protocol):
    """How a batch gets to a device, and its results back."""

    def allocate(self, size: int) -> torch.Tensor:
        """Host memory of `size` bytes, to be filled and uploaded."""

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in such memory, on the device, for what is computed from now on."""

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A device tensor in packed host memory, which is filled once `asked().until_fetched()` has returned."""

    def asked(self) -> Asked:
        """Waits for the work submitted so far, and for none that others submit from now on."""


class _Thread(local):
    """What a thread has done."""

    computes = False
    """Whether its kernels run on the device."""
    fetches = False
    """Whether the stream that copies back has work of this thread that is yet to be marked (`asked`)."""


class CudaTransfers:
    """Transfers to and from a CUDA device. They are ordered with the kernels of threads that have called
    `compute_here`, and with those that run on tensors of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = _Thread()
        self._compute_stream = torch.cuda.default_stream(device)
        # Such streams and the default stream wait for each other only through events.
        self._upload_stream, self._fetch_stream = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )

    def compute_here(self) -> None:
        """From now on, this thread's kernels run on the device: on its default stream, with which transfers are
        ordered.
        """
        if not self._thread.computes:
            torch.cuda.set_device(self._device)
            self._thread.computes = True

    def allocate(self, size: int) -> torch.Tensor:
        """Host memory of `size` bytes that the device reads and writes by itself, unless it is too much."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=0 < size <= MAX_PINNED)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device; the compute stream waits until it is there, the caller does not."""
        if tensor.nbytes <= AT_ONCE:
            return tensor.to(self._device, non_blocking=True)
        with torch.cuda.stream(self._upload_stream):
            uploaded = tensor.to(self._device, non_blocking=True)
        self._compute_stream.wait_stream(self._upload_stream)
        # It was allocated on the upload stream, which must not reuse its memory before the compute stream is done with
        # it.
        uploaded.record_stream(self._compute_stream)
        return uploaded

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in pinned memory of its own, once the device has got that far."""
        tensor = tensor.contiguous()
        host = self.allocate(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        if tensor.nbytes <= AT_ONCE:
            return host.copy_(tensor, non_blocking=True)
        self._fetch_stream.wait_stream(self._compute_stream)
        with torch.cuda.stream(self._fetch_stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._fetch_stream)
        self._thread.fetches = True
        return host

    def asked(self) -> Asked:
        """Marks the work submitted so far: on the compute stream, which also copies small results back, and, if this
        thread has had large ones copied back since it last asked, on the fetch stream.
        """
        computed = fetched = _mark(self._compute_stream)
        if self._thread.fetches:
            self._fetch_stream.wait_stream(self._compute_stream)
            fetched = _mark(self._fetch_stream)
            self._thread.fetches = False
        return Asked(computed, fetched)

    def warm_up(self) -> None:
        """Gets memory ready before the first batch needs it: that takes milliseconds."""
        blocks = [self.allocate(1 << power) for power in WARM_POWERS for _ in range(WARM_BLOCKS)]
        for stream in (self._compute_stream, self._upload_stream):
            with torch.cuda.stream(stream):
                blocks.append(torch.empty(WARM_DEVICE_BYTES, dtype=torch.uint8, device=self._device))
        del blocks

    def finish(self) -> None:
        """Waits for all work on the device."""
        torch.cuda.synchronize(self._device)


def _mark(stream: torch.cuda.Stream) -> Callable[[], None]:
    """A wait for all work of a stream so far. A thread sleeps while it waits, instead of spinning beside the event
    loop. But it stays awake for `AWAKE_S` first, because to be woken takes longer than little work does; others may
    have the interpreter meanwhile.
    """
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)

    def wait() -> None:
        asleep = perf_counter() + AWAKE_S
        while not event.query():  # type: ignore[no-untyped-call]
            if perf_counter() > asleep:
                event.synchronize()
                return
            sleep(0)

    return wait
