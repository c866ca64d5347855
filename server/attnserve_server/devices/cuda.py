"""A CUDA device: batches of requests, and attention for caches and layers on tensors that are there already.

A batch is computed as in `batch.py`, and while it computes the next one is staged: two batches share nothing but the
streams. Caches and layers continue on the device with the results of calls (`attend`).

Flags on the device say whether inputs were finite, and to read them means to wait. Caches wait once per list of calls,
so mostly once. Layers are computed as if everything were finite, and wait at their end (`share`). If something was not
finite, they are computed again, and wait at each attention. Layers whose keys are in caches wait at each attention from
the start.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from attnserve_server.devices.batch import launch_batch, mend, run_batch
from attnserve_server.devices.compute import Item, Result, RowFunction, Rows, Scattering
from attnserve_server.devices.failures import Blame, is_out_of_memory
from attnserve_server.devices.native_compute import NativeCompute
from attnserve_server.devices.transfers import MAX_PINNED, CudaTransfers
from attnserve_server.devices.warm import load_kernels, load_scattered, warm_requests
from attnserve_server.kernels import (
    KERNELS,
    RAGGED_KERNELS,
    AttentionCall,
    AttentionResult,
    RaggedResult,
    ScatteredCall,
    attend,
    varlen_cuda,
    written_out,
)
from attnserve_server.requests.request import Request
from attnserve_server.requests.work import BatchResult, Finish

logger = logging.getLogger(__name__)


Done = TypeVar("Done")
"""What a computation gives."""


class _KernelCalls(local):
    """The kernel calls that each thread has made for its batch, and those of their flags that are to be read later."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.unseen: list[torch.Tensor] | None = None
        """The flags that are to be read later; None if flags are read at once."""


