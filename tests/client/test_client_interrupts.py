"""Ctrl-C, or any other signal whose handler raises, while a client begins or cancels calls: they are interrupted, and
the client works on.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import grpc._channel
import numpy as np
import pytest
from calls import PATIENCE_S
from conftest import Server

from attnserve import Client, DeadlineExceededError, _thread_calls
from attnserve import _interrupts as interrupts
from attnserve._interrupts import SIGNALS, DelayedInterrupt
from attnserve._transports.thread_future import CallFuture
from attnserve._transports.threads import StreamTransport

ARRAY = np.ones((1, 2, 3), np.float32)

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


WATCHDOG = """
import random, signal, sys
import numpy as np
from attnserve import Client, FailedPreconditionError

class WatchdogError(Exception):
    pass

def bark(*_):
    if at_work:
        raise WatchdogError

address, transport, patience = sys.argv[1], sys.argv[2], float(sys.argv[3])
ARRAY, TOKEN = np.ones((1, 2, 3), np.float32), np.ones((1, 1, 3), np.float32)
at_work = False
signal.signal(signal.SIGALRM, bark)
chance = random.Random(7)
with Client(address, transport=transport, timeout=patience) as client:
    for _ in range(600):
        cache = client.create_cache(1, 3)
        try:
            at_work = True
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-4, 3e-3))
            while True:
                cache.append(TOKEN, TOKEN)
        except WatchdogError:  # nothing else: it is what the handler has raised
            pass
        at_work = False
        cache.refresh()
        client.attend(ARRAY, ARRAY, ARRAY)
        cache.delete()
print("done")
"""


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_what_another_signals_handler_raises_arrives_and_the_client_works_on(server: Server, transport: str) -> None:
    command = [sys.executable, "-c", WATCHDOG, server.address, transport, str(PATIENCE_S / 6)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")


def test_grpcs_calls_are_let_go_where_no_handler_raises(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what is raised in a finalizer, and theirs is Python code: the caller would not hear of its alarm."""
    finalize, finalized = grpc._channel._Rendezvous.__del__, []

    def finalizing(rpc: Any) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        finalized.append("open" if in_main and interrupts._outermost is None else "delayed")
        finalize(rpc)

    monkeypatch.setattr(grpc._channel._Rendezvous, "__del__", finalizing)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that replies often arrive before the call that asks for them has returned
    try:
        with Client(server.address, transport="unary") as client:
            for _ in range(1000):
                client.server_info()
                client.submit(ARRAY, ARRAY, ARRAY).cancel()
        with Client(server.address) as client:
            client.attend(ARRAY, ARRAY, ARRAY)
    finally:
        sys.setswitchinterval(interval)
    assert len(finalized) >= 2000
    assert set(finalized) == {"delayed"}


class WatchdogError(Exception):
    """What a signal handler raises."""


