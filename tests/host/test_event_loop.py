"""How busy the event loop is: not while it waits, and all the time that it works. How it learns of gRPC's events."""

from __future__ import annotations

import asyncio
import ctypes
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import grpc
import pytest
import uvloop
from grpc import aio

from attnserve_server.host import event_loop
from attnserve_server.host.event_loop import EventLoop

TOLERANCE_S = 0.01
"""Waits may end this much early, because they are counted in milliseconds."""


@pytest.fixture(params=["libuv", "libuv without the function", "uvloop without its pointer", "libuv that refuses"])
def measured_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a loop is measured by, and what another version of uvloop might lack."""
    name: str = request.param
    if name == "libuv without the function":
        monkeypatch.setattr(ctypes, "PyDLL", lambda path: object())
    elif name == "uvloop without its pointer":
        monkeypatch.delattr(uvloop.loop, "libuv_get_loop_t_ptr")
    elif name == "libuv that refuses":
        refusing = SimpleNamespace(uv_metrics_idle_time=lambda loop: 0, uv_loop_configure=lambda loop, what: -1)
        monkeypatch.setattr(ctypes, "PyDLL", lambda path: refusing)
    return name


def test_waiting_is_not_working(measured_by: str) -> None:
    async def wait(seconds: float) -> tuple[float, float]:
        begin, busy = time.perf_counter(), loop.busy_seconds
        await asyncio.sleep(seconds)
        return time.perf_counter() - begin, loop.busy_seconds - busy

    loop = EventLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        waits = [runner.run(wait(0.05)) for _ in range(10)]
    # A late wake-up may make a wait longer than 0.05 s, never shorter; a late beginning keeps the loop from waiting,
    # but not each time.
    assert all(busy >= 0 for _, busy in waits)
    assert min(busy - elapsed for elapsed, busy in waits) <= TOLERANCE_S - 0.05


def test_working_is(measured_by: str) -> None:
    async def work(seconds: float) -> float:
        before = loop.busy_seconds
        for _ in range(10):
            if measured_by == "libuv":
                time.sleep(seconds / 10)  # noqa: ASYNC251
            else:
                until = time.thread_time() + seconds / 10
                while time.thread_time() < until:
                    pass
            await asyncio.sleep(0)
        return loop.busy_seconds - before

    loop = EventLoop()
    assert loop.busy_seconds < PATIENCE_S, "since it was made"
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(work(0.2)) >= 0.2 - TOLERANCE_S


def test_a_loop_whose_waits_are_not_measured_says_so_once(measured_by: str, caplog: pytest.LogCaptureFixture) -> None:
    """And runs: a server does not fail to start because of a metric."""
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, EventLoop)
        for _ in range(3):
            runner.run(asyncio.sleep(0))
            assert loop.busy_seconds > 0
    busy = loop.busy_seconds
    assert busy == loop.busy_seconds, "closed"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (measured_by != "libuv")
    assert all("its thread's processor time, for want of libuv's: " in warning for warning in warnings)


EVENTS = 2000
"""So many bytes do not fit into the socket by which gRPC tells of events."""
PATIENCE_S = 20.0


class Events:
    """Events as gRPC tells of them: a thread notes them and writes a byte for each, and the loop's callback reads one
    byte and handles all that have been noted. The loop is busy until the thread has done all that it can.
    """

    def __init__(self) -> None:
        self._reads, self._writes = socket.socketpair()
        self._reads.setblocking(False)
        self._writes.setblocking(False)
        self._noted = 0
        self._thread = threading.Thread(target=self._note, daemon=True)
        self._cannot_go_on = threading.Event()
        self.handled: list[int] = []
        """How many were handled in each turn of the loop."""

    async def all(self) -> None:
        """Waits until all are handled."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._reads, self._handle, done)
        self._thread.start()
        async with asyncio.timeout(PATIENCE_S):
            await done.wait()
        loop.remove_reader(self._reads)
        self._thread.join()
        self._reads.close()
        self._writes.close()

    def _note(self) -> None:
        for _ in range(EVENTS):
            self._noted += 1
            try:
                self._writes.send(b"1")
            except BlockingIOError:
                self._cannot_go_on.set()
                select.select([], [self._writes], [])
                self._writes.send(b"1")
        self._cannot_go_on.set()

    def _handle(self, done: asyncio.Event) -> None:
        assert self._cannot_go_on.wait(PATIENCE_S)
        if self._noted < EVENTS:
            self._cannot_go_on.clear()
        assert self._reads.recv(1)
        self.handled.append(self._noted - sum(self.handled))
        if sum(self.handled) == EVENTS:
            done.set()


def test_whoever_tells_of_events_does_not_wait_for_the_loop_to_turn_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """If that takes long: here, any time is long."""
    monkeypatch.setattr(event_loop, "SECONDS_OF_AN_EVENT", 1e-9)
    events = Events()
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(events.all())
    assert sum(events.handled) == EVENTS
    assert len(events.handled) < EVENTS / 50


def test_so_does_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told of events by a socket that it adds by the method of the loop that others use."""
    read: list[socket.socket] = []

    class Recorded(event_loop._Events):
        def __init__(self, bytes_of_events: socket.socket) -> None:
            super().__init__(bytes_of_events)
            read.append(bytes_of_events)

    async def serve() -> None:
        server = aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(aio.AioRpcError) as caught:
                await channel.unary_unary("/any/Method")(b"", timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await server.stop(None)

    monkeypatch.setattr(event_loop, "_Events", Recorded)
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(serve())
    assert len(read) == 1


def test_a_turn_reads_a_byte_for_each_event_that_it_had_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """So what quick turns leave stays where it is."""
    now, left = [0.0], []
    monkeypatch.setattr(event_loop, "perf_counter", lambda: now[0])
    reads, writes = socket.socketpair()
    with reads, writes, asyncio.Runner(loop_factory=EventLoop) as runner:
        reads.setblocking(False)
        writes.send(bytes(100))

        async def turn(turns: list[float]) -> None:
            done, loop = asyncio.Event(), asyncio.get_running_loop()

            def handle() -> None:
                assert reads.recv(1)
                left.append(len(reads.recv(100, socket.MSG_PEEK)))
                if turns:
                    now[0] += turns.pop(0)
                else:
                    done.set()

            loop.add_reader(reads, handle)
            now[0] += turns.pop(0)
            async with asyncio.timeout(PATIENCE_S):
                await done.wait()
            loop.remove_reader(reads)

        runner.run(turn([0.0105, 0.0001, 0.0001, 0.0025]))
    assert left == [89, 88, 87, 84]


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Meanwhile the process cannot open another file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_that_there_are_no_descriptors_left_is_said_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "DESCRIPTORS_EVERY_S", 0.01)
    said: list[str] = []

    async def run_out() -> None:
        thrice = asyncio.Event()

        def say(message: str, reason: str) -> None:
            said.append(message % reason)
            if len(said) == 3:
                thrice.set()

        monkeypatch.setattr(event_loop.logger, "error", say)
        await asyncio.sleep(0)  # it looks once as it begins, and finds some
        assert not said
        with no_descriptors_left():
            async with asyncio.timeout(PATIENCE_S):
                await thrice.wait()

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(run_out())
    assert said == 3 * ["no connection can be accepted: Too many open files"]


def test_a_loop_that_is_closed_is_busy_no_longer() -> None:
    loop = EventLoop()
    loop.close()
    assert loop.busy_seconds == loop.busy_seconds < PATIENCE_S
