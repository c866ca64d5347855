"""Servers whose log nobody reads: they answer, drain and end as if somebody did."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Self

import calls
import grpc
import messages
import numpy as np
import pytest
from conftest import POOL
from environment import ENVIRONMENT
from full_pipe import FullPipe

from attnserve_server.exit_statuses import DEVICE_FAILED

BAD = messages.random_attend(0, kv_lengths=np.array([99])).SerializeToString()
REFUSED = 20
ENDS_WITHIN_S = 20.0
"""Far less than the tests wait for what should not happen, and far more than a server needs to end."""


@pytest.fixture
def pipe() -> Iterator[FullPipe]:
    """A full pipe."""
    full = FullPipe()
    yield full
    full.close()


class Unread:
    """A server that serves, whose standard error is a full pipe."""

    def __init__(self, log: FullPipe, *flags: str, before: str = "") -> None:
        """`before` runs first in it."""
        addresses = ("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--device", "cpu", *POOL)
        code = f"{before}\nimport sys; from attnserve_server.__main__ import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, *addresses, *flags]
        self.process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=log.writer, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)["message"] if line.startswith("{") else line
            if said.startswith("ready: "):
                break
        addressed = dict(pair.split("=", 1) for pair in said.split()[1:])
        self.address, self.http_address = addressed["grpc"], addressed["http"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def refuse(channel: grpc.Channel) -> None:
    """Has calls refused, each with a line in the log."""
    for number in range(REFUSED):
        with pytest.raises(grpc.RpcError) as caught:
            calls.unary(channel, "Attend", BAD, metadata=(("x-request-id", f"mine-{number}"),))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_a_log_that_nobody_reads_stops_nothing(pipe: FullPipe) -> None:
    good = messages.random_attend(0)
    with Unread(pipe) as server:
        with grpc.insecure_channel(server.address) as channel:
            refuse(channel)
            reply = calls.unary(channel, "Attend", good.SerializeToString())
        assert reply
        assert calls.get(server.http_address, "/healthz") == (200, "serving\n")
        assert calls.metric(server.http_address, "attnserve_log_lines_dropped_total") == 0  # they wait
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(ENDS_WITHIN_S) == 0


def test_what_waited_is_written_once_somebody_reads(pipe: FullPipe) -> None:
    with Unread(pipe, "--log-format", "json") as server:
        with grpc.insecure_channel(server.address) as channel:
            refuse(channel)
        server.process.send_signal(signal.SIGTERM)
        lines = [json.loads(line) for line in pipe.rest().splitlines()]
        assert server.process.wait(ENDS_WITHIN_S) == 0
    refusals = [line["request_id"] for line in lines if "request_id" in line]
    assert refusals == [f"mine-{number}" for number in range(REFUSED)]
    assert [line["message"] for line in lines[-2:]] == ["draining", "ended"]


STUCK = """
import threading
from attnserve_server.observability.http import HttpServer
HttpServer._answer = lambda self, head: threading.Event().wait()
"""
"""An event loop that stops at the first HTTP request."""


def test_a_loop_that_is_stuck_ends_the_process_though_its_log_is_not_read(pipe: FullPipe) -> None:
    with Unread(pipe, "--stuck-after", "1s", before=STUCK) as server:
        with grpc.insecure_channel(server.address) as channel:
            refuse(channel)
        asking = threading.Thread(target=pytest.raises, args=(OSError, calls.get, server.http_address, "/healthz"))
        asking.start()
        assert server.process.wait(ENDS_WITHIN_S) == DEVICE_FAILED
        asking.join()


def test_it_ends_with_a_word_in_the_log_where_that_is_read(pipe: FullPipe) -> None:
    """In the last moments of a process whose loop is stuck, the thread that writes has its turn."""
    with Unread(pipe, "--stuck-after", "1s", before=STUCK) as server:
        said: list[str] = []
        reading = threading.Thread(target=lambda: said.append(pipe.rest()))
        reading.start()
        asking = threading.Thread(target=pytest.raises, args=(OSError, calls.get, server.http_address, "/healthz"))
        asking.start()
        assert server.process.wait(ENDS_WITHIN_S) == DEVICE_FAILED
        asking.join()
        reading.join()
    assert said[0].endswith("the event loop has been stuck for 1 s; ending, so that it is started again\n")


def test_before_it_serves_a_signal_ends_it_though_its_log_is_not_read(pipe: FullPipe) -> None:
    """It waits for a file that never ends, and has already something to say."""
    code = (
        "import os, signal\n"
        "from attnserve_server.layers.registry import Registry\n"
        "async def load(*_):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    import asyncio; await asyncio.Event().wait()\n"
        "Registry.load = load\n"
        "import sys; from attnserve_server.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    flags = ("--listen", "127.1:0", "--http-listen", "127.0.0.1:0", "--insecure", "--device", "cpu", *POOL)
    process = subprocess.Popen(
        [sys.executable, "-c", code, *flags, "--layers", "any"],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=pipe.writer,
    )
    try:
        assert process.wait(calls.PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
    assert pipe.rest() == ""


HOLDING = """
import logging, threading
from attnserve_server.observability import logs
from attnserve_server.scheduling import watchdog
logs.configure("info", "text")
logging.getLogger().handlers[0].acquire()
threading.Thread(target=watchdog.end, args=("all is lost",)).start()
threading.Event().wait()
"""
"""A process that ends while its main thread holds what a log line needs."""


def test_a_process_ends_though_it_cannot_log() -> None:
    done = subprocess.run([sys.executable, "-c", HOLDING], env=ENVIRONMENT, timeout=ENDS_WITHIN_S, check=False)
    assert done.returncode == DEVICE_FAILED
