"""A CUDA device by itself: arguments of its kernels, memory that stays in use, and failures."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import accuracy
import messages
import numpy as np
import pytest
import torch
from cases import Case, Plan
from cuda_device import device
from engines import OpenAdmission, batch_queue, engine_of

from attnserve._requests.attend import encode_attend
from attnserve_server.devices.cuda import CudaDevice
from attnserve_server.errors import OutOfMemory, RequestError
from attnserve_server.kernels import RAGGED_KERNELS
from attnserve_server.observability.metrics import Metrics
from attnserve_server.requests.request import Request
from attnserve_server.scheduling.batching import BatchQueue
from attnserve_server.scheduling.entry import Entry, Outcome

__all__ = ["device"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def request_of(case: Case, **returned: Any) -> Request:
    call = encode_attend(case.query, case.key, case.value, **case.arguments, **returned)
    return messages.read_request(b"".join(bytes(piece) for piece in call.pieces))


def arrays_of(case: Case, result: Any) -> Any:
    """Output and lse of a result, as arrays."""
    expected = case.expected
    return SimpleNamespace(
        output=np.frombuffer(result.output, case.query.dtype).reshape(expected.output.shape),
        lse=None if result.lse is None else np.frombuffer(result.lse, np.float32).reshape(expected.lse.shape),
        scores=None,
    )


def test_it_says_what_it_is(device: CudaDevice) -> None:
    assert device.name == "cuda:0"
    assert device.description
    assert set(device.memory()) == {"allocated", "reserved", "free"}
    assert [name for name, _ in device.kernels()][:1] == [RAGGED_KERNELS[0].name]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_the_axes_of_the_lse(device: CudaDevice, dtype: str, tokens: int) -> None:
    """With as many heads as tokens, the shape does not tell which axis is which."""
    for group in (1, 2):
        plan = Plan(dtype=dtype, batch=1, key_heads=tokens, group=group, causal=True)
        case = replace(plan, query_length=tokens * group, key_length=tokens * group).case(0)
        request = request_of(case, return_lse=True)
        batch = device.run([request])
        accuracy.check(case, arrays_of(case, batch.results[0]))
        assert "math" not in batch.kernel_calls


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_ragged_batches_are_one_call(device: CudaDevice, dtype: str) -> None:
    cases = [
        Plan(dtype=dtype, group=2, query_length=1 + n % 37, key_length=1 + n % 37 + n, causal="bottom_right").case(n)
        for n in range(300)
    ]
    batch = device.run([request_of(case, return_lse=True) for case in cases])
    assert list(batch.kernel_calls.values()) == [1]
    for case, result in zip(cases, batch.results, strict=True):
        accuracy.check(case, arrays_of(case, result))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("mask", [False, True])
def test_results_that_are_still_held_are_not_overwritten(device: CudaDevice, dtype: str, mask: bool) -> None:
    """Batches reuse the same pinned memory while replies of the first batch wait to be sent."""
    plan = Plan(dtype=dtype, query_length=200, key_length=200, head_dim=64, key_dim=64, value_dim=64)
    if mask:
        plan = Plan(dtype=dtype, query_length=200, key_length=200, mask_shape=(200, 200))
    cases = [plan.case(seed) for seed in range(4)]
    held = [[device.run([request_of(case)]).results[0] for case in cases] for _ in range(20)]
    for round_of_results in held:
        for case, result in zip(cases, round_of_results, strict=True):
            accuracy.check(case, arrays_of(case, result))


def test_nothing_stays_in_the_devices_memory(device: CudaDevice) -> None:
    plan = Plan(dtype="float16", query_length=500, key_length=500, head_dim=64, key_dim=64, value_dim=64)
    requests = [request_of(plan.case(seed)) for seed in range(4)]
    device.run(requests)
    before = device.memory()["allocated"]
    for _ in range(10):
        device.run(requests)
    assert device.memory()["allocated"] <= before


def test_nan_is_computed_again_and_only_where_it_is(device: CudaDevice) -> None:
    cases = [Plan(dtype="float16", causal=True, query_length=7).case(seed) for seed in range(8)]
    cases[3].value[0, 0, -1] = np.nan
    batch = device.run([request_of(case, return_lse=True) for case in cases])
    assert batch.kernel_calls["math"] == 1
    for case, result in zip(cases, batch.results, strict=True):
        accuracy.check(case, arrays_of(case, result))


@pytest.fixture
def _little_memory() -> Iterator[None]:
    """Limits torch's memory on the device to 1 GiB."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2**30 / total, 0)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


@pytest.mark.usefixtures("_little_memory")
async def test_a_request_that_runs_out_of_memory_fails_alone(device: CudaDevice) -> None:
    """Within one engine batch: only it gets an error, and the memory that it had allocated does not block others."""
    queue: BatchQueue[Entry] = batch_queue(10**15)
    metrics = Metrics("0", torch.__version__, device.name, "")
    engine = engine_of(device, queue, OpenAdmission(100, 10**12, 10**16), metrics)
    engine.open()
    replies: dict[Entry, Outcome | RequestError] = {}
    answered = asyncio.Event()

    def reply(entry: Entry, outcome: Outcome | RequestError) -> None:
        replies[entry] = outcome
        engine.release(entry)
        if len(replies) == 9:
            answered.set()

    plain = {"head_dim": 64, "key_dim": 64, "value_dim": 64, "softcap": 1.0}
    cases = [Plan(batch=1, key_heads=1, **plain).case(seed) for seed in range(8)]
    rows = 2**21
    wide = np.ones((1, 1, rows, 64), np.float32)
    huge = request_of(Case(wide, cases[0].key[:, :, :1], cases[0].value[:, :, :1], {"softcap": 1.0}))
    entries = []
    for request in (huge, *(request_of(case) for case in cases)):
        entries.append(Entry(request, reply, 0.0, float("inf"), 0.0, None, None))
        engine.submit(entries[-1])
    await asyncio.wait_for(answered.wait(), 60)
    engine.close()
    assert isinstance(replies[entries[0]], OutOfMemory)
    for case, entry in zip(cases, entries[1:], strict=True):
        outcome = replies[entry]
        assert isinstance(outcome, Outcome)
        accuracy.check(case, arrays_of(case, outcome.result))
