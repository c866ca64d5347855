"""Two batches on one CUDA device: one is copied while the other computes, and neither gets the other's results."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import messages
import numpy as np
import oracle
import pytest
import torch
from cuda_device import device

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.devices.cuda import CudaDevice

__all__ = ["device"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
CYCLES = 1_000_000_000
"""Cycles for which a kernel just spins: about half a second."""


def test_what_is_staged_does_not_wait_for_what_computes(device: CudaDevice) -> None:
    transfers = device._transfers
    begin, computed, copied = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    host = device.allocate(1 << 24)
    device.upload(host)  # allocates memory now: allocating may wait until the device is idle
    torch.cuda.synchronize()
    transfers.compute_here()
    begin.record()
    torch.cuda._sleep(CYCLES)
    computed.record()
    device.upload(host)
    copied.record(transfers._upload_stream)
    copied.synchronize()
    assert not computed.query()
    computed.synchronize()
    assert begin.elapsed_time(copied) < begin.elapsed_time(computed) / 2


def test_a_batch_has_its_results_while_another_computes(device: CudaDevice) -> None:
    transfers = device._transfers
    own, other = (torch.full((9,), value, device=device.torch_device) for value in (1.0, 2.0))
    computed = torch.cuda.Event()
    transfers.compute_here()
    here = transfers.fetch(own)
    asked = transfers.asked()
    torch.cuda._sleep(CYCLES)
    transfers.fetch(other)
    computed.record()
    asked.until_computed()
    asked.until_fetched()
    assert not computed.query()
    assert here.tolist() == [1.0] * 9
    computed.synchronize()


def test_batches_of_two_threads_have_their_own_results(device: CudaDevice) -> None:
    def run(batch: list[pb.AttendRequest]) -> list[bytes]:
        found = device.run([messages.read(message) for message in batch])
        assert sum(found.kernel_calls.values()) > 0
        return [bytes(result.output) for result in found.results]

    batches = [[messages.random_attend(10 * n + seed, 64) for seed in range(8)] for n in range(20)]
    with ThreadPoolExecutor(device.depth) as threads:
        for batch, results in zip(batches, threads.map(run, batches), strict=True):
            for message, result in zip(batch, results, strict=True):
                arrays = [messages.array(getattr(message, name)) for name in ("query", "key", "value")]
                expected = oracle.attend(*arrays, causal=message.causal, softcap=message.softcap)
                found = np.frombuffer(result, arrays[0].dtype).reshape(arrays[0].shape)
                np.testing.assert_allclose(found, expected.output, rtol=0, atol=2e-6)
