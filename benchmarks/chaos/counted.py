"""The real server, with two differences: it counts its tasks when it gets SIGUSR1, and gives up connections that are
half begun sooner. `python -m benchmarks.chaos.counted`.

In: the server's flags. Out: besides what the server writes, a line `tasks: N` on standard error for each signal.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from attnserve_server.devices import Device
from attnserve_server.observability import logs
from attnserve_server.rpc import port
from attnserve_server.server import configured_device
from attnserve_server.serving import run
from attnserve_server.settings import command_line
from attnserve_server.settings.config import Config


def opened(config: Config) -> Device:
    """The configured device; it is opened on the loop that is to be watched."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)
    return configured_device(config)


def tell() -> None:
    """Writes the line."""
    print(f"tasks: {len(asyncio.all_tasks())}", file=sys.stderr, flush=True)


def main() -> None:
    """Runs the server."""
    # If a caller leaves while it connects, its descriptor stays for so long: by default half a minute, which the soak
    # would have to wait for in the end.
    port.SETTINGS_TIMEOUT_MS = 5_000  # type: ignore[misc]
    config = command_line.load(sys.argv[1:], os.environ)
    logs.configure(config.log_level, config.log_format)
    run(config, opened)


if __name__ == "__main__":
    main()
