"""Caches in memory that the host cannot read, like that of a CUDA device."""

from __future__ import annotations

import pytest
import torch
from cache_bench import PAGE_BYTES, PAGES, Bench
from meta_device import META, SEVEN, MetaTransfers, NothingWaits, meta_device

from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.work import CacheHost
from attnserve_server.devices.cuda import CudaDevice
from attnserve_server.kernels import efficient_cuda
from attnserve_server.requests.work import BatchResult

__all__ = ["meta_device"]


@pytest.mark.parametrize("appended", [0, 1, 3])
@pytest.mark.parametrize("lengths", [(0, 3), (8, 8), (16, 20)])
async def test_attention_to_caches(meta_device: CudaDevice, lengths: tuple[int, int], appended: int) -> None:
    bench = Bench()
    caches = [bench.create(length) for length in lengths]
    bench.host = CacheHost(bench.store, PagePool(PAGES * PAGE_BYTES, PAGE_BYTES, META, None), "")
    ran: list[BatchResult] = []
    bench.engine.worker._device = meta_device
    entry = bench.attend(*caches, appended=appended)
    run = type(entry.request).run_batch

    def run_batch(request, on, batch):  # type: ignore[no-untyped-def]
        with NothingWaits():
            ran.append(run(request, on, batch))
        return ran[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(entry.request), "run_batch", run_batch)
        await bench.outcome(entry)
    (batch,) = ran
    (result,) = batch.results
    assert len(result.output) == entry.request.extent.reply_bytes
    assert set(torch.frombuffer(result.output, dtype=torch.float32).tolist()) == {SEVEN}
    transfers = meta_device._transfers
    assert isinstance(transfers, MetaTransfers)
    looked = efficient_cuda.NAME in batch.kernel_calls
    assert transfers.waits == looked + 1, "once for whether inputs were finite, and once for the reply"
    if any(lengths) and min(lengths) + appended:
        assert set(batch.kernel_calls) == {efficient_cuda.NAME}
    assert not meta_device.take_kernel_calls()
