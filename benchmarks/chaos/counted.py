"""The real server, which counts its tasks when it gets SIGUSR1: `python -m benchmarks.chaos.counted`.

In: the server's flags. Out: besides what the server writes, a line `tasks: N` on standard error for each signal. It
gives up sooner on connections that never came about, so that it is soon seen whether their descriptors are given back.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from typing import Final

from attnserve_server import command_line, logs, port
from attnserve_server.config import Config
from attnserve_server.devices import Device
from attnserve_server.server import configured_device
from attnserve_server.serving import run

SETTINGS_TIMEOUT_MS: Final = 10_000
"""How long a connection may take to say how it wants to speak HTTP/2. One that was reset right after it had begun to,
while the server was busy, is kept by gRPC for so long: by default for a minute.
"""

_usual_options: Final = port.channel_options


def channel_options(config: Config) -> Iterator[tuple[str, int]]:
    """The options of the server's channels, and this one."""
    yield from _usual_options(config)
    yield "grpc.http2.settings_timeout", SETTINGS_TIMEOUT_MS


def opened(config: Config) -> Device:
    """The configured device; it is opened on the loop that is to be watched."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)
    return configured_device(config)


def tell() -> None:
    """Writes the line."""
    print(f"tasks: {len(asyncio.all_tasks())}", file=sys.stderr, flush=True)


def main() -> None:
    """Runs the server."""
    port.channel_options = channel_options
    config = command_line.load(sys.argv[1:], os.environ)
    logs.configure(config.log_level, config.log_format)
    run(config, opened)


if __name__ == "__main__":
    main()
