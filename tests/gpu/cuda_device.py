"""The CUDA device shared by the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attnserve_server.devices import open_device
from attnserve_server.devices.cuda import CudaDevice


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    """The first CUDA device, warmed up."""
    device = open_device("cuda", 0, 0, "auto")
    assert isinstance(device, CudaDevice)
    device.warm_up()
    yield device
    device.close()
