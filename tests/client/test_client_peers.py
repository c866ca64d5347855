"""Both clients, over both transports, against peers that misbehave: nobody hangs, nobody gets another's reply."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from typing import Any, Literal, TypeAlias

import grpc
import numpy as np
import pytest
from calls import PATIENCE_S
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from peers import good, good_unary, peer, replies

from attnserve import (
    AsyncClient,
    AttentionResult,
    Client,
    ClientClosedError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    ProtocolError,
    RequestCancelledError,
    ServerError,
    UnavailableError,
)
from attnserve._reply import Reply, decode_replies
from attnserve._threads import CallFuture, StreamTransport
from attnserve.v1 import attention_pb2 as pb

Attend: TypeAlias = Callable[..., list[AttentionResult[Any]]]
Transport: TypeAlias = Literal["stream", "unary"]


def array(number: float, *shape: int) -> np.ndarray[Any, Any]:
    return np.full(shape or (2, 3), number, np.float32)


def attend_in_threads(address: str, queries: list[Any], timeout: float | None = PATIENCE_S, **setup: Any) -> list[Any]:
    with Client(address, **setup) as client:
        futures = [client.submit(query, query, query, timeout=timeout) for query in queries]
        wait(futures)
        return [future.exception() or future.result() for future in futures]


def attend_in_tasks(address: str, queries: list[Any], timeout: float | None = PATIENCE_S, **setup: Any) -> list[Any]:
    async def run() -> list[Any]:
        async with AsyncClient(address, **setup) as client:
            calls = (client.attend(query, query, query, timeout=timeout) for query in queries)
            return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(run())


@pytest.fixture(params=[attend_in_threads, attend_in_tasks], ids=["Client", "AsyncClient"])
def attend(request: pytest.FixtureRequest) -> Attend:
    """Attends to some queries at once and returns results and errors."""
    function: Attend = request.param
    return function


@pytest.fixture(params=["stream", "unary"])
def transport(request: pytest.FixtureRequest) -> Transport:
    name: Transport = request.param
    return name


def test_a_good_peer(attend: Attend, transport: Transport) -> None:
    queries = [array(number) for number in range(50)]
    with peer(good, good_unary) as address:
        results = attend(address, queries, transport=transport)
    for query, result in zip(queries, results, strict=True):
        np.testing.assert_array_equal(result.output, query)
        assert result.timings.total > 0


def test_several_streams(attend: Attend) -> None:
    streams = set()

    def counting(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        streams.add(id(context))
        yield from good(messages, context)

    queries = [array(number) for number in range(30)]
    with peer(counting) as address:
        results = attend(address, queries, streams=3)
    assert all((result.output == query).all() for query, result in zip(queries, results, strict=True))
    assert len(streams) == 3


def test_a_silent_peer(attend: Attend, transport: Transport) -> None:
    released = threading.Event()

    def silent(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        released.wait()
        yield from ()

    def silent_unary(message: bytes, context: grpc.ServicerContext) -> bytes:
        released.wait()
        return b""

    with peer(silent, silent_unary) as address:
        begin = time.monotonic()
        results = attend(address, [array(1), array(2)], timeout=0.3, transport=transport)
        took = time.monotonic() - begin
        released.set()
    assert [type(result) for result in results] == [DeadlineExceededError] * 2
    assert 0.3 <= took < PATIENCE_S


def test_a_peer_that_accepts_and_says_nothing(attend: Attend, transport: Transport) -> None:
    """Not even HTTP/2: writes are never taken."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (result,) = attend(address, [array(1, 600, 600)], timeout=0.5, transport=transport)
    assert isinstance(result, DeadlineExceededError)


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(range(256))])
@pytest.mark.parametrize("then", ["close", "half close", "nothing"])
def test_a_peer_that_is_no_server(attend: Attend, transport: Transport, says: bytes, then: str) -> None:
    """It takes connections, says what is not HTTP/2, and closes both sides, its own, or none: an error, in time."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        left: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):  # the listener is closed
                while True:
                    connection, _ = listener.accept()
                    left.append(connection)
                    connection.sendall(says)
                    if then == "close":
                        connection.close()
                    elif then == "half close":
                        connection.shutdown(socket.SHUT_WR)

        thread.submit(serve)
        begin = time.monotonic()
        (result,) = attend(f"127.0.0.1:{listener.getsockname()[1]}", [array(1)], timeout=0.5, transport=transport)
        took = time.monotonic() - begin
        listener.shutdown(socket.SHUT_RDWR)
        for connection in left:
            connection.close()
    assert isinstance(result, UnavailableError | DeadlineExceededError)
    assert took < PATIENCE_S


def test_a_peer_that_does_not_read(attend: Attend) -> None:
    """Flow control holds the write back; the deadline holds all the same, and so does that of the calls behind it."""
    released = threading.Event()

    def deaf(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        released.wait()
        yield from ()

    with peer(deaf) as address:
        results = attend(address, [array(1, 1500, 1500)] * 4, timeout=0.5)
        released.set()
    assert [type(result) for result in results] == [DeadlineExceededError] * 4


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff\xff\xff\xff",
        b"\x0a\x7f",
        pb.AttendStreamResponse(replies=[pb.AttendStreamReply(id=1)]).SerializeToString(),
        pb.AttendStreamResponse(replies=[pb.AttendStreamReply(id=1, attend=pb.AttendResponse())]).SerializeToString(),
        pb.AttendStreamResponse(replies=[pb.AttendStreamReply(id=1, error=Status())]).SerializeToString(),
    ],
    ids=["no message", "cut off", "no result", "no output", "an error that is OK"],
)
def test_nonsense(attend: Attend, answer: bytes) -> None:
    def nonsense(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        next(messages)
        yield answer
        yield from good(messages, context)

    with peer(nonsense) as address:
        (result,) = attend(address, [array(1)])
    assert isinstance(result, ProtocolError)


def test_nonsense_in_a_unary_answer(attend: Attend) -> None:
    with peer(good, lambda message, context: b"\xff\xff") as address:
        (result,) = attend(address, [array(1)], transport="unary")
    assert isinstance(result, ProtocolError)


def twice_in_threads(address: str) -> tuple[BaseException | None, Any]:
    with Client(address, timeout=None) as client:
        first = client.submit(array(1), array(1), array(1)).exception()
        return first, client.attend(array(2), array(2), array(2))


def twice_in_tasks(address: str) -> tuple[BaseException | None, Any]:
    async def run() -> tuple[BaseException | None, Any]:
        async with AsyncClient(address, timeout=None) as client:
            (first,) = await asyncio.gather(client.attend(array(1), array(1), array(1)), return_exceptions=True)
            return first, await client.attend(array(2), array(2), array(2))  # type: ignore[return-value]

    return asyncio.run(run())


@pytest.mark.parametrize("module", ["_threads", "_tasks"])
def test_replies_that_cannot_be_read_for_a_reason_that_nobody_foresaw(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in flight fails at once, and the next call has another stream."""
    failing = iter([True])
    streams = []

    def decode(data: bytes) -> list[Reply]:
        if next(failing, False):
            raise MemoryError("not now")
        return decode_replies(data)

    def counting(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        streams.append(context)
        yield from good(messages, context)

    monkeypatch.setattr(f"attnserve.{module}.decode_replies", decode)
    with peer(counting) as address:
        error, result = {"_threads": twice_in_threads, "_tasks": twice_in_tasks}[module](address)
    assert isinstance(error, ProtocolError)
    assert "not now" in str(error)
    assert result.output[0, 0] == 2
    assert len(streams) == 2


@pytest.mark.parametrize("module", ["_threads", "_tasks"])
def test_an_end_that_cannot_be_read_for_a_reason_that_nobody_foresaw(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = {"_threads": attend_in_threads, "_tasks": attend_in_tasks}[module]

    def fail(error: grpc.RpcError) -> Status:
        raise MemoryError("not now")

    def refuse(message: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.INTERNAL, "no")

    monkeypatch.setattr(f"attnserve._unary{module}.status_from_rpc_error", fail)
    with peer(good, refuse) as address:
        (result,) = attend(address, [array(1)], timeout=None, transport="unary")
    assert isinstance(result, ProtocolError)


async def test_a_message_that_cannot_be_written_fails_its_calls() -> None:
    """In the task that writes: nobody else would hear of it."""
    with peer(good) as address:
        async with AsyncClient(address, timeout=None) as client:
            bad = client.submit(array(1), array(1), array(1))
            stream = client._servers.connection().stream()
            next_message = stream._multiplexer.next_message

            def fail(*arguments: Any) -> Any:
                stream._multiplexer.next_message = next_message  # type: ignore[method-assign]
                next_message(*arguments)
                raise MemoryError("not now")

            stream._multiplexer.next_message = fail  # type: ignore[method-assign]
            with pytest.raises(ProtocolError, match="not now"):
                await bad
            assert (await client.attend(array(2), array(2), array(2))).output[0, 0] == 2


def test_an_answer_of_another_dtype(attend: Attend) -> None:
    def other(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            for answer in replies(message):
                decoded = pb.AttendStreamResponse.FromString(answer)
                decoded.replies[0].attend.output.dtype = 6
                yield decoded.SerializeToString()

    with peer(other) as address:
        (result,) = attend(address, [array(1)])
    assert isinstance(result, ProtocolError)
    assert "int64" in str(result)


def test_replies_to_nobody_are_dropped(attend: Attend) -> None:
    def chatty(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            stray = pb.AttendStreamReply(id=2**63, error=Status(code=13, message="stray"))
            yield pb.AttendStreamResponse(replies=[stray]).SerializeToString()
            yield from replies(message)
            yield from replies(message)

    with peer(chatty) as address:
        results = attend(address, [array(1), array(2)])
    assert [result.output[0, 0] for result in results] == [1, 2]


def test_a_peer_that_ends_the_stream_in_good_order_after_every_message(attend: Attend) -> None:
    """The calls that it left unanswered are sent again."""
    lost = []

    def forgetful(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        message = next(messages)
        if len(lost) < 2:
            lost.append(message)
            return
        yield from replies(message)
        yield from good(messages, context)

    with peer(forgetful) as address:
        results = attend(address, [array(number) for number in range(20)])
    assert [result.output[0, 0] for result in results] == list(range(20))
    assert len(lost) == 2


@pytest.mark.parametrize(
    "code", [getattr(grpc.StatusCode, name) for name in ("UNAVAILABLE", "INTERNAL", "UNKNOWN", "CANCELLED")]
)
def test_a_stream_that_breaks_is_followed_by_another(attend: Attend, code: grpc.StatusCode) -> None:
    broken = []

    def breaking(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        message = next(messages)
        if not broken:
            broken.append(message)
            context.abort(code, "gone")
        yield from replies(message)
        yield from good(messages, context)

    with peer(breaking) as address:
        results = attend(address, [array(number) for number in range(20)])
    assert [result.output[0, 0] for result in results] == list(range(20))


def test_a_stream_that_always_breaks(attend: Attend) -> None:
    attempts = []

    def breaking(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        attempts.append(next(messages))
        context.abort(grpc.StatusCode.INTERNAL, "gone")
        yield b""

    with peer(breaking) as address:
        (result,) = attend(address, [array(1)], retries=2)
    assert isinstance(result, UnavailableError)
    assert result.code is grpc.StatusCode.INTERNAL
    assert "gone" in str(result)
    assert len(attempts) == 3


def test_a_reply_unavailable_is_tried_again_on_another_stream(attend: Attend) -> None:
    streams: list[object] = []

    def draining(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        streams.append(context)
        if len(streams) > 1:
            yield from good(messages, context)
            return
        for message in messages:
            for call in pb.AttendStreamRequest.FromString(message).calls:
                error = Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="draining")
                reply = pb.AttendStreamReply(id=call.id, error=error)
                yield pb.AttendStreamResponse(replies=[reply]).SerializeToString()

    with peer(draining) as address:
        results = attend(address, [array(1), array(2)])
    assert [result.output[0, 0] for result in results] == [1, 2]
    assert len(streams) == 2


def test_unary_calls_are_tried_again(attend: Attend) -> None:
    attempts = []

    def reluctant(message: bytes, context: grpc.ServicerContext) -> bytes:
        attempts.append(message)
        if len(attempts) <= 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        return good_unary(message, context)

    with peer(good, reluctant) as address:
        (result,) = attend(address, [array(1)], transport="unary")
        assert result.output[0, 0] == 1
        attempts.clear()
        (result,) = attend(address, [array(1)], transport="unary", retries=1)
    assert isinstance(result, UnavailableError)
    assert len(attempts) == 2


def overloaded(reason: str, delay_ms: int) -> Status:
    """What a server that is full replies."""
    error = Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="full")
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(delay_ms)
    error.details.add().Pack(retry)
    error.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason))
    return error


def refusing(error: Status, attempts: list[float], times: int = 1000) -> Any:
    """A peer that refuses so many calls, and answers all others."""

    def stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            attempts.append(time.monotonic())
            if len(attempts) > times:
                yield from replies(message)
                continue
            for call in pb.AttendStreamRequest.FromString(message).calls:
                reply = pb.AttendStreamReply(id=call.id, error=error)
                yield pb.AttendStreamResponse(replies=[reply]).SerializeToString()

    return stream


def test_a_full_server_is_asked_again_when_it_says(attend: Attend) -> None:
    attempts: list[float] = []
    with peer(refusing(overloaded("OVERLOADED", 60), attempts, times=2)) as address:
        (result,) = attend(address, [array(7)])
    assert result.output[0, 0] == 7
    assert len(attempts) == 3
    first, second = (after - before for before, after in itertools.pairwise(attempts))
    assert first >= 0.06, "no sooner than it was told"
    assert second >= 0.12, "and twice that, the second time"


@pytest.mark.parametrize(
    ("reason", "delay_ms", "count"), [("SHARE_EXCEEDED", 5, 3), ("CACHE_FULL", 5, 1), ("OVERLOADED", 60_000, 1)]
)
def test_a_server_that_stays_full(attend: Attend, reason: str, delay_ms: int, count: int) -> None:
    """It is asked as often as retries are allowed; not at all where waiting does not help, or takes too long."""
    attempts: list[float] = []
    with peer(refusing(overloaded(reason, delay_ms), attempts)) as address:
        (result,) = attend(address, [array(1)], retries=2)
    assert isinstance(result, OverloadedError)
    assert (result.retry_delay, result.reason) == (delay_ms / 1000, reason)
    assert len(attempts) == count


def test_a_bad_call_fails_alone(attend: Attend) -> None:
    def strict(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            calls = pb.AttendStreamRequest.FromString(message)
            for call in list(calls.calls):
                if len(call.attend.query.shape) != 2:
                    bad = error_details_pb2.BadRequest()
                    bad.field_violations.add(field="query")
                    error = Status(code=3, message="query: expected rank 2")
                    error.details.add().Pack(bad)
                    calls.calls.remove(call)
                    reply = pb.AttendStreamReply(id=call.id, error=error)
                    yield pb.AttendStreamResponse(replies=[reply]).SerializeToString()
            yield from replies(calls.SerializeToString())

    with peer(strict) as address:
        first, bad, last = attend(address, [array(1), array(2, 1, 1, 1), array(3)])
    assert (first.output[0, 0], last.output[0, 0]) == (1, 3)
    assert isinstance(bad, InvalidRequestError)
    assert bad.field == "query"


def test_a_message_that_is_too_long_fails_alone(attend: Attend) -> None:
    """The whole stream ends at a message that is over the server's limit. Where it ends while it is written to, gRPC's
    asyncio may call that an error of its own, for which there are retries.
    """

    def limited(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            if len(message) > 1 << 20:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max")
            yield from replies(message)

    with peer(limited) as address:
        first, long, last = attend(address, [array(1), array(2, 700, 700), array(3)], retries=8)
    assert (first.output[0, 0], last.output[0, 0]) == (1, 3)
    assert isinstance(long, InvalidRequestError)
    assert long.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_peer_without_the_service(attend: Attend, transport: Transport) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    (result,) = attend(f"127.0.0.1:{port}", [array(1)], transport=transport)
    server.stop(None).wait()
    assert isinstance(result, ServerError)
    assert result.code is grpc.StatusCode.UNIMPLEMENTED


def test_nobody_there(attend: Attend, transport: Transport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    begin = time.monotonic()
    (result,) = attend(address, [array(1)], transport=transport)
    assert isinstance(result, UnavailableError)
    assert time.monotonic() - begin < PATIENCE_S


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


def test_unary_calls_cancelled_by_the_server(attend: Attend) -> None:
    def cancelling(message: bytes, context: grpc.ServicerContext) -> bytes:
        status = Status(code=1, message="cancelled")
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason="CANCELLED"))
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(grpc.StatusCode.CANCELLED, "cancelled")

    with peer(good, cancelling) as address:
        (result,) = attend(address, [array(1)], transport="unary")
    assert isinstance(result, RequestCancelledError)


@pytest.mark.parametrize("code", [getattr(grpc.StatusCode, name) for name in ("CANCELLED", "INTERNAL", "UNKNOWN")])
def test_unary_calls_that_fail_with_the_connection_are_tried_again(attend: Attend, code: grpc.StatusCode) -> None:
    """What has reached a server that ends, or travelled on a connection that is garbled, ends with gRPC's own word."""
    attempts = []

    def ending(message: bytes, context: grpc.ServicerContext) -> bytes:
        attempts.append(message)
        if len(attempts) == 1:
            context.abort(code, "gRPC's word")
        return good_unary(message, context)

    with peer(good, ending) as address:
        (result,) = attend(address, [array(1)], transport="unary")
        assert result.output[0, 0] == 1
        attempts.clear()
        (result,) = attend(address, [array(1)], transport="unary", retries=0)
    assert isinstance(result, UnavailableError)


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


def test_a_future_keeps_its_client() -> None:
    with peer(good) as address:
        future = Client(address).submit(array(1), array(1), array(1))
        gc.collect()
        assert future.result().output[0, 0] == 1


def test_a_future_lets_go_of_its_client_when_it_is_done(silent: tuple[str, threading.Event]) -> None:
    with Client(silent[0]) as client:
        future = client.submit(array(1), array(1), array(1))
        assert isinstance(future, CallFuture)
        assert future.cancel()
        assert future.client is None


def test_a_reply_that_is_there_at_once_lets_go_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(transport: StreamTransport, future: CallFuture[Any, Any], call: object, **how: bool) -> None:
        future.settle(UnavailableError("at once"))

    monkeypatch.setattr(StreamTransport, "submit", submit)
    with Client() as client:
        future = client.submit(array(1), array(1), array(1))
        assert isinstance(future, CallFuture)
        assert future.client is None


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
