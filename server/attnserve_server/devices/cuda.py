"""A CUDA device: stages batches through pinned memory, runs their kernels, and waits once, for the results.

Three streams: one copies to the device, one computes, one copies back; events order them, and only the end of a batch
is waited for. Host memory comes from torch's allocator of pinned blocks, which are powers of two, kept, and given out
again only when the copies from them are done: so a block is filled while another is on its way, and replies keep
theirs for as long as they need them.

What a ragged kernel takes of a batch goes to it in one call (see `packing.py`), the rest call by call, stacked where
requests are alike. Whether inputs were finite is told with the results; the few sequences that had NaN or infinities
are then computed again by the math kernel, which knows what may be seen of those.

Not yet run on a GPU: the planning is tested on CPU tensors, streams and kernels by `tests/gpu`, where there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import torch

from attnserve_server.devices.device import BatchResult, RequestResult
from attnserve_server.devices.packing import Pack, PackResult, StagedPack, pack, rows_of_members
from attnserve_server.devices.results import collect
from attnserve_server.devices.staging import Stager
from attnserve_server.kernels import KERNELS, RAGGED_KERNELS, AttentionCall, AttentionResult, RaggedCall, attend, math
from attnserve_server.problem import Problem
from attnserve_server.request import Request

MAX_PINNED = 1 << 30
"""Blocks above this many bytes are ordinary memory: their copies are waited for, but nothing stays pinned."""
WARM_BLOCKS = 6
"""Pinned blocks of each size that are there from the start: query, key and value of two stacks."""
WARM_POWERS = range(12, 25)
"""Powers of two of those sizes: 4 KiB to 16 MiB. Others are allocated, for milliseconds, when first needed."""


class CudaDevice:
    """One CUDA device."""

    threads = 0
    inline_flops = -1
    """Nothing runs on the caller's thread, not even a batch without work: it would wait for the device."""

    def __init__(self, index: int) -> None:
        # float32 means float32: TF32 has 10 bits of mantissa.
        torch.set_float32_matmul_precision("highest")
        self.name = f"cuda:{index}"
        self.description = torch.cuda.get_device_name(index)
        self._device = torch.device("cuda", index)
        self._upload_stream, self._compute_stream, self._fetch_stream = (
            torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        self._stager = Stager(_pinned, self._upload)

    def run(self, requests: Sequence[Request]) -> BatchResult:
        """Computes a batch. Raises torch.OutOfMemoryError, and what else torch raises, for the batch as a whole."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._compute_stream):
            return self._run(requests)

    def _run(self, requests: Sequence[Request]) -> BatchResult:
        begin = perf_counter()
        packs, places = pack(requests, RAGGED_KERNELS)
        others = [requests[place] for place in places]
        staged_packs = [StagedPack(each, requests, _pinned, self._upload) for each in packs]
        staged = self._stager.stage(others)
        after_staging = perf_counter()

        pack_results = [self._fetched_pack(each.run()) for each in staged_packs]
        results = [self._fetched(attend(call.call), others[call.parts[0][0]].problem) for call in staged]
        computed, fetched = _recorded(self._compute_stream), _recorded(self._fetch_stream)
        computed.synchronize()
        after_compute = perf_counter()
        fetched.synchronize()

        kernel_calls = Counter(result.kernel for result in results)
        for each, pack_result in zip(packs, pack_results, strict=True):
            kernel_calls[each.kernel.name] += pack_result.calls
        gathered: list[RequestResult | None] = [None] * len(requests)
        for each, pack_result in zip(packs, pack_results, strict=True):
            for place, result in self._of_members(each, pack_result, requests, kernel_calls):
                gathered[place] = result
        for call, call_result in zip(staged, results, strict=True):
            kernel_calls[math.NAME] += _mend(call.call, call_result)
        for place, result in zip(places, collect(others, staged, results), strict=True):
            gathered[place] = result
        return BatchResult(
            results=gathered,  # type: ignore[arg-type]  # every place has been filled
            staging=after_staging - begin,
            compute=after_compute - after_staging,
            fetch=perf_counter() - after_compute,
            kernel_calls=+kernel_calls,
        )

    def _upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device; the compute stream waits until it is there, the caller does not."""
        with torch.cuda.stream(self._upload_stream):
            uploaded = tensor.to(self._device, non_blocking=True)
        self._compute_stream.wait_stream(self._upload_stream)
        uploaded.record_stream(self._compute_stream)
        return uploaded

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in pinned memory of its own, once the fetch stream has come so far."""
        tensor = tensor.contiguous()
        host = _pinned(tensor.numel() * tensor.element_size()).view(tensor.dtype).view(tensor.shape)
        self._fetch_stream.wait_stream(self._compute_stream)
        with torch.cuda.stream(self._fetch_stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._fetch_stream)
        return host

    def _fetched(self, result: AttentionResult, problem: Problem) -> AttentionResult:
        """The result on the host; the output lies there as the reply has it."""
        output = result.output
        if problem.length_first:
            output = self._fetch(output.transpose(1, 2)).transpose(1, 2)
        else:
            output = self._fetch(output)
        lse, scores, suspect = (
            None if part is None else self._fetch(part) for part in (result.lse, result.scores, result.suspect)
        )
        return AttentionResult(output, lse, scores, result.kernel, suspect)

    def _fetched_pack(self, result: PackResult) -> PackResult:
        lse = None if result.lse is None else self._fetch(result.lse)
        return PackResult(self._fetch(result.output), lse, self._fetch(result.suspect), result.calls)

    def _of_members(
        self, pack: Pack, result: PackResult, requests: Sequence[Request], kernel_calls: Counter[str]
    ) -> list[tuple[int, RequestResult]]:
        """The places in the batch of a pack's requests, and their results."""
        output, lse = _bytes(result.output), None if result.lse is None else _bytes(result.lse)
        width, lse_width = result.output.shape[1] * result.output.element_size(), 4
        members = []
        for (place, rows), suspect in zip(rows_of_members(pack), result.suspect.tolist(), strict=True):
            if suspect:
                members.append((place, self._run_exactly(requests[place], kernel_calls)))
                continue
            own_lse = None if lse is None else lse[rows.start * lse_width : rows.stop * lse_width]
            members.append((place, RequestResult(output[rows.start * width : rows.stop * width], own_lse, None)))
        return members

    def _run_exactly(self, request: Request, kernel_calls: Counter[str]) -> RequestResult:
        """Computes a request by the math kernel, sequence by sequence, and waits for it."""
        staged = self._stager.stage([request])
        results = [_on_host(math.attend_each(call.call)) for call in staged]
        kernel_calls[math.NAME] += len(results)
        return collect([request], staged, results)[0]

    def warm_up(self) -> None:
        """Loads every kernel, and allocates pinned memory; on a thread that ends.

        For a thread has a handle of cuBLAS, made in its first call, that the next thread inherits when it ends.
        """
        with ThreadPoolExecutor(1, "attnserve-warm-up") as thread:
            thread.submit(self._warm_up).result()

    def _warm_up(self) -> None:
        blocks = [_pinned(1 << power) for power in WARM_POWERS for _ in range(WARM_BLOCKS)]
        del blocks
        with torch.cuda.device(self._device), torch.cuda.stream(self._compute_stream):
            for call in _warm_calls(self._device):
                attend(call)
            for kernel in RAGGED_KERNELS:
                for ragged_call in (_warm_ragged_call(self._device, dtype) for dtype in kernel.dtypes):
                    kernel.attend(ragged_call)
        self._compute_stream.synchronize()

    def memory(self) -> dict[str, int]:
        """Bytes in tensors, bytes that torch holds, and bytes that nobody holds."""
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
        """Waits for what is under way."""
        self._fetch_stream.synchronize()
        self._compute_stream.synchronize()


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """The event that all work of a stream until now is done. Who waits for it sleeps, and spins beside nobody."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _pinned(size: int) -> torch.Tensor:
    """So many bytes of host memory that the device reads and writes by itself."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=0 < size <= MAX_PINNED)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _on_host(result: AttentionResult) -> AttentionResult:
    """The result in ordinary memory, waited for."""
    lse, scores = (None if part is None else part.cpu() for part in (result.lse, result.scores))
    return AttentionResult(result.output.cpu(), lse, scores, result.kernel)


def _mend(call: AttentionCall, result: AttentionResult) -> int:
    """Computes the suspect sequences of a result on the host again, and writes them into it; how many they were."""
    suspects = [] if result.suspect is None else torch.nonzero(result.suspect).flatten().tolist()
    for n in suspects:
        exact = _on_host(math.attend_each(call.sequences(n, n + 1)))
        for part, own in ((result.output, exact.output), (result.lse, exact.lse), (result.scores, exact.scores)):
            if part is not None and own is not None:
                part[n] = own[0]
    return len(suspects)


def _warm_calls(device: torch.device) -> list[AttentionCall]:
    """Calls that load the kernels other than ragged ones."""
    calls = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        query = torch.randn(2, 4, 16, 64, device=device).to(dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        bias = torch.zeros(1, 1, 16, 16, dtype=wide, device=device)
        calls += [
            AttentionCall(query, query, query, 0.125, mask=bias == 0),
            AttentionCall(query, query, query, 0.125, bias=bias, return_lse=True),
            AttentionCall(query, query, query, 0.125, causal=True, softcap=1.0, return_scores="weights"),
        ]
    return calls


def _warm_ragged_call(device: torch.device, dtype: torch.dtype) -> RaggedCall:
    """A call of a ragged kernel: two causal sequences."""
    query = torch.randn(32, 4, 64, device=device).to(dtype)
    starts = torch.tensor([0, 12, 32], dtype=torch.int32, device=device)
    sequence = torch.repeat_interleave(torch.tensor([12, 20], device=device), output_size=32)
    return RaggedCall(query, query, query, starts, starts, sequence, 20, 20, 0.125, (-1, 0), True)
