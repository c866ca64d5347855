"""A batch of `Attend` on a device with ragged kernels: what they take of it goes to them in one call, the rest call by
call.

In: requests. Out: what their replies carry. A batch is staged, computed and fetched with a single wait, at its end (see
`transfers.py`). Whether inputs were finite is flagged with the results; the few sequences with NaN or infinities are
then recomputed by the math kernel, which knows where those may show.

Not yet run on a GPU: all but torch's own kernels is tested on CPU tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from attnserve_server.devices.packing import Pack, PackResult, StagedPack, pack, rows_of_members
from attnserve_server.devices.results import collect
from attnserve_server.devices.staging import Stager
from attnserve_server.devices.transfers import Transfers
from attnserve_server.kernels import AttentionCall, AttentionResult, RaggedKernel, attend, math
from attnserve_server.requests.problem import Problem
from attnserve_server.requests.request import Request
from attnserve_server.requests.work import BatchResult, RequestResult


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
        kernel_calls[math.NAME] += mend(call.call, call_result)
    for place, own in zip(places, collect(others, staged, results), strict=True):
        gathered[place] = own
    return BatchResult(
        results=gathered,  # type: ignore[arg-type]  # every place has been filled
        staging=after_staging - begin,
        compute=after_compute - after_staging,
        fetch=perf_counter() - after_compute,
        kernel_calls=+kernel_calls,
    )


def mend(call: AttentionCall, result: AttentionResult) -> int:
    """Recomputes the suspect sequences of a result, whose flags are on the host; returns how many they were."""
    suspects = [] if result.suspect is None else torch.nonzero(result.suspect).flatten().tolist()
    for n in suspects:
        exact = _on_host(math.attend_each(call.sequences(n, n + 1)))
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
