"""A server that cannot start because of its device."""

from __future__ import annotations

import pytest

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.errors import Starting
from attnserve_server.server import Server, configured_device
from attnserve_server.settings.config import Config
from attnserve_server.start_errors import StartError


def test_a_device_that_is_not_there_is_why_a_server_does_not_start() -> None:
    with pytest.raises(StartError, match=r"^device 'cuda:99' is not available: "):
        configured_device(Config(device="cuda:99"))


async def test_a_device_that_does_not_compute_keeps_a_server_from_serving(
    monkeypatch: pytest.MonkeyPatch, tensor_devices: dict[int, CpuDevice], caplog: pytest.LogCaptureFixture
) -> None:
    """The log says all about it."""

    def fail() -> None:
        raise RuntimeError("no kernel image is available")

    device = tensor_devices[1]
    monkeypatch.setattr(device, "warm_up", fail)
    config = Config(listen="127.0.0.1:0", http_listen="127.0.0.1:0", cache_bytes=1 << 20)
    server = Server(config, lambda config: device)
    with pytest.raises(StartError, match=f"^device {device.name} does not compute: RuntimeError$"):
        await server.start()
    assert (server.health.state, server.health.ready) == ("starting", False)
    with pytest.raises(Starting):
        server.engine.check_open()
    await server.stop()
    assert "no kernel image is available" in caplog.text
