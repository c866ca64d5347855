"""A server that ends while layers are being loaded."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import slow_reading
from calls import until
from conftest import POOL, Server
from scores import PATIENCE_S, write

from attnserve import Client, UnavailableError
from attnserve_server.exit_statuses import CUT_OFF


def test_reading_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """Nothing can interrupt it, and nobody could use what it reads."""
    write(tmp_path)
    flags = ("--model-directory", str(tmp_path), "--drain-delay", "0")
    server = Server((*POOL, *flags), tmp_path / "stderr", program=(slow_reading.__file__,))
    try:
        with Client(server.address, retries=0) as client, ThreadPoolExecutor(1) as callers:
            cut_off = callers.submit(client.layers.load, "layers.toml", timeout=None)
            until(lambda: slow_reading.BEGUN in server.stderr(), "it reads")
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE_S) == CUT_OFF
            with pytest.raises(UnavailableError):
                cut_off.result()
        assert "layers that were still being read are given up" in server.stderr()
    finally:
        server.process.kill()
        server.stop()
