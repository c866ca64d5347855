"""The service's memory for waiting requests, relative to the requests' size, for some sizes.

In: flags of the service. Out: a `Waiting` for each way of calling and each size. The service is told to wait
indefinitely for larger batches, so that requests stay in its queue, as behind a busy device, and nothing else happens.
It is started anew each time, since memory that it has freed would be reused.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from grpc import aio

from attnserve._requests.operation import ATTEND
from attnserve.v1 import attention_pb2 as pb
from benchmarks.messages import call
from benchmarks.raw import CHANNEL_OPTIONS
from benchmarks.servers import attnserve, running
from benchmarks.workload import HEAD_DIM, HEADS, tensor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.servers import Running

SIZES: Final = (1 << 16, 1 << 20, 6 << 20)
"""The bytes of a request's queries, keys and values, together."""
TOTAL: Final = 192 << 20
"""The bytes that wait in the end."""
FIRST: Final = 4
"""Memory is measured when one in this many of the requests waits, and again when all do. The difference leaves out what
is there only once, however many wait: what a measurement itself takes, and buffers that remain.
"""
MOST: Final = 1000
"""The service stops reading from a stream with more unanswered calls."""
QUEUED: Final = "attnserve_queue_requests"
PATIENCE_S: Final = 60.0
POLL_S: Final = 0.01
RUNS: Final = 3
"""How often each is measured: the allocator may happen to keep as much memory as some requests take."""
FLAGS: Final = (
    *("--max-wait", "1h", "--max-queue-time", "0", "--max-batch-requests", "4096", "--max-batch-flops", "1e15"),
    *("--max-flops", "1e15", "--cache-bytes", "1MiB"),
)

Send: TypeAlias = Callable[[], Awaitable[None]]
"""Sends one request, whose reply is not awaited."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The memory that each of `requests` waiting requests takes, for one way of calling, in each of some runs; and its
    own size, all in bytes.
    """

    way: str
    payload: int
    requests: int
    runs: list[float]

    @property
    def memory(self) -> float:
        """The median of the runs."""
        return statistics.median(self.runs)

    @property
    def ratio(self) -> float:
        """The bytes of memory per byte of a request."""
        return self.memory / self.payload


def waiting(
    loop: asyncio.Runner,
    server_flags: Sequence[str],
    progress: Callable[[str], None] = lambda _: None,
    sizes: Sequence[int] = SIZES,
    total: int = TOTAL,
) -> list[Waiting]:
    """Measures each way and size a few times, with a service of its own each time. Raises TimeoutError if requests do
    not reach its queue.

    Empty if the system does not tell a process's own memory.
    """
    found = []
    for way in WAYS:
        for size in sizes:
            request, count = _request(size), min(MOST, max(2 * FIRST, total // size))
            runs = []
            for number in range(1, RUNS + 1):
                progress(f"memory of requests that wait: {way}, {size:,} bytes, run {number} of {RUNS}")
                with running(*attnserve(*server_flags, *FLAGS)) as service:
                    if service.own_bytes() is None:
                        return []
                    runs.append(loop.run(_memory(service, way, request, count)))
            found.append(Waiting(f"attnserve, {way}", len(request), count, runs))
    return found


async def _memory(service: Running, way: str, request: bytes, count: int) -> float:
    """The bytes that each of so many waiting requests takes."""
    counts, memory = (0, count // FIRST, count), []
    async with WAYS[way](service.address, request) as send:
        for before, after in itertools.pairwise(counts):
            for _ in range(after - before):
                await send()
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    await asyncio.sleep(POLL_S)
                    if service.metric(QUEUED) >= after:
                        break
            memory.append(service.own_bytes() or 0)
    _, few, many = counts
    return (memory[1] - memory[0]) / (many - few)


def _request(size: int) -> bytes:
    """An encoded AttendRequest with `size` bytes of queries, keys and values."""
    tokens = size // (3 * HEADS * HEAD_DIM * 4)
    array = tensor(np.ones((HEADS, tokens, HEAD_DIM), np.float32))
    return pb.AttendRequest(query=array, key=array, value=array).SerializeToString()


@asynccontextmanager
async def _stream(address: str, request: bytes) -> AsyncIterator[Send]:
    """One stream, with one call per message; all calls end with the block."""
    async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        rpc: aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(ATTEND.path + "Stream")()
        count = 0

        async def send() -> None:
            nonlocal count
            count += 1
            await rpc.write(b"".join(call(ATTEND, count, request)))

        try:
            yield send
        finally:
            rpc.cancel()


@asynccontextmanager
async def _unary(address: str, request: bytes) -> AsyncIterator[Send]:
    """One unary call per request; all end with the block."""
    async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        rpc: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(ATTEND.path)
        calls: list[aio.UnaryUnaryCall[bytes, bytes]] = []

        async def send() -> None:
            calls.append(rpc(request))

        try:
            yield send
        finally:
            for each in calls:
                each.cancel()


WAYS: Final = {"stream": _stream, "unary": _unary}
