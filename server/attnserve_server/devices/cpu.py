"""The CPU: every kernel call runs on one thread, and threads are used across calls and parts of calls.

So the bits of a result depend only on its request, and no thread spins beside the event loop, as torch's intra-op
threads would. The native kernel computes what it can, the kernels on torch tensors the rest.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Lock, local
from time import perf_counter

import torch

from attnserve_server.devices.compute import ALONE_FLOPS, Item, Result, RowFunction, Rows
from attnserve_server.devices.division import chunks, divided, end_to_end, even_shares
from attnserve_server.devices.failures import Blame, is_out_of_memory
from attnserve_server.devices.native_compute import NativeCompute
from attnserve_server.devices.results import collect, put, rows_of
from attnserve_server.devices.staging import Stager
from attnserve_server.host import cpus
from attnserve_server.kernels import KERNELS, AttentionCall, AttentionResult, attend, attend_again
from attnserve_server.kernels.table import CPU_PAGES, CPU_PAGES_DESCRIPTION
from attnserve_server.native.calls import applies, attend_all
from attnserve_server.native.library import DESCRIPTION, NAME, Library, Team, Threads
from attnserve_server.requests.request import Request
from attnserve_server.requests.work import BatchResult, Finish, completed

SPLIT_FLOPS = 20_000_000
"""One thread finishes less work than this many FLOPs sooner than Python could divide it."""

HELPED_FLOPS = 4_000_000
"""The native kernel gets one thread per this many FLOPs, or the equivalent (`Request.effort`): its team joins within
microseconds. For less, help would cost about as much time as it saves, and more processor time.
"""

TASKS = 8
"""Tasks per thread that a list of calls is divided into: handing over a task costs more than a small call does."""


_ALONE = Threads()


class CpuDevice:
    """A CPU with a number of threads."""

    name = "cpu"
    depth = 1
    """One batch: staging another would take processors from it."""

    scattering = None

    def __init__(self, threads: int, inline_flops: int, native: Library | None) -> None:
        self.prepare_thread()
        self.torch_device = torch.device("cpu")
        self.threads = threads
        self.inline_flops = inline_flops
        self.launch_bytes = 0
        self.description = cpus.model()
        self.instructions = "" if native is None else native.instructions
        self.native = None if native is None else NativeCompute(native, self._threads_for, self._count)
        self._stager = Stager(self.allocate, self.upload, looks=True)
        self._kernel_calls: Counter[str] = Counter()
        self._counting = Lock()
        self._thread = local()
        self._pool = ThreadPoolExecutor(threads, "attnserve-cpu", self._begin_own_thread) if threads > 1 else None
        self._team = Team(threads - 1) if threads > 1 and native is not None else None

    def prepare_thread(self) -> None:
        """Makes torch compute with one thread when it is called on this one, from the first product on.

        In torch, how many threads compute is set for each thread, and a new thread takes the setting over only in some
        functions. Until it has called one of these, as many threads as there are processors would compute its products,
        to other bits.
        """
        torch.set_num_threads(1)

    def launch(self, requests: Sequence[Request]) -> Finish | None:
        """None: whoever asks for a computation waits for it."""
        return None

    def run(self, requests: Sequence[Request]) -> BatchResult:
        """Computes a batch."""
        if self.native is None:
            return self._run_on_tensors(requests)
        if requests[0].unfinished is not None:
            return self._finish(requests)
        begin = perf_counter()
        effort = sum(request.effort for request in requests)
        found, broken = self.native.requests.run(requests, self._threads_for(effort))
        again = {place: requests[place].but_for(sequences, found[place]) for place, sequences in broken.items()}
        compute = perf_counter() - begin
        done = [result for result in found if result is not None]
        if len(done) == len(requests):
            return BatchResult(done, 0.0, compute, 0.0, kernel_calls={NAME: len(done)}, again=again)
        self._count(NAME, len(done))
        others = self._run_on_tensors(
            [request for request, result in zip(requests, found, strict=True) if result is None]
        )
        return others.with_found(found, compute, again)

    def _finish(self, requests: Sequence[Request]) -> BatchResult:
        """Computes what is missing from the results of some requests, with the kernels on torch tensors."""
        begin = perf_counter()
        results = []
        for request in requests:
            assert request.unfinished is not None
            missing = request.of_sequences(request.unfinished.sequences)
            staged = self._stager.stage([missing])
            attended = self.attend_tensors([each.call for each in staged], missing.extent.flops, again=True)
            for call, anew in zip(staged, attended, strict=True):
                put(request.unfinished.result, request.problem, rows_of(request.problem, call.parts[0][1]), anew)
            results.append(request.unfinished.result)
        return BatchResult(results, 0.0, perf_counter() - begin, 0.0, kernel_calls=self.take_kernel_calls())

    def _run_on_tensors(self, requests: Sequence[Request]) -> BatchResult:
        """Computes requests with the kernels on torch tensors."""
        begin = perf_counter()
        staged = self._stager.stage(requests)
        after_staging = perf_counter()
        flops = sum(request.extent.flops for request in requests)
        results = self.attend_tensors([staged_call.call for staged_call in staged], flops)
        after_compute = perf_counter()
        return BatchResult(
            results=collect(requests, staged, results),
            staging=after_staging - begin,
            compute=after_compute - after_staging,
            fetch=perf_counter() - after_compute,
            kernel_calls=self.take_kernel_calls(),
        )

    def share(
        self, compute: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item], flops: Sequence[int]
    ) -> Sequence[Result]:
        """`compute(items)`; or the same of parts of them, on all threads, if they cost enough and divide evenly. If a
        single item prevents that, it is computed afterwards, by itself.
        """
        pool = self._pool_for(sum(flops))
        parts, rest = ([], []) if pool is None else even_shares(flops, self.threads)
        if pool is None or not parts:
            return compute(items)
        computed = pool.map(compute, [[items[place] for place in part] for part in parts])
        results = dict(zip(itertools.chain(*parts), itertools.chain.from_iterable(computed), strict=True))
        if rest:
            results |= zip(rest, compute([items[place] for place in rest]), strict=True)
        return [results[place] for place in range(len(items))]

    def rows(self, function: RowFunction[Rows], *tensors: torch.Tensor, flops: int, parallel: bool = False) -> Rows:
        """`function(*tensors)`, computed by ranges of rows, on all threads if it costs enough. If there are too few
        rows for all threads, and products are `parallel`, all rows are computed at once: by ranges, all weights would
        be read for each range.
        """
        pool = self._pool_for(flops)
        ranges = list(chunks(len(tensors[0]), 1 if pool is None else self.threads))
        if len(ranges) < (self.threads if parallel and pool is not None else 2):
            return function(*tensors)

        def part(of_rows: slice) -> Rows:
            with torch.inference_mode():  # it is set per thread
                return function(*(tensor[of_rows] for tensor in tensors))

        return end_to_end(list(map(part, ranges) if pool is None else pool.map(part, ranges)))

    def attend(self, calls: list[AttentionCall], flops: int) -> list[AttentionResult]:
        """The results of calls, computed on all threads if they cost enough."""
        ours = [self.native is not None and applies(call) for call in calls]
        native = list(itertools.compress(calls, ours))
        if self.native is None or not native:
            return self.attend_tensors(calls, flops)
        results = iter(attend_all(self.native.library, native, self._threads_for(flops)))
        self._count(NAME, len(native))
        found = [next(results) if is_ours else None for is_ours in ours]
        return completed(calls, found, lambda others: self.attend_tensors(others, flops))

    def attend_tensors(self, calls: list[AttentionCall], flops: int, again: bool = False) -> list[AttentionResult]:
        """The results of calls by the kernels on torch tensors, on all threads if they cost enough. `again`: the native
        kernel gave NaN or infinities for all of them.
        """
        compute = attend_again if again else attend
        pool = self._pool_for(flops)
        if pool is None:
            results = [compute(call) for call in calls]
        else:
            few = len(calls) < 2 * self.threads
            divisions = [divided(call, self.threads) if few else ([call], 0) for call in calls]
            computed = self._on_threads(pool, [partial(compute, part) for parts, _ in divisions for part in parts])
            results = [AttentionResult.joined([next(computed) for _ in parts], axis) for parts, axis in divisions]
        with self._counting:
            self._kernel_calls.update(result.kernel for result in results)
        return results

    def _threads_for(self, flops: int) -> Threads | None:
        """The threads that compute work of this cost with the native kernel; None: the caller, holding the GIL."""
        if flops < ALONE_FLOPS:
            return None
        if self._team is None or hasattr(self._thread, "own"):
            return _ALONE
        return Threads(self._team, min(len(self._team), flops // HELPED_FLOPS - 1))

    def _count(self, kernel: str, calls: int) -> None:
        with self._counting:
            self._kernel_calls[kernel] += calls

    def run_each(self, computations: Sequence[Callable[[], AttentionResult]], flops: int) -> list[AttentionResult]:
        """The results of computations, run on all threads if they cost enough."""
        pool = self._pool_for(flops) if len(computations) > 1 else None
        each = (compute() for compute in computations) if pool is None else self._on_threads(pool, computations)
        results = list(each)
        with self._counting:
            self._kernel_calls.update(result.kernel for result in results)
        return results

    def _on_threads(
        self, pool: ThreadPoolExecutor, computations: Sequence[Callable[[], AttentionResult]]
    ) -> Iterator[AttentionResult]:
        """The results of computations, run on all threads, in order."""
        each = -(-len(computations) // (TASKS * self.threads))
        tasks = [computations[start : start + each] for start in range(0, len(computations), each)]
        return itertools.chain.from_iterable(pool.map(_run_each, tasks))

    def _pool_for(self, flops: int) -> ThreadPoolExecutor | None:
        """The threads that work of this cost is divided among; None if it is not divided. On one of these threads it
        never is.
        """
        return None if flops < SPLIT_FLOPS or hasattr(self._thread, "own") else self._pool

    def _begin_own_thread(self) -> None:
        self._thread.own = True
        self.prepare_thread()

    def allocate(self, size: int) -> torch.Tensor:
        """Memory."""
        return torch.empty(size, dtype=torch.uint8)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself: it is already there."""
        return tensor

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The tensors themselves: they are already here."""
        return tensors

    def fetching(self, tensors: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
        """What returns the tensors themselves."""
        return lambda: tensors

    def take_kernel_calls(self) -> Counter[str]:
        """The counts of kernel calls since they were last taken."""
        with self._counting:  # threads may still be computing for a batch that has failed
            taken, self._kernel_calls = self._kernel_calls, Counter()
        return taken

    def blame(self, error: Exception) -> Blame:
        """A CPU is never lost while this process lives."""
        return "memory" if is_out_of_memory(error) else "request"

    def warm_up(self) -> None:
        """Runs the kernels for plain and for written-out attention, on all threads where the work can be divided."""
        for length in (16, 256):
            query = torch.randn(1, 2 * self.threads, length, 64)
            call = AttentionCall(query, query, query, 0.125)
            self.attend([call, replace(call, return_scores="weights")], SPLIT_FLOPS)
        self.take_kernel_calls()

    def memory(self) -> dict[str, int]:
        """Nothing: host memory is the process's own."""
        return {}

    def kernels(self) -> list[tuple[str, str]]:
        """The kernels for a CPU."""
        native = [] if self.native is None else [(NAME, f"{DESCRIPTION}; by {self.instructions}")]
        of_calls = [(kernel.name, kernel.description) for kernel in KERNELS if kernel.device in ("cpu", "any")]
        return [*native, (CPU_PAGES, CPU_PAGES_DESCRIPTION), *of_calls]

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()
        if self._team is not None:
            self._team.close()


def _run_each(computations: Sequence[Callable[[], AttentionResult]]) -> list[AttentionResult]:
    with torch.inference_mode():  # it is set per thread
        return [compute() for compute in computations]
