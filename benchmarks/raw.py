"""Load generators for encoded messages: gRPC streams and unary calls, and HTTP. All have the same design.

Requests are encoded beforehand, and sent when the arrivals say. Only what tells which request a reply answers is
decoded. Each reply, or refusal in its place, is reported to the meter. They return when the meter says stop, and raise
any other error. Requests in flight are then awaited, so that the next measurement finds the server idle, and because
Triton sometimes crashes when streams are cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeAlias

from grpc import aio

from attnserve._fields import Buffer
from benchmarks.arrivals import Arrivals, Due
from benchmarks.meters import Meter, Refused, Reply

CHANNEL_OPTIONS: Final = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))

Frame: TypeAlias = Callable[[int, int], Sequence[Buffer]]
"""From a call's id and its request's number, the pieces of the call in a stream's message."""
Unframe: TypeAlias = Callable[[bytes], Iterable[tuple[int, memoryview | Refused]]]
"""From a stream's message, the ids and the encoded replies, or the refusals in place of them."""


async def stream(
    address: str, path: str, frame: Frame, unframe: Unframe, joined_bytes: int, arrivals: Arrivals, meter: Meter
) -> None:
    """One stream. Calls that are ready together are joined up to `joined_bytes`; 0 for one call per message."""
    async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        rpc: aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(path)()
        sent: dict[int, tuple[int, float]] = {}
        last_id = 0
        due: deque[tuple[int, float]] = deque()
        ready = asyncio.Event()

        def send(number: int, at: float) -> None:
            due.append((number, at))
            ready.set()

        async def write() -> None:
            nonlocal last_id
            while going or due:
                await ready.wait()
                ready.clear()
                while due:
                    pieces: list[Buffer] = []
                    size = 0
                    while due:
                        framed = frame(last_id + 1, due[0][0])
                        size += sum(map(len, framed))
                        if pieces and size > joined_bytes:
                            break
                        last_id += 1
                        sent[last_id] = due.popleft()
                        pieces += framed
                    await rpc.write(b"".join(pieces))
            await rpc.done_writing()

        going = True
        writer = asyncio.create_task(write())
        arrivals.begin(send)
        try:
            while isinstance(message := await rpc.read(), bytes):
                for call_id, reply in unframe(message):
                    if not meter.replied(*sent.pop(call_id), reply) and going:
                        going = False
                        arrivals.end()
                        due.clear()
                        ready.set()
                    if going and (following := arrivals.answered()) is not None:
                        send(*following)
            if going:
                raise RuntimeError(f"the stream ended: {await rpc.code()} {await rpc.details()}")
            await writer
        finally:
            arrivals.end()
            writer.cancel()
            rpc.cancel()


async def unary(address: str, path: str, requests: Sequence[bytes], arrivals: Arrivals, meter: Meter) -> None:
    """Unary calls on one channel."""
    async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        rpc: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)

        async def ask(number: int) -> bytes | Refused:
            try:
                return await rpc(requests[number])
            except aio.AioRpcError as error:
                return Refused(f"{error.code().name}: {error.details()}")

        await calls(ask, arrivals, meter)


async def http(address: str, requests: Sequence[bytes], arrivals: Arrivals, meter: Meter) -> None:
    """HTTP requests, one at a time per connection; connections are reused, and opened as needed."""
    host, _, port = address.rpartition(":")
    idle: list[HttpConnection] = []
    opened: list[HttpConnection] = []

    async def ask(number: int) -> memoryview | Refused:
        connection = None
        while idle and (connection is None or connection.closed):
            connection = idle.pop()
        if connection is None or connection.closed:
            _, connection = await asyncio.get_running_loop().create_connection(HttpConnection, host, int(port))
            opened.append(connection)
        reply = await connection.ask(requests[number])
        idle.append(connection)
        return reply

    try:
        await calls(ask, arrivals, meter)
    finally:
        for connection in opened:
            connection.close()


async def calls(ask: Callable[[int], Awaitable[Reply]], arrivals: Arrivals, meter: Meter) -> None:
    """One task per request in flight, until the meter says stop or one fails."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    tasks: set[asyncio.Task[None]] = set()

    async def call(number: int, at: float) -> None:
        due: Due | None = (number, at)
        try:
            while due is not None:
                reply = await ask(due[0])
                if not meter.replied(*due, reply) and not over.done():
                    over.set_result(None)
                due = None if over.done() else arrivals.answered()
        except Exception as error:
            if not over.done():
                over.set_exception(error)

    def send(number: int, at: float) -> None:
        if not over.done():
            task = asyncio.create_task(call(number, at))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    arrivals.begin(send)
    try:
        await over
        arrivals.end()
        await asyncio.gather(*tasks)
    finally:
        arrivals.end()
        left = list(tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class HttpConnection(asyncio.BufferedProtocol):
    """A connection that is kept alive, with one request on it at a time.

    Reads only what servers of encoded tensors send of HTTP/1.1: a status, and a body with a Content-Length.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(1 << 16)
        self._filled, self._head, self._length, self._status = 0, 0, 0, b""
        self._reply: asyncio.Future[memoryview | Refused] | None = None
        self.closed = False

    async def ask(self, request: bytes) -> memoryview | Refused:
        """The body of the response, a view that is valid until the next request; or the status, if it is not 200."""
        assert self._transport is not None
        self._filled = self._head = 0
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._reply

    def close(self) -> None:
        """Ends the connection."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Called by the loop: where the next bytes go."""
        del sizehint
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the loop: `nbytes` bytes have arrived."""
        self._filled += nbytes
        if not self._head and not self._read_head():
            return
        if self._filled >= self._head + self._length:
            reply, self._reply = self._reply, None
            assert reply is not None
            if reply.done():
                return
            body = memoryview(self._buffer)[self._head : self._head + self._length]
            reply.set_result(body if self._status == b"200" else Refused(f"HTTP {self._status.decode()}"))

    def _read_head(self) -> bool:
        """Whether the head is complete; if so, makes room for the body."""
        end = self._buffer.find(b"\r\n\r\n", 0, self._filled)
        if end < 0:
            return False
        status, *lines = bytes(self._buffer[:end]).split(b"\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        self._status = status.split()[1]
        self._head, self._length = end + 4, int(headers.get(b"content-length", 0))
        if self._head + self._length >= len(self._buffer):
            # A view of the old buffer may still be in use.
            self._buffer = self._buffer[: self._filled] + bytearray(self._head + self._length + 1 - self._filled)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self.closed = True
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(Refused(f"the connection ended: {exc or 'closed by the server'}"))
