"""A CUDA device: what a ragged kernel takes of a batch goes to it in one call, the rest call by call.

A batch is staged, computed and fetched with a single wait, at its end (see `transfers.py`), and while it computes
another thread stages the next: two batches share nothing but the streams. Whether inputs were finite is flagged with
the results; the few sequences with NaN or infinities are then recomputed by the math kernel, which knows where those
may show. Caches and layers continue on the device with the results of calls (`attend`). Caches wait for the flags once
per list of calls, so mostly once; layers are computed as if everything were finite and wait at their end (`share`): if
something was not, they are recomputed, waiting at each attention. Layers whose keys are in caches wait that way from
the start.

Not yet run on a GPU: `run_batch` and all that it calls, except torch's own kernels, is tested on CPU tensors; streams
and kernels by `tests/gpu`, where there is a GPU.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from attnserve_server.devices.compute import ApplyPacked, AttendPacked, Item, Result, RowFunction, Rows, Scattering
from attnserve_server.devices.failures import Blame, is_out_of_memory
from attnserve_server.devices.packing import Pack, PackResult, StagedPack, pack, rows_of_members
from attnserve_server.devices.results import collect
from attnserve_server.devices.staging import Stager
from attnserve_server.devices.transfers import MAX_PINNED, CudaTransfers, Transfers
from attnserve_server.devices.warm import load_kernels, load_scattered
from attnserve_server.kernels import (
    KERNELS,
    RAGGED_KERNELS,
    AttentionCall,
    AttentionResult,
    RaggedKernel,
    RaggedResult,
    ScatteredCall,
    attend,
    math,
    varlen_cuda,
)
from attnserve_server.native.messages import Messages
from attnserve_server.native.products import Products
from attnserve_server.requests.problem import Problem
from attnserve_server.requests.request import Request
from attnserve_server.requests.work import BatchResult, RequestResult

logger = logging.getLogger(__name__)


class _KernelCalls(local):
    """The kernel calls that each thread has made for its batch, and those of their flags that are to be read later."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.unseen: list[torch.Tensor] | None = None
        """None: flags are read at once."""


class CudaDevice:
    """One CUDA device."""

    threads = 0
    instructions = ""
    inline_flops = -1
    """Nothing runs on the caller's thread, not even a batch without work: it would wait for the device."""

    depth = 2
    """One batch computes while another is staged."""

    attend_packed: AttendPacked | None = None
    apply_packed: ApplyPacked | None = None
    messages: Messages | None = None
    products: Products | None = None

    def __init__(self, index: int) -> None:
        # float32 means float32: TF32 has 10 bits of mantissa.
        torch.set_float32_matmul_precision("highest")
        self.name = f"cuda:{index}"
        self.description = torch.cuda.get_device_name(index)
        self._device = self.torch_device = torch.device("cuda", index)
        self._kernel_calls = _KernelCalls()
        self._transfers = CudaTransfers(self._device)
        self._scatters = True

    def run(self, requests: Sequence[Request]) -> BatchResult:
        """Computes a batch. Raises torch.OutOfMemoryError, or whatever else torch raises, for the batch as a whole."""
        try:
            with self._transfers.computing():
                return run_batch(requests, self._transfers, RAGGED_KERNELS)
        except Exception as error:
            # An error that is kept would keep its frames, and with them the tensors of the failed batch.
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

    def rows(self, function: RowFunction[Rows], *tensors: torch.Tensor, flops: int) -> Rows:
        """`function(*tensors)`, at once: the device has threads of its own."""
        return function(*tensors)

    def attend(self, calls: list[AttentionCall], flops: int) -> list[AttentionResult]:
        """The results of calls, those of non-finite inputs mended: flags are read once, when all calls are launched."""
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
                    counts[math.NAME] += _mend(call, result)
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
        """The places of what is true in bool [n]; in what is shared, none, because it is looked at afterwards."""
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
        fetched = [self._transfers.fetch(tensor) for tensor in tensors]
        self._transfers.asked().until_fetched()
        return fetched

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
        """Loads every kernel and pins memory, on as many short-lived threads as there are batches at a time.

        A thread's first call makes a cuBLAS handle for it; when the thread ends, the next one inherits that.
        """
        self._transfers.warm_up()
        together = Barrier(self.depth)
        with ThreadPoolExecutor(self.depth, "attnserve-warm-up") as threads:
            for done in [threads.submit(self._warm_up, together) for _ in range(self.depth)]:
                done.result()
        self._try_scattered()

    def _warm_up(self, together: Barrier) -> None:
        together.wait()  # so that no thread does the work of two
        with self._transfers.computing():
            load_kernels(self._device)
        self._transfers.asked().until_computed()

    def _try_scattered(self) -> None:
        """Loads the kernel for keys that lie anywhere. It is not part of torch's documented functions: another version
        may take it differently, and what it computes can be computed in other ways.
        """
        try:
            with self._transfers.computing():
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
        """The ragged kernels, and those for the rest."""
        rest = [(kernel.name, kernel.description) for kernel in KERNELS if kernel.device in ("cuda", "any")]
        return [(kernel.name, kernel.description) for kernel in RAGGED_KERNELS] + rest

    def close(self) -> None:
        """Waits for the work in flight."""
        asked = self._transfers.asked()
        asked.until_computed()
        asked.until_fetched()