class CudaDevice:
    """One CUDA device."""

    threads = 0
    instructions = ""
    inline_flops = -1
    """Nothing is computed on the caller's thread, not even a batch without work: it would wait for the device."""

    launch_bytes = 8 << 20
    """Copying these takes about a millisecond."""

    depth = 2
    """One batch computes while another is staged."""

    native: NativeCompute | None = None

    def __init__(self, index: int) -> None:
        # float32 means float32: TF32 has 10 bits of mantissa.
        torch.set_float32_matmul_precision("highest")
        # Sums are float32: cuBLAS may divide a half-precision product, and would round the parts' sums before adding.
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self.name = f"cuda:{index}"
        self.description = torch.cuda.get_device_name(index)
        self._device = self.torch_device = torch.device("cuda", index)
        self._kernel_calls = _KernelCalls()
        self._transfers = CudaTransfers(self._device)
        self._scatters = True

    def prepare_thread(self) -> None:
        """Nothing: which device a thread computes on is said for each batch."""

    def run(self, requests: Sequence[Request]) -> BatchResult:
        """Computes a batch. Raises torch.OutOfMemoryError, or whatever else torch raises, for the batch as a whole."""
        return self._letting_go(lambda: run_batch(requests, self._transfers, RAGGED_KERNELS))

    def launch(self, requests: Sequence[Request]) -> Finish | None:
        """Launches a batch, if it takes few operations. Raises what `run` raises, and so may what it returns."""
        finish = self._letting_go(lambda: launch_batch(requests, self._transfers, RAGGED_KERNELS))
        return None if finish is None else lambda: self._letting_go(finish)

    def _letting_go(self, compute: Callable[[], Done]) -> Done:
        """The result of a computation on this device. If it fails, the frames of its error are cleared: whoever keeps
        the error would also keep the tensors of the failed batch.
        """
        self._transfers.compute_here()
        try:
            return compute()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            raise

    def share(
        self, compute: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item], flops: Sequence[int]
    ) -> Sequence[Result]:
        """`compute(items)`: the device has threads of its own. The flags for inputs that were not finite are read
        afterwards, all at once; if any is set, everything is computed again.
        """
        calls = self._kernel_calls
        calls.unseen = []
        try:
            results, unseen = compute(items), calls.unseen
        finally:
            calls.unseen = None
        if unseen and self.fetch([torch.cat(unseen)])[0].any():
            return compute(items)
        return results

    def rows(self, function: RowFunction[Rows], *tensors: torch.Tensor, flops: int, parallel: bool = False) -> Rows:
        """`function(*tensors)`, at once: the device has threads of its own."""
        return function(*tensors)

    def attend(self, calls: list[AttentionCall], flops: int) -> list[AttentionResult]:
        """The results of calls, those of inputs that are not finite mended. The flags for that are read once, when all
        calls have been launched; within `share`, at its end.
        """
        results = [attend(call) for call in calls]
        counts, unseen = self._kernel_calls.counts, self._kernel_calls.unseen
        counts.update(result.kernel for result in results)
        suspects = [result.suspect for result in results if result.suspect is not None]
        if unseen is not None:
            unseen += suspects
        elif suspects:
            (here,) = self.fetch([torch.cat(suspects)])
            flags = iter(torch.split(here, [len(each) for each in suspects]))
            for call, result in zip(calls, results, strict=True):
                if result.suspect is not None:
                    result.suspect = next(flags)
                    counts[written_out.NAME] += mend(call, result)
        return results

    @property
    def scattering(self) -> Scattering | None:
        """Itself, unless warming up showed that the kernel does not run here."""
        return self if self._scatters else None

    def attend_scattered(self, call: ScatteredCall) -> RaggedResult:
        """The result of a call whose keys lie anywhere in memory."""
        self._kernel_calls.counts[varlen_cuda.NAME] += 1
        return varlen_cuda.attend_scattered(call)

    def flagged(self, flags: torch.Tensor) -> list[int]:
        """The places of what is true in bool [n]; within `share`, none, because the flags are read at its end."""
        unseen = self._kernel_calls.unseen
        if unseen is not None:
            unseen.append(flags)
            return []
        (here,) = self.fetch([flags])
        return torch.nonzero(here).flatten().tolist()

    def run_each(self, computations: Sequence[Callable[[], AttentionResult]], flops: int) -> list[AttentionResult]:
        """The results of computations, one after the other."""
        results = [compute() for compute in computations]
        self._kernel_calls.counts.update(result.kernel for result in results)
        return results

    def take_kernel_calls(self) -> Counter[str]:
        """The counts of kernel calls since they were last taken."""
        taken, self._kernel_calls.counts = self._kernel_calls.counts, Counter()
        return +taken  # without zeros

    def allocate(self, size: int) -> torch.Tensor:
        """Pinned memory, unless it is too much."""
        return self._transfers.allocate(size)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device, copied while that computes: via pinned memory, as other copies would wait."""
        if not tensor.is_pinned() and tensor.nbytes <= MAX_PINNED:
            pinned = self.allocate(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            tensor = pinned.copy_(tensor)
        return self._transfers.upload(tensor)

    def send(self, array: NDArray[np.int32]) -> torch.Tensor:
        """Integers on the device, by way of pinned memory."""
        pinned = self._transfers.allocate(array.nbytes).view(torch.int32).view(array.shape)
        pinned.numpy()[...] = array
        return self._transfers.upload(pinned)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The tensors in pinned memory, copied while the device computes, with one wait for all."""
        return self.fetching(tensors)()

    def fetching(self, tensors: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
        """As `fetch`, but returns what waits."""
        fetched = [self._transfers.fetch(tensor) for tensor in tensors]
        until_fetched = self._transfers.asked().until_fetched

        def wait() -> Sequence[torch.Tensor]:
            until_fetched()
            return fetched

        return wait

    def blame(self, error: Exception) -> Blame:
        """Kernel errors stick to the CUDA context: after one, nothing works until the process ends."""
        if is_out_of_memory(error):
            return "memory"
        try:
            torch.ones(1, device=self._device).item()
        except Exception as failure:
            return "memory" if is_out_of_memory(failure) else "device"
        return "request"

    def warm_up(self) -> None:
        """Loads every kernel and pins memory, on as many short-lived threads as may compute at a time: one that
        launches, and one for each batch.

        A thread's first call makes a cuBLAS handle for it; when the thread ends, the next one inherits that.
        """
        self._transfers.warm_up()
        count = self.depth + 1
        together = Barrier(count)
        with ThreadPoolExecutor(count, "attnserve-warm-up") as threads:
            for done in [threads.submit(self._warm_up, together) for _ in range(count)]:
                done.result()
        for request in warm_requests():
            self.run([request])
        self._try_scattered()

    def _warm_up(self, together: Barrier) -> None:
        together.wait()  # so that no thread does the work of two
        self._transfers.compute_here()
        load_kernels(self._device)
        self._transfers.asked().until_computed()

    def _try_scattered(self) -> None:
        """Loads the kernel for keys that lie anywhere. It is not among torch's documented functions, and another
        version of torch may take other arguments. All that it computes can be computed in other ways.
        """
        try:
            self._transfers.compute_here()
            load_scattered(self._device)
            self._transfers.asked().until_computed()
        except Exception as error:
            if self.blame(error) != "request":
                raise
            self._scatters = False
            logger.warning("queries over caches are computed cache by cache, because torch's kernel refuses: %s", error)

    def memory(self) -> dict[str, int]:
        """Bytes in tensors, bytes that torch holds, and bytes that are free."""
        return {
            "allocated": torch.cuda.memory_allocated(self._device),
            "reserved": torch.cuda.memory_reserved(self._device),
            "free": torch.cuda.mem_get_info(self._device)[0],
        }

    def kernels(self) -> list[tuple[str, str]]:
        """The ragged kernels, and those for the rest; one that is both is described once."""
        ragged = {kernel.name: kernel.description for kernel in RAGGED_KERNELS}
        rest = [kernel for kernel in KERNELS if kernel.device in ("cuda", "any") and kernel.name not in ragged]
        return [*ragged.items(), *((kernel.name, kernel.description) for kernel in rest)]

    def close(self) -> None:
        """Waits for the work in flight."""
        self._transfers.finish()
