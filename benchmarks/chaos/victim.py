"""A server to experiment on: a process of its own, which can be told to end, killed, and started again on its ports."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

PATIENCE_S: Final = 120.0
"""How long a server may take to start, and to end: machines are busy."""


class Victim:
    """A server on free ports of this machine, which it keeps when it is started again. Starts as a context manager."""

    def __init__(self, *flags: str, module: str = "attnserve_server") -> None:
        """`module` is run, with these flags, instead of the server's own."""
        self.address = self.http_address = "127.0.0.1:0"
        self._module = module
        self._flags = flags
        self._errors = tempfile.TemporaryFile("a+")  # noqa: SIM115 - closed in __exit__
        self._process: subprocess.Popen[str] | None = None
        self.ends: list[int] = []
        """The exit status of each process that has ended."""

    def start(self) -> None:
        """Starts it and waits until it is ready. RuntimeError if it does not become so."""
        self.launch()
        self.until_ready()

    def launch(self) -> None:
        """Starts it."""
        addresses = ("--listen", self.address, "--http-listen", self.http_address)
        command = [sys.executable, "-m", self._module, *addresses, *self._flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._errors, text=True)

    def until_ready(self) -> None:
        """Waits until it is ready. RuntimeError if it ends before, or takes too long."""
        process = self.process
        assert process.stdout is not None
        late = threading.Timer(PATIENCE_S, process.kill)
        late.start()
        try:
            for line in process.stdout:
                name, _, value = line.partition(": ")
                if name == "ready":
                    addresses = dict(word.split("=", 1) for word in value.split())
                    self.address, self.http_address = addresses["grpc"], addresses["http"]
                    return
        finally:
            late.cancel()
        raise RuntimeError(f"{self._module} did not start\n{self.stderr()}")

    @property
    def process(self) -> subprocess.Popen[str]:
        """The process, running or ended."""
        assert self._process is not None
        return self._process

    @property
    def runs(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def terminate(self) -> None:
        """Tells it to end (SIGTERM)."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once (SIGKILL), and waits for that."""
        self.process.kill()
        self.wait()

    def wait(self) -> int:
        """Its exit status, once it has ended. subprocess.TimeoutExpired if it does not."""
        process = self.process
        status = process.wait(PATIENCE_S)
        assert process.stdout is not None
        if not process.stdout.closed:
            process.stdout.close()
            self.ends.append(status)
        return status

    def stderr(self) -> str:
        """What all its processes have written to standard error."""
        self._errors.seek(0)
        return self._errors.read()

    def get(self, path: str) -> int | None:
        """The status of a page of its HTTP port; None if there is no answer."""
        try:
            with urllib.request.urlopen(f"http://{self.http_address}{path}", timeout=PATIENCE_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return None

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        return self._metrics()[name]

    def rejections(self) -> float:
        """How many attempts have been refused, for whatever reason."""
        found = self._metrics().items()
        return sum(value for name, value in found if name.startswith("attnserve_rejected_requests_total{"))

    def _metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://{self.http_address}/metrics", timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            if self.runs:
                self.terminate()
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        self._errors.close()


def start_all(victims: Sequence[Victim]) -> None:
    """Starts several at once, and waits until all are ready."""
    for victim in victims:
        victim.launch()
    for victim in victims:
        victim.until_ready()