def run_batch(requests: Sequence[Request], transfers: Transfers, kernels: Sequence[RaggedKernel]) -> BatchResult:
    """Computes a batch, on the device that transfers go to."""
    begin = perf_counter()
    stager = Stager(transfers.allocate, transfers.upload, looks=False)
    packs, places = pack(requests, kernels)
    others = [requests[place] for place in places]
    staged_packs = [StagedPack(each, requests, transfers.allocate, transfers.upload) for each in packs]
    staged = stager.stage(others)
    after_staging = perf_counter()

    pack_results = [_fetched_pack(each.run(), transfers) for each in staged_packs]
    results = [_fetched(attend(call.call), others[call.parts[0][0]].problem, transfers) for call in staged]
    asked = transfers.asked()  # before waiting: another batch submits work meanwhile
    asked.until_computed()
    after_compute = perf_counter()
    asked.until_fetched()

    kernel_calls = Counter(result.kernel for result in results)
    gathered: list[RequestResult | None] = [None] * len(requests)

    def exactly(request: Request) -> RequestResult:
        staged = stager.stage([request])
        kernel_calls[math.NAME] += len(staged)
        return collect([request], staged, [_on_host(math.attend_each(call.call)) for call in staged])[0]

    for each, pack_result in zip(packs, pack_results, strict=True):
        kernel_calls[each.kernel.name] += pack_result.calls
        for place, own in _of_members(each, pack_result, requests, exactly):
            gathered[place] = own
    for call, call_result in zip(staged, results, strict=True):
        kernel_calls[math.NAME] += _mend(call.call, call_result)
    for place, own in zip(places, collect(others, staged, results), strict=True):
        gathered[place] = own
    return BatchResult(
        results=gathered,  # type: ignore[arg-type]  # every place has been filled
        staging=after_staging - begin,
        compute=after_compute - after_staging,
        fetch=perf_counter() - after_compute,
        kernel_calls=+kernel_calls,
    )


def _fetched(result: AttentionResult, problem: Problem, transfers: Transfers) -> AttentionResult:
    """The result on its way to the host, where the output will have the layout of the reply."""
    if problem.length_first:
        output = transfers.fetch(result.output.transpose(1, 2)).transpose(1, 2)
    else:
        output = transfers.fetch(result.output)
    lse, scores, suspect = (
        None if part is None else transfers.fetch(part) for part in (result.lse, result.scores, result.suspect)
    )
    return AttentionResult(output, lse, scores, result.kernel, suspect)


def _fetched_pack(result: PackResult, transfers: Transfers) -> PackResult:
    """The result of a pack on its way to the host."""
    lse = None if result.lse is None else transfers.fetch(result.lse)
    return PackResult(transfers.fetch(result.output), lse, transfers.fetch(result.suspect), result.calls)


def _of_members(
    pack: Pack, result: PackResult, requests: Sequence[Request], exactly: Callable[[Request], RequestResult]
) -> list[tuple[int, RequestResult]]:
    """The places in the batch of a pack's requests, and their results; suspect requests are recomputed."""
    output, width = _bytes(result.output), result.output.shape[1] * result.output.element_size()
    lse = None if result.lse is None else _bytes(result.lse)
    members = []
    for (place, rows), suspect in zip(rows_of_members(pack), result.suspect.tolist(), strict=True):
        if suspect:
            members.append((place, exactly(requests[place])))
            continue
        own_lse = None if lse is None else lse[rows.start * 4 : rows.stop * 4]
        members.append((place, RequestResult(output[rows.start * width : rows.stop * width], own_lse, None)))
    return members


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _on_host(result: AttentionResult) -> AttentionResult:
    """The result in ordinary host memory, after a wait."""
    lse, scores = (None if part is None else part.cpu() for part in (result.lse, result.scores))
    return AttentionResult(result.output.cpu(), lse, scores, result.kernel)


def _mend(call: AttentionCall, result: AttentionResult) -> int:
    """Recomputes the suspect sequences of a result, whose flags are on the host; returns how many they were."""
    suspects = [] if result.suspect is None else torch.nonzero(result.suspect).flatten().tolist()
    for n in suspects:
        exact = _on_host(math.attend_each(call.sequences(n, n + 1)))
        for part, own in ((result.output, exact.output), (result.lse, exact.lse), (result.scores, exact.scores)):
            if part is not None and own is not None:
                part[n] = own[0]
    return len(suspects)
