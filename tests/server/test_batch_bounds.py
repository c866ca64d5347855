"""How large batches are if nothing is configured: as suits the device."""

from __future__ import annotations

import pytest

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.server import Server
from attnserve_server.settings.config import Config


@pytest.mark.parametrize(
    ("threads", "configured", "flops", "discount"),
    [(1, 0, 4 * 10**9, 1), (0, 0, 4 * 10**9, 250), (0, 10**6, 10**6, 1)],
    ids=["a CPU", "a GPU", "a GPU, as configured"],
)
async def test_the_bounds_of_batches(
    monkeypatch: pytest.MonkeyPatch,
    tensor_devices: dict[int, CpuDevice],
    threads: int,
    configured: int,
    flops: int,
    discount: int,
) -> None:
    """A GPU, which has no threads, steps all callers of a decoder of 7 billion parameters together; and it takes no
    more bytes than it copies while it computes others.
    """
    device = tensor_devices[1]
    monkeypatch.setattr(device, "threads", threads)
    server = Server(Config(cache_bytes=1 << 20, max_batch_flops=configured), lambda config: device)
    queue = server.engine._queue
    assert queue._max_cost == flops
    assert queue._layer_discount == discount
    assert (queue._max_batch_bytes is None) == bool(threads)
    device.threads = 1
    await server.stop()