def test_what_a_handler_raises_before_a_call_is_sent_is_no_error_of_the_call(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connection(*arguments: Any) -> Any:
        raise WatchdogError

    with Client(server.address) as client:
        monkeypatch.setattr(client._calls.servers, "connection", connection)
        with pytest.raises(WatchdogError):
            client.server_info()
        monkeypatch.undo()
        client.server_info()


@pytest.mark.parametrize("method", ["_open", "_begin_to_watch"])
def test_what_a_handler_raises_while_a_stream_or_a_thread_is_begun_is_no_reason_to_begin_another(
    server: Server, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """It is begun, and the call given up."""

    def bark(*arguments: Any) -> None:
        raise WatchdogError

    begun: list[Any] = []
    begin = getattr(StreamTransport, method)

    def begin_and_bark(*arguments: Any) -> Any:
        begun.append(begin(*arguments))
        signal.raise_signal(signal.SIGUSR1)
        return begun[-1]

    monkeypatch.setattr(StreamTransport, method, begin_and_bark)
    before = signal.signal(signal.SIGUSR1, bark)
    try:
        with Client(server.address) as client:
            with pytest.raises(WatchdogError):
                client.attend(ARRAY, ARRAY, ARRAY)
            client.attend(ARRAY, ARRAY, ARRAY)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(begun) == 1


def test_a_call_whose_end_nobody_notices_ends_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the thread that was to bring its outcome waited for ever."""
    monkeypatch.setattr(_thread_calls, "GRACE_SECONDS", 0.01)
    given_up = threading.Event()

    def withdraw(*, waits: bool) -> bool:
        given_up.set()
        return True

    future: CallFuture[bytes, bytes] = CallFuture(bytes)
    future.withdraw, future.timeout = withdraw, 0.01
    with pytest.raises(DeadlineExceededError, match=r"no reply within 0\.01 s, nor word from gRPC"):
        _thread_calls.wait(future)
    assert given_up.wait(PATIENCE_S)


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


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that handlers, which raise, have been called for: SIGINT's and two others'."""
    numbers: list[int] = []

    def handler(number: int, frame: Any) -> None:
        numbers.append(number)
        raise WatchdogError(number)

    before = {number: signal.signal(number, handler) for number in SEVERAL}
    yield numbers
    for number, its in before.items():
        assert signal.getsignal(number) is handler
        signal.signal(number, its)
    assert interrupts._outermost is None


SEVERAL = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


@pytest.mark.parametrize("order", list(itertools.permutations(SEVERAL)))
def test_of_several_signals_each_is_handled_once_in_the_order_of_arrival(
    heard: list[int], order: tuple[signal.Signals, ...]
) -> None:
    so_far: list[int] = []
    with pytest.raises(WatchdogError) as caught, DelayedInterrupt():  # noqa: PT012
        for number in (*order, *order):
            signal.raise_signal(number)
        so_far += heard
    assert so_far == []
    assert heard == list(order)
    raised: BaseException | None = caught.value
    for number in reversed(order):
        assert isinstance(raised, WatchdogError)
        assert raised.args == (number,)
        raised = raised.__context__


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_that_ends_something_comes_at_the_end(number: int) -> None:
    came: list[int] = []
    before = signal.signal(number, lambda number, frame: came.append(number))
    try:
        with DelayedInterrupt():
            signal.raise_signal(number)
            inside = list(came)
    finally:
        signal.signal(number, before)
    assert (inside, came) == ([], [number])


@pytest.mark.parametrize("last", SEVERAL)
@pytest.mark.parametrize("at_end", [False, True])
def test_a_handler_that_raises_between_two_others_leaves_them_in_place(
    heard: list[int], monkeypatch: pytest.MonkeyPatch, at_end: bool, last: signal.Signals
) -> None:
    """As handlers are replaced, one by one, or come back."""
    set_handler = _signal.signal
    calls = 0

    def set_and_raise(number: int, handler: Any) -> Any:
        nonlocal calls
        previous = set_handler(number, handler)
        calls += 1
        if calls == (5 if at_end else 2):
            signal.raise_signal(last)
        return previous

    monkeypatch.setattr(_signal, "signal", set_and_raise)
    with contextlib.suppress(WatchdogError), DelayedInterrupt():
        pass
    monkeypatch.undo()
    assert heard == [last]
    for number in SEVERAL:  # whatever stands in for a handler now calls it
        with pytest.raises(WatchdogError):
            signal.raise_signal(number)
        with pytest.raises(WatchdogError), DelayedInterrupt():
            signal.raise_signal(number)
    assert heard == [last, *(number for number in SEVERAL for _ in range(2))]
    for number in SEVERAL:
        signal.signal(number, _own(signal.getsignal(number)))


def _own(handler: Any) -> Any:
    """A handler itself, where something stands in for it."""
    while isinstance(delayed := getattr(handler, "__self__", None), DelayedInterrupt):
        handler = next(iter(delayed._handlers.values()))
    return handler


def test_a_new_process_delays_nothing_that_another_thread_did(heard: list[int]) -> None:
    with DelayedInterrupt():
        interrupts._forked()
        with pytest.raises(WatchdogError):
            signal.raise_signal(signal.SIGTERM)
    for number in SEVERAL:
        signal.signal(number, _own(signal.getsignal(number)))
    assert heard == [signal.SIGTERM]
