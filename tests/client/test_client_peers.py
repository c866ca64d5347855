"""Both clients, over both transports, against peers that misbehave: nobody hangs, nobody gets another's reply."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from askers import Attend, Transport, array, attend, attend_in_tasks, attend_in_threads, transport
from calls import PATIENCE_S
from google.rpc.status_pb2 import Status
from peers import good, good_unary, peer, replies, response

from attnserve import (
    AsyncClient,
    Client,
    DeadlineExceededError,
    PermissionDeniedError,
    ProtocolError,
    ServerError,
    UnavailableError,
)
from attnserve._fields import Buffer
from attnserve._memory import joined
from attnserve._requests.reply import Reply, decode_replies
from attnserve.v1 import attention_pb2 as pb

__all__ = ["attend", "transport"]


def test_a_good_peer(attend: Attend, transport: Transport) -> None:
    queries = [array(number) for number in range(50)]
    with peer(good, good_unary) as address:
        results = attend(address, queries, transport=transport)
    for query, result in zip(queries, results, strict=True):
        np.testing.assert_array_equal(result.output, query)
        assert result.timings.total > 0


def test_an_output_of_another_shape(attend: Attend, transport: Transport) -> None:
    """As of another call's query, with other rows; the width is that of the values."""

    def changed(answer: pb.AttendResponse) -> pb.AttendResponse:
        *rows, width = answer.output.shape
        answer.output.shape[:] = [math.prod(rows) * width, 1]
        return answer

    def stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in itertools.chain.from_iterable(map(replies, messages)):
            found = pb.AttendStreamResponse.FromString(message)
            changed(found.replies[0].attend)
            yield found.SerializeToString()

    def unary(message: bytes, context: grpc.ServicerContext) -> bytes:
        return changed(response(pb.AttendRequest.FromString(message))).SerializeToString()

    query = np.ones((2, 3, 4), np.float32)
    with peer(stream, unary) as address:
        (result,) = attend(address, [query], transport=transport)
    assert isinstance(result, ProtocolError)
    assert str(result) == "output: expected the shape [2, 3, ...], the server replied with [24, 1]"


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
    """Not even HTTP/2: writes are never accepted."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (result,) = attend(address, [array(1, 600, 600)], timeout=0.5, transport=transport)
        with Client(address) as client, pytest.raises(DeadlineExceededError) as not_described:
            client.server_info(timeout=0.5)
    for error in (result, not_described.value):
        assert isinstance(error, DeadlineExceededError)
        assert str(error) == f"no reply from {address} within 0.5 s"


@contextlib.contextmanager
def no_server(says: bytes, then: str) -> Iterator[str]:
    """Accepts connections, sends bytes on each, then closes both directions, its own, or none. Yields its address."""
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
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for connection in left:
                connection.close()


def test_peers_that_are_no_servers(attend: Attend, transport: Transport) -> None:
    """They do not send HTTP/2: an error, in time. All at once, because each takes as long as its caller waits."""
    said = (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(range(256)))
    kinds = list(itertools.product(said, ("close", "half close", "nothing")))
    with contextlib.ExitStack() as peers, ThreadPoolExecutor(len(kinds)) as callers:
        addresses = [peers.enter_context(no_server(*kind)) for kind in kinds]
        begin = time.monotonic()
        asking = [callers.submit(attend, at, [array(1)], timeout=0.5, transport=transport) for at in addresses]
        for kind, asked in zip(kinds, asking, strict=True):
            (result,) = asked.result()
            assert isinstance(result, UnavailableError | DeadlineExceededError), kind
        assert time.monotonic() - begin < PATIENCE_S


def test_a_peer_that_does_not_read(attend: Attend) -> None:
    """Flow control blocks the write; its deadline still holds, and so do those of the calls queued behind it."""
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


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_stream_with_nonsense_is_cancelled(kind: type[Client | AsyncClient]) -> None:
    """The peer might go on with it for ever."""
    cancelled = threading.Event()

    def nonsense(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.add_callback(cancelled.set)
        yield b"\xff\xff"
        cancelled.wait(PATIENCE_S)

    async def in_a_task(address: str) -> bool:
        async with AsyncClient(address) as client:
            with pytest.raises(ProtocolError):
                await client.attend(array(1), array(1), array(1))
            return await asyncio.to_thread(cancelled.wait, PATIENCE_S)

    with peer(nonsense) as address:
        if kind is AsyncClient:
            assert asyncio.run(in_a_task(address))
            return
        with Client(address) as client:
            with pytest.raises(ProtocolError):
                client.attend(array(1), array(1), array(1))
            assert cancelled.wait(PATIENCE_S)


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


@pytest.mark.parametrize("module", ["threads", "tasks"])
def test_replies_that_cannot_be_read_for_a_reason_that_nobody_foresaw(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls in flight fail at once, and the next call gets another stream."""
    failing = iter([True])
    streams = []

    def decode(data: bytes) -> list[Reply]:
        if next(failing, False):
            raise MemoryError("not now")
        return decode_replies(data)

    def counting(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        streams.append(context)
        yield from good(messages, context)

    monkeypatch.setattr(f"attnserve._transports.{module}.decode_replies", decode)
    with peer(counting) as address:
        error, result = {"threads": twice_in_threads, "tasks": twice_in_tasks}[module](address)
    assert isinstance(error, ProtocolError)
    assert "not now" in str(error)
    assert result.output[0, 0] == 2
    assert len(streams) == 2


@pytest.mark.parametrize("module", ["threads", "tasks"])
def test_messages_that_cannot_be_made_for_a_reason_that_nobody_foresaw(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is sent again or fails, and the next one gets another stream."""
    failing = iter([True])

    def join(pieces: Iterable[Buffer]) -> bytes:
        if next(failing, False):
            raise MemoryError("not now")
        return joined(pieces)

    monkeypatch.setattr(f"attnserve._transports.{module}.joined", join)
    with peer(good) as address:
        error, result = {"threads": twice_in_threads, "tasks": twice_in_tasks}[module](address)
    assert error is None if module == "threads" else isinstance(error, ProtocolError)
    assert result.output[0, 0] == 2


@pytest.mark.parametrize("module", ["threads", "tasks"])
def test_an_end_that_cannot_be_read_for_a_reason_that_nobody_foresaw(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = {"threads": attend_in_threads, "tasks": attend_in_tasks}[module]

    def fail(error: grpc.RpcError) -> Status:
        raise MemoryError("not now")

    def refuse(message: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.INTERNAL, "no")

    monkeypatch.setattr("attnserve._transports.unary.status_from_rpc_error", fail)
    with peer(good, refuse) as address:
        (result,) = attend(address, [array(1)], timeout=None, transport="unary")
    assert isinstance(result, ProtocolError)


async def test_a_message_that_cannot_be_written_fails_its_calls() -> None:
    """It fails in the writer task: nobody else would learn of it."""
    with peer(good) as address:
        async with AsyncClient(address, timeout=None) as client:
            bad = client.submit(array(1), array(1), array(1))
            stream = client._calls.servers.connection().stream()
            next_message = stream._multiplexer.next_message

            def fail(*arguments: Any) -> Any:
                stream._multiplexer.next_message = next_message  # type: ignore[method-assign]
                next_message(*arguments)
                raise MemoryError("not now")

            stream._multiplexer.next_message = fail  # type: ignore[method-assign]
            with pytest.raises(ProtocolError, match="not now"):
                await bad
            assert (await client.attend(array(2), array(2), array(2))).output[0, 0] == 2


async def test_a_stream_that_ends_while_a_large_message_is_written_says_why() -> None:
    """The status is the peer's, not that of the write that failed because of it."""
    numbers = itertools.count()

    def refuse(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        time.sleep(0.002 * (next(numbers) % 8))  # at various points within the message
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")
        yield b""

    large = np.zeros((8, 64, 64, 64), np.float32)
    with peer(refuse) as address:
        for _ in range(24):
            async with AsyncClient(address, retries=0) as client:
                with pytest.raises(PermissionDeniedError, match="not you"):
                    await client.attend(large, large, large)


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


def test_a_peer_without_the_service(attend: Attend, transport: Transport) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    (result,) = attend(f"127.0.0.1:{port}", [array(1)], transport=transport)
    server.stop(None).wait()
    assert isinstance(result, ServerError)
    assert result.code is grpc.StatusCode.UNIMPLEMENTED
