"""The service as a process of its own, on free ports of this machine, for as long as it is needed.

In: only an interpreter with `attnserve[server]`. Out: a `Service` that says where it listens; and the type of the flag
by which an example is told the address of a service that runs already.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
from types import TracebackType
from typing import Self

from attnserve import Client

STARTUP_S = 120.0
"""How long the service may take to start: most of it is the import of torch."""
SHUTDOWN_S = 30.0


def address(text: str) -> str:
    """The value of a flag, for argparse: an address that a client takes. Nothing is sent to it."""
    try:
        Client(text).close()
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("address: ")) from None
    return text


class ServiceError(Exception):
    """The service did not become ready, or did not exit with status 0."""


class Service:
    """`python -m attnserve_server` with these flags, started at once; `with` waits until it is ready, and stops it.

        with Service("--device", "cpu") as service:
            Client(service.address)

    Both raise ServiceError.
    """

    def __init__(self, *flags: str) -> None:
        listen = ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "attnserve_server", *listen, "--log-level", "warning", *flags],
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        # A process that hangs is killed, which ends its output and thus the loop.
        watchdog = threading.Timer(STARTUP_S, self._process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                name, _, value = line.strip().partition(": ")
                if name == "ready":
                    addresses = dict(pair.split("=", 1) for pair in value.split())
                    self.address, self.http_address = addresses["grpc"], addresses["http"]
                    return self
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            watchdog.cancel()
        raise ServiceError(f"the service ended before it was ready, with status {self._process.wait()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            self._process.send_signal(signal.SIGTERM)
            try:
                self.exit_status = self._process.wait(SHUTDOWN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self.exit_status = self._process.wait()
        if self.exit_status and error is None:
            raise ServiceError(f"the service ended with status {self.exit_status}")
