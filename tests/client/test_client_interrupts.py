"""Ctrl-C while a client begins or cancels calls: they are interrupted, and the client works on."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from calls import PATIENCE_S
from conftest import Server

from attnserve._transports.interrupts import DelayedInterrupt

PROGRAM = """
import os, random, signal, sys, threading, time
from queue import SimpleQueue
import numpy as np
from attnserve import Client, FailedPreconditionError

address, transport, patience = sys.argv[1], sys.argv[2], float(sys.argv[3])
ARRAY, TOKEN = np.ones((1, 2, 3), np.float32), np.ones((1, 1, 3), np.float32)
after, done = SimpleQueue(), SimpleQueue()
at_work = False

def interrupt(*_):
    if at_work:
        raise KeyboardInterrupt

def press():
    while True:
        due = time.perf_counter() + after.get()
        while time.perf_counter() < due:
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        done.put(None)

signal.signal(signal.SIGINT, interrupt)
threading.Thread(target=press, daemon=True).start()
chance = random.Random(7)
interrupted = 0
with Client(address, transport=transport, timeout=patience) as client, client.create_cache(1, 3) as cache:
    work = [
        lambda: client.attend(ARRAY, ARRAY, ARRAY),
        lambda: client.submit(ARRAY, ARRAY, ARRAY).cancel(),
        lambda: cache.append(TOKEN, TOKEN),
        lambda: client.server_info(),
    ]
    for _ in range(400):
        after.put(chance.uniform(0, 1e-3))
        try:
            at_work = True
            chance.choice(work)()
        except (KeyboardInterrupt, FailedPreconditionError) as error:  # the latter: an append that was interrupted
            interrupted += isinstance(error, KeyboardInterrupt)
        at_work = False
        done.get()
    cache.refresh()
    cache.append(TOKEN, TOKEN)
    client.attend(ARRAY, ARRAY, ARRAY)
print("done" if interrupted else "never interrupted")
"""


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_a_client_that_is_interrupted_works_on(server: Server, transport: str) -> None:
    command = [sys.executable, "-c", PROGRAM, server.address, transport, str(PATIENCE_S / 3)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")


@pytest.fixture
def handled() -> Iterator[list[Any]]:
    """What a handler of SIGINT was called with."""
    calls: list[Any] = []

    def handler(*arguments: Any) -> None:
        calls.append(arguments)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    yield calls
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_comes_at_the_end(handled: list[Any]) -> None:
    """At the end of the outermost, if there is one within another."""
    so_far: list[int] = []
    with pytest.raises(KeyboardInterrupt), DelayedInterrupt():  # noqa: PT012
        with DelayedInterrupt():
            signal.raise_signal(signal.SIGINT)
            so_far.append(len(handled))
        so_far.append(len(handled))
    assert so_far == [0, 0]
    ((number, frame),) = handled
    assert number == signal.SIGINT
    assert frame is not None


def test_an_error_inside_is_not_lost(handled: list[Any]) -> None:
    with pytest.raises(KeyboardInterrupt) as caught, DelayedInterrupt():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        raise ValueError("inside")
    assert isinstance(caught.value.__context__, ValueError)


def test_without_an_interrupt_nothing_is_called(handled: list[Any]) -> None:
    with DelayedInterrupt():
        assert signal.getsignal(signal.SIGINT) is not None
    assert handled == []


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_where_python_has_no_handler_nothing_changes(handler: Any) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with DelayedInterrupt():
            assert signal.getsignal(signal.SIGINT) is handler
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("embedded", [False, True])
def test_other_threads_are_never_interrupted(monkeypatch: pytest.MonkeyPatch, embedded: bool) -> None:
    """In an embedded Python, `threading` takes the first thread that imports it for the main one; `signal` knows."""
    handler = signal.getsignal(signal.SIGINT)
    found: list[Any] = []

    def look() -> None:
        with DelayedInterrupt():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    if embedded:
        monkeypatch.setattr(threading, "main_thread", lambda: thread)
    thread.start()
    thread.join(PATIENCE_S)
    assert found == [handler]
