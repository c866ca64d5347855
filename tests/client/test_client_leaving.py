"""Cancelled calls, clients that are closed or dropped: nobody waits for ever, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait
from typing import Any

import grpc
import multiplexed
import pytest
from askers import Attend, Transport, array, attend, transport
from calls import PATIENCE_S
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from peers import good, good_unary, peer

from attnserve import AsyncClient, Client, ClientClosedError, RequestCancelledError, UnavailableError
from attnserve._transports import tasks
from attnserve._transports.thread_future import CallFuture
from attnserve._transports.threads import StreamTransport
from attnserve.v1 import attention_pb2 as pb

__all__ = ["attend", "transport"]


def test_a_cancelled_future_has_the_peer_told() -> None:
    cancelled: list[int] = []
    told = threading.Event()
    arrived = threading.Event()

    def listening(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            request = pb.AttendStreamRequest.FromString(message)
            cancelled.extend(request.cancel)
            if request.calls:
                arrived.set()
            if request.cancel:
                told.set()
        yield from ()

    with peer(listening) as address, Client(address) as client:
        future = client.submit(array(1), array(1), array(1))
        assert arrived.wait(PATIENCE_S)
        assert future.cancel()
        assert future.cancel()
        assert told.wait(PATIENCE_S)
        assert wait([future], timeout=PATIENCE_S).done == {future}
        with pytest.raises(CancelledError):
            future.result()
    assert len(cancelled) == 1


async def test_a_cancelled_task_has_the_peer_told() -> None:
    told = threading.Event()
    arrived = threading.Event()

    def listening(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            request = pb.AttendStreamRequest.FromString(message)
            if request.calls:
                arrived.set()
            if request.cancel:
                told.set()
        yield from ()

    with peer(listening) as address:
        async with AsyncClient(address) as client:
            task = asyncio.create_task(client.attend(array(1), array(1), array(1)))
            assert await asyncio.to_thread(arrived.wait, PATIENCE_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(told.wait, PATIENCE_S)


def test_a_call_that_is_given_up_between_two_servers(silent: tuple[str, threading.Event]) -> None:
    """Neither has it at that moment; a caller that waits for several futures is notified all the same."""
    with Client(silent[0]) as client:
        stream = client._calls.servers.connection().stream()
        future: CallFuture[Any, Any] = CallFuture(lambda outcome: outcome)
        assert future.cancel()
        stream.adopt(multiplexed.call(future))
        assert len(stream) == 0
        assert not wait([future], PATIENCE_S).not_done


async def test_a_call_that_is_given_up_between_two_servers_in_tasks(silent: tuple[str, threading.Event]) -> None:
    async with AsyncClient(silent[0]) as client:
        stream = client._calls.servers.connection().stream()
        future: tasks.CallFuture[Any, Any] = tasks.CallFuture(lambda outcome: outcome)
        assert future.cancel()
        stream.adopt(multiplexed.call(future))
        assert len(stream) == 0


def test_unary_calls_cancelled_by_the_server(attend: Attend) -> None:
    def cancelling(message: bytes, context: grpc.ServicerContext) -> bytes:
        status = Status(code=1, message="cancelled")
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason="CANCELLED"))
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(grpc.StatusCode.CANCELLED, "cancelled")

    with peer(good, cancelling) as address:
        (result,) = attend(address, [array(1)], transport="unary")
    assert isinstance(result, RequestCancelledError)


@pytest.fixture
def silent() -> Iterator[tuple[str, threading.Event]]:
    """A peer that never answers; its address, and an event that is set when a call has arrived."""
    released, arrived = threading.Event(), threading.Event()

    def stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        next(messages)
        arrived.set()
        released.wait()
        yield from ()

    def unary(message: bytes, context: grpc.ServicerContext) -> bytes:
        arrived.set()
        released.wait()
        return b""

    with peer(stream, unary) as address:
        yield address, arrived
        released.set()


def test_closing_ends_every_wait(silent: tuple[str, threading.Event], transport: Transport) -> None:
    address, arrived = silent
    client = Client(address, transport=transport, timeout=None)
    future = client.submit(array(1), array(1), array(1))
    assert arrived.wait(PATIENCE_S)
    client.close()
    assert isinstance(future.exception(timeout=PATIENCE_S), ClientClosedError)
    with pytest.raises(ClientClosedError):
        client.attend(array(1), array(1), array(1))
    with pytest.raises(ClientClosedError):
        client.server_info()
    client.close()


async def test_closing_ends_every_await(silent: tuple[str, threading.Event], transport: Transport) -> None:
    address, arrived = silent
    client = AsyncClient(address, transport=transport, timeout=None)
    future = client.submit(array(1), array(1), array(1))
    assert await asyncio.to_thread(arrived.wait, PATIENCE_S)
    await client.close()
    with pytest.raises(ClientClosedError):
        await future
    with pytest.raises(ClientClosedError):
        await client.attend(array(1), array(1), array(1))
    await client.close()


def test_cancelling_a_unary_call(silent: tuple[str, threading.Event]) -> None:
    address, arrived = silent
    with Client(address, transport="unary", timeout=None) as client:
        future = client.submit(array(1), array(1), array(1))
        assert arrived.wait(PATIENCE_S)
        assert future.cancel()
        assert wait([future], timeout=PATIENCE_S).done == {future}


def test_a_forgotten_client_leaves_no_threads() -> None:
    def ours() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("attnserve")}

    before = ours()
    with peer(good) as address:
        client = Client(address)
        client.attend(array(1), array(1), array(1))
        started = ours() - before
        assert started
        del client
        for thread in started:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_a_future_keeps_its_client(transport: Any) -> None:
    collected = threading.Event()

    def slow(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        assert collected.wait(PATIENCE_S)
        yield from good(messages, context)

    def slow_unary(message: bytes, context: grpc.ServicerContext) -> bytes:
        assert collected.wait(PATIENCE_S)
        return good_unary(message, context)

    with peer(slow, slow_unary) as address:
        future = Client(address, transport=transport).submit(array(1), array(1), array(1))
        gc.collect()
        collected.set()
        assert future.result().output[0, 0] == 1


def test_a_future_lets_go_of_its_client_when_it_is_done(silent: tuple[str, threading.Event]) -> None:
    with Client(silent[0]) as client:
        future = client.submit(array(1), array(1), array(1))
        assert isinstance(future, CallFuture)
        assert future.cancel()
        assert future.calls is None


def test_a_reply_that_is_there_at_once_lets_go_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(transport: StreamTransport, future: CallFuture[Any, Any], call: object, **how: bool) -> None:
        future.settle(UnavailableError("at once"))

    monkeypatch.setattr(StreamTransport, "submit", submit)
    with Client() as client:
        future = client.submit(array(1), array(1), array(1))
        assert isinstance(future, CallFuture)
        assert future.calls is None


def test_cancelled_by_the_server(attend: Attend) -> None:
    def cancelling(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            for call in pb.AttendStreamRequest.FromString(message).calls:
                reply = pb.AttendStreamReply(id=call.id, error=Status(code=1, message="cancelled"))
                yield pb.AttendStreamResponse(replies=[reply]).SerializeToString()

    with peer(cancelling) as address:
        (result,) = attend(address, [array(1)])
    assert isinstance(result, RequestCancelledError)


def test_callbacks_that_fail_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    def fail(future: object) -> None:
        raise RuntimeError("a callback of the caller")

    with peer(good) as address, Client(address) as client:
        future = client.submit(array(1), array(1), array(1))
        future.add_done_callback(fail)
        assert future.result().output[0, 0] == 1
        assert client.attend(array(2), array(2), array(2)).output[0, 0] == 2
    (logged,) = [record.exc_info for record in caplog.records if record.exc_info]
    assert str(logged[1]) == "a callback of the caller"
