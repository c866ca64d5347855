"""Two batches on one CUDA device: one is copied while the other computes, and neither gets the other's results."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import messages
import numpy as np
import oracle
import pytest
import torch
from cuda_device import device

from attnserve._requests.attend import encode_attend
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.devices.cuda import CudaDevice
from attnserve_server.requests.request import Request

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


def test_large_batches_of_two_threads_have_their_own_results(device: CudaDevice) -> None:
    """What is above a MiB is copied beside the kernels, both ways: each query finds the value of its own batch."""
    tokens, heads, width = 2048, 8, 64
    rows = (heads, tokens, width)

    def batch(number: int) -> Request:
        query = np.zeros(rows, np.float32)
        value = np.full(rows, number, np.float32) + np.arange(tokens, dtype=np.float32)[:, None] / tokens
        call = encode_attend(query, query, value, causal=False)
        return messages.read_request(b"".join(bytes(piece) for piece in call.pieces))

    requests = [batch(number) for number in range(12)]
    with ThreadPoolExecutor(device.depth) as threads:
        outcomes = list(threads.map(lambda request: device.run([request, request]).results, requests))
    for number, results in enumerate(outcomes):
        for result in results:
            output = np.frombuffer(result.output, np.float32)
            np.testing.assert_allclose(output, number + (tokens - 1) / tokens / 2, rtol=0, atol=1e-4)


def test_launching_does_not_wait_for_what_computes(device: CudaDevice) -> None:
    """Nor for memory: the batch before has shown how much it takes."""
    requests = [messages.read(messages.random_attend(seed, 64)) for seed in range(8)]
    finish = device.launch(requests)
    assert finish is not None
    finish()
    computed = torch.cuda.Event()
    torch.cuda._sleep(CYCLES)
    computed.record()
    finish = device.launch(requests)
    assert not computed.query(), "it was launched while the device computed"
    assert finish is not None
    assert len(finish().results) == len(requests)
    assert computed.query()


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
