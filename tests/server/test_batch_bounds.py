"""How large batches are if nothing is configured: as suits the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.server import Server
from attnserve_server.settings.config import Config


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    """A CPU."""
    threads = torch.get_num_threads()
    device = CpuDevice(1, 0)
    yield device
    device.close()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("threads", "configured", "flops", "copies_aside"),
    [(1, 0, 4 * 10**9, False), (0, 0, 10**12, True), (0, 10**6, 10**6, True)],
    ids=["a CPU", "a GPU", "a GPU, as configured"],
)
async def test_the_bounds_of_batches(
    device: CpuDevice, threads: int, configured: int, flops: int, copies_aside: bool
) -> None:
    """A GPU, which has no threads, takes more work at a time, but not more bytes than it copies meanwhile."""
    device.threads = threads
    server = Server(Config(cache_bytes=1 << 20, max_batch_flops=configured), lambda config: device)
    queue = server.engine._queue
    assert queue._max_cost == flops
    assert (queue._max_batch_bytes is not None) == copies_aside
    device.threads = 1
    await server.stop()
