"""A batch of `Attend` on a device with ragged kernels. What these can compute goes to them together, the rest to other
kernels call by call.

In: requests. Out: what their replies carry. A batch is staged, computed and fetched with a single wait, at its end (see
`transfers.py`). Whether inputs were finite is known with the results; the few sequences with NaN or infinities are
then recomputed by the math kernel, which knows where those may show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import Final

import torch

from attnserve_server.devices.packed_calls import StagedPack
from attnserve_server.devices.packing import Pack, pack
from attnserve_server.devices.results import collect
from attnserve_server.devices.staging import Stager
from attnserve_server.devices.transfers import Transfers
from attnserve_server.kernels import AttentionCall, AttentionResult, RaggedKernel, attend, written_out
from attnserve_server.requests.problem import Problem
from attnserve_server.requests.request import Request
from attnserve_server.requests.work import BatchResult, Finish, RequestResult

FEW_SPANS: Final = 256
"""So many spans take three milliseconds to be put together, while others wait."""
FEW_CALLS: Final = 4
"""At most so many calls of kernels, with all that surrounds each, are launched while others wait."""


def run_batch(requests: Sequence[Request], transfers: Transfers, kernels: Sequence[RaggedKernel]) -> BatchResult:
    """Computes a batch, on the device that transfers go to."""
    return _launch(requests, transfers, *pack(requests, kernels))()


def launch_batch(requests: Sequence[Request], transfers: Transfers, kernels: Sequence[RaggedKernel]) -> Finish | None:
    """Launches a batch, without waiting; None if that takes more than some dozens of operations."""
    if sum(len(request.spans) for request in requests) > FEW_SPANS:
        return None
    packs, places = pack(requests, kernels)
    if places or sum(len(each.pieces) for each in packs) > FEW_CALLS:
        return None
    return _launch(requests, transfers, packs, places)


def _launch(requests: Sequence[Request], transfers: Transfers, packs: Sequence[Pack], places: Sequence[int]) -> Finish:
    """Launches a batch: its packs, and all other requests, which are at these places."""
    begin = perf_counter()
    stager = Stager(transfers.allocate, transfers.upload, looks=False)
    others = [requests[place] for place in places]
    staged_packs = [StagedPack(each, requests, transfers) for each in packs]
    staged = stager.stage(others)
    after_staging = perf_counter()

    for each in staged_packs:
        each.run()
    results = [_fetched(attend(call.call), others[call.parts[0][0]].problem, transfers) for call in staged]
    asked = transfers.asked()  # before waiting: another batch submits work meanwhile

    def finish() -> BatchResult:
        asked.until_computed()
        after_compute = perf_counter()
        asked.until_fetched()

        kernel_calls = Counter(result.kernel for result in results)
        gathered: list[RequestResult | None] = [None] * len(requests)

        def exactly(request: Request) -> RequestResult:
            staged = stager.stage([request])
            kernel_calls[written_out.NAME] += len(staged)
            return collect([request], staged, [_on_host(written_out.attend_each(call.call)) for call in staged])[0]

        for each in staged_packs:
            kernel_calls[each.kernel] += each.calls
            for place, own in each.results(exactly):
                gathered[place] = own
        for call, call_result in zip(staged, results, strict=True):
            kernel_calls[written_out.NAME] += mend(call.call, call_result)
        for place, own in zip(places, collect(others, staged, results), strict=True):
            gathered[place] = own
        return BatchResult(
            results=gathered,  # type: ignore[arg-type]  # every place has been filled
            staging=after_staging - begin,
            compute=after_compute - after_staging,
            fetch=perf_counter() - after_compute,
            kernel_calls=+kernel_calls,
        )

    return finish


def mend(call: AttentionCall, result: AttentionResult) -> int:
    """Recomputes the suspect sequences of a result, whose flags are on the host; returns how many they were."""
    suspects = [] if result.suspect is None else torch.nonzero(result.suspect).flatten().tolist()
    for n in suspects:
        exact = _on_host(written_out.attend_each(call.sequences(n, n + 1)))
        for part, own in ((result.output, exact.output), (result.lse, exact.lse), (result.scores, exact.scores)):
            if part is not None and own is not None:
                part[n] = own[0]
    return len(suspects)


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


def _on_host(result: AttentionResult) -> AttentionResult:
    """The result in ordinary host memory, after a wait."""
    lse, scores = (None if part is None else part.cpu() for part in (result.lse, result.scores))
    return AttentionResult(result.output.cpu(), lse, scores, result.kernel)
