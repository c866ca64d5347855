"""The real server on a CPU whose written-out kernel is slow, however little there is to compute.

In: the server's flags. Each sequence takes `SECONDS` longer in that kernel; the other kernels keep their speed.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Final

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.host.cpus import usable_cpus
from attnserve_server.kernels import AttentionCall, AttentionResult
from attnserve_server.observability import logs
from attnserve_server.serving import run
from attnserve_server.settings import command_line

SECONDS: Final = 0.01


class SlowDevice(CpuDevice):
    """A CPU that sleeps before it computes calls with a softcap."""

    def attend_tensors(self, calls: list[AttentionCall], flops: int, again: bool = False) -> list[AttentionResult]:
        """Computes calls."""
        time.sleep(SECONDS * sum(call.query.shape[0] for call in calls if call.softcap > 0))
        return super().attend_tensors(calls, flops, again)


def main() -> None:
    """Runs the server."""
    config = command_line.load(sys.argv[1:], os.environ)
    logs.configure(config.log_level, config.log_format)
    run(config, lambda config: SlowDevice(config.threads or usable_cpus(), config.inline_flops, None))


if __name__ == "__main__":
    main()
