"""Whole batches on a fake CUDA device without contents: what is sent there and what comes back, for any requests."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import messages
import pytest
import strategies
import torch
from cases import Plan
from hypothesis import given, settings
from hypothesis import strategies as st
from meta_device import CUDA, META, MetaTransfers, NothingWaits, Operations, hollow, hollow_device

from attnserve._requests.attend import encode_attend
from attnserve_server.caches.pages import sent
from attnserve_server.devices import cuda, packed_calls
from attnserve_server.devices.batch import run_batch
from attnserve_server.devices.compute import ROWS
from attnserve_server.devices.cuda import CudaDevice
from attnserve_server.devices.staging import TORCH
from attnserve_server.devices.warm import WIDTHS, warm_calls, warm_ragged_call, warm_scattered_call
from attnserve_server.kernels import KERNELS, RAGGED_KERNELS, attend, table, varlen_cuda, written_out
from attnserve_server.layers.rows import Packing
from attnserve_server.requests.request import Request
from attnserve_server.requests.work import BatchResult

FEW = settings(max_examples=max(15, settings().max_examples // 4))
EVERYWHERE = pytest.mark.parametrize("device", [META, CUDA], ids=str)
FINITE = strategies.plans().map(lambda plan: replace(plan, poisoned=False))
"""What is not finite is computed once more, by values that meta tensors do not have."""
RETURNED = st.fixed_dictionaries(
    {"return_lse": st.booleans(), "return_scores": st.sampled_from([None, None, "masked", "weights", "raw"])}
)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CUDA kernels available for `meta` too."""
    rows = [replace(kernel, device="meta") for kernel in KERNELS if kernel.device == "cuda"]
    monkeypatch.setattr(table, "KERNELS", (*rows, *KERNELS))
    monkeypatch.setitem(written_out.BLOCK_ELEMENTS, "meta", 1 << 26)


def request_of(plan: Plan, seed: int, returned: dict[str, Any]) -> Request:
    case = plan.case(seed)
    call = encode_attend(case.query, case.key, case.value, **case.arguments, **returned)
    return messages.read_request(b"".join(bytes(piece) for piece in call.pieces))


@EVERYWHERE
@FEW
@given(plans=st.lists(st.tuples(FINITE, RETURNED), min_size=1, max_size=4), seed=strategies.SEEDS)
def test_random_batches(device: torch.device, plans: list[tuple[Plan, dict[str, Any]]], seed: int) -> None:
    requests = [request_of(plan, seed, returned) for plan, returned in plans]
    transfers = MetaTransfers(device, computes_first=True)
    with hollow(device), NothingWaits(device):
        batch = run_batch(requests, transfers, RAGGED_KERNELS)
    assert transfers.waits == 1
    for request, result in zip(requests, batch.results, strict=True):
        sizes = [len(part) for part in (result.output, result.lse, result.scores) if part is not None]
        assert sum(sizes) == request.extent.reply_bytes


def test_a_small_request_is_few_operations() -> None:
    """Each takes some microseconds to launch, which is all that a small request waits for: upload and kernel."""
    request = request_of(Plan(dtype="float16", batch=1, group=4, query_length=1, key_length=1), 0, {})
    with Operations() as operations:
        batch = run_batch([request], MetaTransfers(META, computes_first=True), RAGGED_KERNELS)
    assert list(batch.kernel_calls.values()) == [1]
    assert operations.count <= 3


