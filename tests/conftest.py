"""Fixtures: a real server in a process of its own, clients of it, and hypothesis profiles.

`HYPOTHESIS_PROFILE=thorough` tries many more examples, new ones every time; the default tries few, always the same.

Tests are in folders named after the rooms that they test. While they run, Python takes these folders for packages
unless there is another of that name. So two names differ slightly from their room's: `kernel`, because transformers
checks whether there is a package `kernels`, and `request`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from occupied import PATIENT

from attnserve import Client
from attnserve_server.host.event_loop import EventLoop

if TYPE_CHECKING:
    from attnserve_server.devices.cpu import CpuDevice
    from attnserve_server.native.library import Library

STARTUP_S = 90.0
"""How long a server may take from its start to its ready line: it imports torch, on busy machines."""
SHUTDOWN_S = 60.0
"""How long a server may take from SIGTERM to its end."""
POOL = ("--cache-bytes", "64MiB")
"""The cache pool of servers that are started for a test, unless it sets another. The default of 512 MiB takes half a
second to write to and to free.
"""

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
settings.register_profile("default", max_examples=100, derandomize=True, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("thorough", max_examples=3000, deadline=None, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Torch's threads wait for each other by spinning, for milliseconds. Where more want to run than there are processors,
# that takes the time of those that have work: of tests beside them, of servers, and of each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells ignore SIGINT for background jobs. Commands that tests interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage collection is off until all tests are collected: there is hardly any garbage, and looking for it takes a
    quarter of that time. What exists then is frozen, or each collection in a test would scan it, for half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Torch's own random numbers are the same for a test whichever ran before it in its process."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)


class Server:
    """A server that is ready, in a process of its own on free ports of this machine."""

    def __init__(
        self, flags: tuple[str, ...], errors: Path, program: tuple[str, ...] = ("-m", "attnserve_server")
    ) -> None:
        """Starts the server and waits until it says that it is ready. Its stderr goes to `errors`."""
        command = [sys.executable, *program, "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
        self._errors = errors
        self.said: list[str] = []
        """The lines of its standard output up to the ready line."""
        with errors.open("w") as stderr:
            self.process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=stderr, text=True)
        assert self.process.stdout is not None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=_read, args=(self.process.stdout, self._lines), daemon=True)
        self._reader.start()
        try:
            self.startup = self._until_ready()
        except BaseException:
            self.process.kill()
            self._reap()
            raise
        addresses = dict(pair.split("=", 1) for pair in self.startup["ready"].split())
        self.address = addresses["grpc"]
        self.http_address = addresses["http"]

    def _until_ready(self) -> dict[str, str]:
        """The facts that it writes to stdout, as `name: value` or as JSON, up to the ready line."""
        said: dict[str, str] = {}
        deadline = time.monotonic() + STARTUP_S
        while "ready" not in said:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"the server was not ready after {STARTUP_S:.0f} s; it said {said}\n{self.stderr()}")
            if line is None:
                pytest.fail(f"the server ended with {self.process.wait()} before it was ready\n{self.stderr()}")
            self.said.append(line)
            if line.startswith("{"):
                fact = json.loads(line)
                said[fact["fact"]] = fact["value"]
                continue
            name, _, value = line.rstrip("\n").partition(": ")
            said[name] = value
        return said

    def stderr(self) -> str:
        """What it has written to stderr so far."""
        return self._errors.read_text()

    def stop(self) -> int:
        """Stops it with SIGTERM if it still runs. Returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(SHUTDOWN_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self._reap()
                pytest.fail(f"the server still ran {SHUTDOWN_S:.0f} s after SIGTERM\n{self.stderr()}")
        return self._reap()

    def _reap(self) -> int:
        code = self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def _read(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


@contextmanager
def served(flags: Sequence[str], directory: Path) -> Iterator[Server]:
    """A server that must outlive the tests that it is for, and exit cleanly; its standard error goes to a directory."""
    server = Server(flags, directory / "stderr")
    yield server
    assert server.process.poll() is None, f"the server died\n{server.stderr()}"
    assert server.stop() == 0, server.stderr()


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The server's tests run on the server's own loop, those of its callers on asyncio's, as they mostly do."""
    of_callers = item.path.parent.name in ("client", "integrations", "bench", "chaos")
    return {"asyncio": asyncio.new_event_loop} if of_callers else {"server": EventLoop}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that tests share; it must outlive them all and exit cleanly."""
    with served(PATIENT, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers with a test's own flags. Those that still run when the test ends must exit cleanly."""
    started: list[Server] = []

    def start(*flags: str) -> Server:
        started.append(Server((*POOL, *flags), tmp_path / f"stderr-{len(started)}"))
        return started[-1]

    yield start
    running = [server for server in started if server.process.poll() is None]
    codes = {server: server.stop() for server in started}
    assert all(codes[server] == 0 for server in running), [server.stderr() for server in running]


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[Client]:
    """A client of the shared server."""
    with Client(server.address) as client:
        yield client


@dataclass(frozen=True)
class Models:
    """A model directory with `layers.toml`, and the module (in float64) of each of its layers."""

    directory: Path
    modules: dict[str, Any] = field(repr=False)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The checkpoints of `checkpoints`."""
    import checkpoints  # it imports torch and transformers, which most short runs need not wait for

    directory = tmp_path_factory.mktemp("models")
    return Models(directory, checkpoints.write(directory))


@pytest.fixture(scope="session")
def paged_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that tests of caches share. A page has 32 tokens of 2 heads, 8 wide, in float32."""
    flags = ("--device", "cpu", "--cache-bytes", "64MiB", "--cache-page-bytes", "4KiB")
    with served(flags, tmp_path_factory.mktemp("paged-server")) as server:
        yield server


@pytest.fixture(scope="session")
def layer_server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that tests of layers share: it has loaded those of `models`."""
    flags = ("--layers", str(models.directory / "layers.toml"), *PATIENT)
    with served(flags, tmp_path_factory.mktemp("layer-server")) as server:
        yield server


@pytest.fixture(scope="session")
def layer_client(layer_server: Server) -> Iterator[Client]:
    """A client of the server with layers."""
    with Client(layer_server.address) as client:
        yield client


@pytest.fixture(scope="module")
def devices() -> Iterator[dict[int, CpuDevice]]:
    """Devices of this process, of one thread and of two."""
    from attnserve_server.native.library import best  # only here: most tests do without

    yield from opened_devices(best("auto"))


@pytest.fixture(scope="module")
def tensor_devices() -> Iterator[dict[int, CpuDevice]]:
    """The same, as if there were no native library."""
    yield from opened_devices(None)


def opened_devices(native: Library | None) -> Iterator[dict[int, CpuDevice]]:
    """Devices, closed at the end, when torch's own thread counts are restored."""
    import torch

    from attnserve_server.devices.cpu import CpuDevice

    before = torch.get_num_threads()
    opened = {threads: CpuDevice(threads, 0, native) for threads in (1, 2)}
    yield opened
    for device in opened.values():
        device.close()
    torch.set_num_threads(before)
