"""The code around the CUDA kernels, on CPU tensors: batches are run and checked.

Torch's own kernels are replaced by stand-ins that have the same traps; everything else is what runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import accuracy
import cuda_kernels
import messages
import numpy as np
import pytest
import torch
from cases import Case
from hypothesis import settings

from attnserve._requests.attend import encode_attend
from attnserve_server.devices import packed_calls
from attnserve_server.devices.batch import run_batch
from attnserve_server.devices.transfers import Asked
from attnserve_server.kernels import KERNELS, RAGGED_KERNELS, efficient_cuda, table, varlen_cuda, written_out
from attnserve_server.requests.request import Request
from attnserve_server.requests.work import BatchResult

HALF = ("float16", "bfloat16")
FEW = settings(max_examples=max(15, settings().max_examples // 10))


class HostTransfers:
    """Transfers from the host to itself. An upload is a copy: nothing may be read from host memory afterwards."""

    def allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    def asked(self) -> Asked:
        return Asked(lambda: None, lambda: None)


@pytest.fixture(autouse=True, params=["oldest", "newest"], scope="module")
def cuda_kernels_here(request: pytest.FixtureRequest) -> Iterator[None]:
    """The table's CUDA kernels for CPU tensors, on top of stand-ins for those of the oldest and newest torch. With the
    one, inputs are always looked at and rows rearranged on the device, with the other on the host if there are few.
    """
    flash = {"oldest": cuda_kernels.flash, "newest": cuda_kernels.newest_flash}[request.param]
    rows = [replace(kernel, device="cpu") for kernel in KERNELS if kernel.device == "cuda"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(efficient_cuda, "_efficient", cuda_kernels.efficient)
        patch.setattr(efficient_cuda, "_efficient_ragged", cuda_kernels.efficient_ragged)
        patch.setattr(varlen_cuda, "_flash", flash)
        patch.setattr(varlen_cuda, "_DIVIDES", request.param == "oldest")
        if request.param == "oldest":
            patch.setattr(packed_calls, "LOOKED_AT", -1)
            patch.setattr(packed_calls, "REARRANGED", 0)
        patch.setattr(table, "KERNELS", (*rows, replace(KERNELS[-1], attend=written_out.attend_together)))
        yield


def request_of(case: Case, **returned: Any) -> Request:
    call = encode_attend(case.query, case.key, case.value, **case.arguments, **returned)
    return messages.read_request(b"".join(bytes(piece) for piece in call.pieces))


def result_of(case: Case, result: Any, request: Request) -> Any:
    """A request's result as arrays, in the shapes of a reply."""
    problem = request.problem
    sizes = [len(part) for part in (result.output, result.lse, result.scores) if part is not None]
    assert sum(sizes) == request.extent.reply_bytes
    wide = np.float64 if case.query.dtype == np.float64 else np.float32
    rows = case.expected.lse.shape
    return SimpleNamespace(
        output=np.frombuffer(result.output, case.query.dtype).reshape(case.expected.output.shape),
        lse=None if result.lse is None else np.frombuffer(result.lse, wide).reshape(rows),
        scores=None
        if problem.return_scores is None
        else np.frombuffer(result.scores, case.query.dtype).reshape(*rows, -1 if rows and 0 not in rows else 0),
    )


def run(requests: list[Request]) -> BatchResult:
    return run_batch(requests, HostTransfers(), RAGGED_KERNELS)


def check(asked: list[tuple[Case, dict[str, Any]]]) -> BatchResult:
    """Asserts that each request of a batch has the right result."""
    requests = [request_of(case, **returned) for case, returned in asked]
    batch = run(requests)
    for (case, returned), request, result in zip(asked, requests, batch.results, strict=True):
        scores = returned.get("return_scores")
        arrays = result_of(case, result, request)
        if scores is not None:
            arrays.scores = arrays.scores.reshape(case.expected.masked.shape)
        accuracy.check(case, arrays, scores)
    return batch