def test_what_is_launched_is_waited_for_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    device = hollow_device(META, monkeypatch)
    device._transfers = transfers = MetaTransfers(META, computes_first=True)  # type: ignore[assignment]
    requests = [request_of(Plan(dtype="float16", batch=n), 0, {"return_lse": True}) for n in (1, 3)]
    finish = device.launch(requests)
    assert finish is not None
    assert transfers.waits == 0
    with ThreadPoolExecutor(1) as thread:
        batch = thread.submit(finish).result()
    assert transfers.waits == 1
    assert [len(found.output) + len(found.lse or b"") for found in batch.results] == [
        r.extent.reply_bytes for r in requests
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"mask_shape": (5, 7)},
        {"softcap": 1.0},
        {
            "rank": 3,
            "layout": "packed",
            "batch": 300,
            "query_length": 1,
            "key_length": 2,
            "query_lengths": (1,) * 300,
            "kv_lengths": (1, 2) * 150,
        },
    ],
    ids=["mask", "softcap", "many spans"],
)
def test_what_takes_many_operations_is_not_launched(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Others would wait for it, whatever its bytes."""
    device = hollow_device(META, monkeypatch)
    device._transfers = transfers = MetaTransfers(META, computes_first=True)  # type: ignore[assignment]
    few, many = (request_of(Plan(dtype="float16", **each), 0, {}) for each in ({}, options))
    assert device.launch([few, many]) is None
    assert not transfers.uploaded
    assert device.launch([few]) is not None


@EVERYWHERE
def test_the_calls_that_load_kernels(device: torch.device) -> None:
    with hollow(device):
        for call in warm_calls(device):
            result = attend(call)
            assert result.output.device == device
            assert result.output.shape == call.query.shape
        for kernel in RAGGED_KERNELS:
            for dtype in kernel.dtypes:
                for width in WIDTHS:
                    ragged = warm_ragged_call(device, dtype, width)
                    assert kernel.attend(ragged).output.shape == ragged.query.shape
        for dtype in varlen_cuda.DTYPES:
            scattered = warm_scattered_call(device, dtype, 64)
            result = varlen_cuda.attend_scattered(scattered)
            assert result.output.shape == scattered.query.shape
            assert result.lse is not None
            assert result.lse.shape == scattered.query.shape[:2]


class WarmTransfers(MetaTransfers):
    """Transfers of a device that warms up."""

    def warm_up(self) -> None:
        pass


def test_whole_batches_load_what_surrounds_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first request would: of each dtype, with few tokens and with many, for which the device does more."""
    device = hollow_device(META, monkeypatch)
    device._transfers = WarmTransfers(META, computes_first=True)  # type: ignore[assignment]
    for load in ("load_kernels", "load_scattered"):
        monkeypatch.setattr(cuda, load, lambda device: None)
    ran: list[tuple[int, bool]] = []
    run = device.run

    def told(requests: Sequence[Request]) -> BatchResult:
        batch, problem = run(requests), requests[0].problem
        assert list(batch.kernel_calls.values()) == [1]
        bytes_of_query = requests[0].problem.tensors["query"].size
        ran.append((problem.dtype, bytes_of_query > max(packed_calls.LOOKED_AT, packed_calls.REARRANGED)))
        return batch

    monkeypatch.setattr(device, "run", told)
    device.warm_up()
    dtypes = {dtype for each in RAGGED_KERNELS for dtype in each.dtypes}
    assert {(TORCH[dtype], many) for dtype, many in ran} == {
        (dtype, many) for dtype in dtypes for many in (False, True)
    }
    assert device._transfers.waits == len(ran)


def test_positions_come_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver there is none, but it must still be requested."""
    asked: list[bool] = []
    zeros = torch.zeros

    def told(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", told)
    with hollow(CUDA):
        positions = Packing([3, 2], ROWS).positions([4, 0], CUDA)
        assert positions.device == CUDA
        assert positions.shape == (16,)
    Packing([3, 2], ROWS).positions([4, 0], torch.device("cpu"))
    assert asked == [True, False]


def test_where_tokens_go_comes_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    empty_like = torch.empty_like

    def told(tensor: torch.Tensor, pin_memory: bool = False) -> torch.Tensor:
        asked.append(pin_memory)
        return empty_like(tensor)

    monkeypatch.setattr(torch, "empty_like", told)
    assert sent([[3, 1], [2, 7]], torch.device("cpu")).tolist() == [[3, 1], [2, 7]]
    assert not asked
    with hollow(CUDA):
        places = sent([[3, 1], [2, 7]], CUDA)
        assert places.device == CUDA
        assert places.shape == (2, 2)
    assert asked == [True]


def test_sums_of_products_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default torch is faster, and rounds the sums of parts of half-precision products before it adds them."""
    monkeypatch.setattr(cuda, "CudaTransfers", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    matmul = torch.backends.cuda.matmul
    names = "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"
    before = [getattr(matmul, name) for name in names]
    try:
        CudaDevice(0)
        assert not any(getattr(matmul, name) for name in (*names, "allow_fp16_accumulation"))
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, value)
