"""Which thread does what: gRPC's settles futures, but runs no callbacks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
from askers import array
from calls import PATIENCE_S
from peers import SERVICE, good, good_unary, peer, replies

from attnserve import Client, ClientClosedError
from attnserve._transports.thread_future import CallFuture, bring_replies, logger

STREAM, UNARY = "stream", "unary"

OWN = {STREAM: "attnserve-replies", UNARY: "attnserve-callbacks"}
"""The thread that runs callbacks, which is not gRPC's."""


@pytest.fixture
def future() -> CallFuture[int, int]:
    return CallFuture(lambda outcome: outcome + 1)


def test_a_future_that_calls_nobody_back_is_settled_silently(future: CallFuture[int, int]) -> None:
    assert future.settle_silently(1)
    assert future.result(0) == 2
    called: list[Any] = []
    future.add_done_callback(called.append)
    assert called == [future]


def test_a_future_that_calls_back_is_not(future: CallFuture[int, int]) -> None:
    called: list[Any] = []
    future.add_done_callback(called.append)
    assert not future.settle_silently(1)
    assert not called
    assert not future.done()
    future.settle(1)
    assert called == [future]


def test_a_future_that_is_settled_may_be_asked_to_call_back_meanwhile() -> None:
    """The garbage collector, or freeing what the call held, may run any code at that moment."""
    called: list[Any] = []

    def finish(outcome: int) -> int:
        future.add_done_callback(called.append)
        return outcome + 1

    future: CallFuture[int, int] = CallFuture(finish)
    thread = threading.Thread(target=future.settle_silently, args=(1,), daemon=True)
    thread.start()
    assert future.result(PATIENCE_S) == 2
    thread.join(PATIENCE_S)
    assert called == [future]


