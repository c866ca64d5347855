"""The real server on a device that fails where a request asks for it: `python -m benchmarks.chaos.faulty`.

In: the server's flags, and requests whose first query element is one of `FAULTS`. The device is the CPU in all else.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from typing import Final, NoReturn

import torch

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.devices.failures import Blame
from attnserve_server.host.cpus import usable_cpus
from attnserve_server.kernels import AttentionCall, AttentionResult
from attnserve_server.observability import logs
from attnserve_server.serving import run
from attnserve_server.settings import command_line

FAULTS: Final[Mapping[str, float]] = {
    "kernel": 2.0**70,
    "memory": 2.0**71,
    "lost": 2.0**72,
    "stuck": 2.0**73,
    "dead": 2.0**74,
}
"""What a request asks for, by the first element of its query: a kernel that fails, a device without memory, a device
that is lost for good, a kernel that does not end, and a kernel that ends its thread.
"""


class ThreadDied(BaseException):
    """An exception that no code of the server catches."""


class FaultyDevice(CpuDevice):
    """A CPU that fails when a request asks for it."""

    def __init__(self, threads: int, inline_flops: int) -> None:
        super().__init__(threads, inline_flops, None)
        self._lost = False

    def attend_tensors(self, calls: list[AttentionCall], flops: int, again: bool = False) -> list[AttentionResult]:
        """Fails if one of the calls asks for it, or if the device is lost."""
        firsts = {first for call in calls if call.query.numel() for first in call.query[:, 0, 0, 0].tolist()}
        for name, value in FAULTS.items():
            if value in firsts:
                self._fail(name)
        if self._lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().attend_tensors(calls, flops, again)

    def _fail(self, name: str) -> NoReturn:
        if name == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if name == "stuck":
            threading.Event().wait()
        if name == "dead":
            raise ThreadDied
        self._lost = name == "lost"
        raise RuntimeError("an error of a kernel")

    def blame(self, error: Exception) -> Blame:
        """The device, once it is lost."""
        return "device" if self._lost else super().blame(error)


def main() -> None:
    """Runs the server."""
    config = command_line.load(sys.argv[1:], os.environ)
    logs.configure(config.log_level, config.log_format)
    run(config, lambda config: FaultyDevice(config.threads or usable_cpus(), config.inline_flops))


if __name__ == "__main__":
    main()