class Patient:
    """A peer that answers nothing until it is told to."""

    def __init__(self) -> None:
        self.told = threading.Event()
        self.asked = threading.Event()
        """Set once an RPC that is never answered has arrived."""

    def stream(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            assert self.told.wait(PATIENCE_S)
            yield from replies(message)

    def unary(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        assert self.told.wait(PATIENCE_S)
        return good_unary(message, context)

    def never(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        """A unary RPC that is answered only once its caller has left."""
        left = threading.Event()
        assert context.add_callback(left.set)
        self.asked.set()
        assert left.wait(PATIENCE_S)
        return b""


@pytest.mark.parametrize("transport", [STREAM, UNARY])
def test_a_client_may_be_closed_by_what_a_future_calls_back(transport: Any) -> None:
    """Closing waits for gRPC's thread while calls are in flight, and so must not happen in that thread."""
    closed, failures = SimpleQueue[str](), SimpleQueue[Exception]()
    patient = Patient()
    with peer(patient.stream, patient.unary, {SERVICE: {"ServerInfo": patient.never}}) as address:
        client = Client(address, transport=transport)

        def be_in_flight() -> None:
            try:
                client.server_info(timeout=None)
            except Exception as error:
                failures.put(error)

        def close(_: Future[Any]) -> None:
            client.close()
            closed.put(threading.current_thread().name)

        threading.Thread(target=be_in_flight, daemon=True).start()
        assert patient.asked.wait(PATIENCE_S)
        future = client.submit(array(2), array(2), array(2))
        future.add_done_callback(close)
        patient.told.set()
        assert closed.get(timeout=PATIENCE_S) == OWN[transport]
        assert future.result(0).output[0, 0] == 2
        assert isinstance(failures.get(timeout=PATIENCE_S), ClientClosedError)


def test_what_a_unary_call_calls_back_may_wait_for_another_call() -> None:
    patient, answers = Patient(), SimpleQueue[Any]()
    with peer(good, patient.unary) as address, Client(address, transport="unary", timeout=None) as client:
        futures = [client.submit(*[array(number)] * 3) for number in (2, 3)]
        for future in futures:
            future.add_done_callback(lambda _: answers.put(client.attend(*[array(5)] * 3).output[0, 0]))
        patient.told.set()
        assert [answers.get(timeout=PATIENCE_S) for _ in futures] == [5, 5]
        assert [future.result(0).output[0, 0] for future in futures] == [2, 3]


def test_what_a_call_on_a_stream_calls_back_cannot_wait_for_another_call() -> None:
    """It would hold up the reply that it waits for. That of another client, or from another server, it does not."""
    patient, answers = Patient(), SimpleQueue[Any]()
    with peer(patient.stream) as address, Client(address, timeout=None) as client, Client(address) as other:

        def wait(future: Future[Any]) -> None:
            answers.put(other.attend(*[array(4)] * 3).output[0, 0])
            answers.put(future.result().output[0, 0])
            answers.put(future.exception())
            for ask in ("result", "exception"):
                try:
                    getattr(client.submit(*[array(5)] * 3), ask)()
                except Exception as error:
                    answers.put(error)

        client.submit(*[array(3)] * 3).add_done_callback(wait)
        patient.told.set()
        assert [answers.get(timeout=PATIENCE_S) for _ in range(3)] == [4, 3, None]
        for _ in range(2):
            error = answers.get(timeout=PATIENCE_S)
            assert isinstance(error, RuntimeError)
            assert "wait in another thread" in str(error)
        assert client.attend(*[array(6)] * 3).output[0, 0] == 6, "its replies still come"


def test_what_comes_on_another_thread_may_be_waited_for(future: CallFuture[int, int]) -> None:
    """Such as a reply of another server."""
    transport, another = object(), object()
    future.transport = transport
    waited = SimpleQueue[Any]()

    def wait(brings: object) -> None:
        bring_replies(brings)
        try:
            waited.put(future.result(PATIENCE_S))
        except RuntimeError as error:
            waited.put(error)

    threading.Thread(target=wait, args=(transport,)).start()
    assert isinstance(waited.get(timeout=PATIENCE_S), RuntimeError)
    threading.Thread(target=wait, args=(another,)).start()
    future.settle(1)
    assert waited.get(timeout=PATIENCE_S) == 2
    threading.Thread(target=wait, args=(transport,)).start()
    assert waited.get(timeout=PATIENCE_S) == 2, "it is there"


def test_what_a_unary_call_calls_back_where_no_thread_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    start, patient, called = threading.Thread.start, Patient(), SimpleQueue[str]()

    def scarce(thread: threading.Thread) -> None:
        if thread.name == OWN[UNARY]:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with peer(good, patient.unary) as address, Client(address, transport="unary", timeout=None) as client:
        futures = [client.submit(*[array(number)] * 3) for number in (2, 3)]
        for future in futures:
            future.add_done_callback(lambda _: called.put(threading.current_thread().name))
        patient.told.set()
        assert OWN[UNARY] not in [called.get(timeout=PATIENCE_S) for _ in futures]


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit])
@pytest.mark.parametrize("transport", [STREAM, UNARY])
def test_what_is_called_back_ends_no_thread(
    monkeypatch: pytest.MonkeyPatch, transport: Any, error: type[BaseException]
) -> None:
    """A callback that raises what is no Exception does not end the thread that others depend on, and is logged."""
    logged: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(logger, "exception", logged.put)

    def fail(future: object) -> None:
        raise error

    patient = Patient()
    with (
        peer(patient.stream, patient.unary) as address,
        Client(address, transport=transport, timeout=None) as client,
    ):
        for number in (2, 3):
            patient.told.clear()
            future = client.submit(*[array(number)] * 3)
            future.add_done_callback(fail)
            patient.told.set()
            assert future.result(PATIENCE_S).output[0, 0] == number
            assert logged.get(timeout=PATIENCE_S) == "a callback of a call wanted to end its thread"


def test_threads_that_share_a_client_get_their_own_results() -> None:
    with peer(good) as address, Client(address) as client:
        outputs: dict[int, set[float]] = {number: set() for number in range(1, 9)}

        def ask(number: int) -> None:
            for _ in range(50):
                outputs[number].add(float(np.max(client.attend(*[array(number)] * 3).output)))

        threads = [threading.Thread(target=ask, args=(number,)) for number in outputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert outputs == {number: {float(number)} for number in outputs}
