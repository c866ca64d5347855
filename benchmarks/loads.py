"""Closed loops: so many requests in flight, each reply followed by the next request, until a meter says stop.

The requests of a workload are sent in turn, by every way of calling; encoded beforehand where messages are raw.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Any, Final

import torch
from grpc import aio

from attnserve import AsyncClient, Client
from attnserve_server.cpus import usable_cpus
from benchmarks.messages import call, replies
from benchmarks.meters import Meter
from benchmarks.workload import Batch, Workload

STREAM: Final = "/attnserve.v1.AttentionService/AttendStream"
CHANNEL_OPTIONS: Final = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
MAX_JOINED_BYTES: Final = 1 << 20
THREADS_TRIAL_S: Final = 0.1
"""How long torch in process tries each number of threads, before it is timed."""


def in_process(workload: Workload, meter: Meter) -> None:
    """Torch in this process: batches of all that is in flight, put together beforehand, on one core or on all."""
    batches = workload.batches()
    try:
        with torch.inference_mode():
            torch.set_num_threads(_best_threads(batches))
            for batch in itertools.cycle(batches):
                begin = perf_counter()
                outputs = batch.compute()
                for number, output in zip(batch.requests, outputs, strict=True):
                    if not meter.replied(number, begin, output):
                        return
    finally:
        torch.set_num_threads(1)


def _best_threads(batches: Sequence[Batch]) -> int:
    """One thread, or one for each core, whichever computes more: tiny batches and busy machines want one."""
    computed = {}
    for threads in (1, usable_cpus()):
        torch.set_num_threads(threads)
        begin, count = perf_counter(), 0
        while perf_counter() - begin < THREADS_TRIAL_S:
            for batch in batches:
                batch.compute()
            count += 1
        computed[threads] = count / (perf_counter() - begin)
    return max(computed, key=computed.__getitem__)


async def raw_stream(address: str, workload: Workload, meter: Meter) -> None:
    """Encoded messages over one stream; nothing is decoded but the ids of the replies."""
    operation = workload.operation
    requests = [workload.request(number) for number in workload.numbers]
    numbers = itertools.cycle(workload.numbers)
    async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stream: aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(STREAM)()
        sent: dict[int, tuple[int, float]] = {}
        free = list(range(1, workload.in_flight + 1))
        ready = asyncio.Event()
        ready.set()

        async def write() -> None:
            while True:
                await ready.wait()
                ready.clear()
                while free:
                    now, pieces, size = perf_counter(), [], 0
                    while free and size < MAX_JOINED_BYTES:
                        number, call_id = next(numbers), free.pop()
                        sent[call_id] = number, now
                        pieces += call(operation, call_id, requests[number])
                        size += len(requests[number])
                    await stream.write(b"".join(pieces))

        writer = asyncio.create_task(write())
        try:
            going = True
            while going:
                message = await stream.read()
                if not isinstance(message, bytes):
                    raise RuntimeError(f"the stream ended: {await stream.code()} {await stream.details()}")
                for call_id, reply in replies(operation, message):
                    going = meter.replied(*sent.pop(call_id), reply) and going
                    free.append(call_id)
                ready.set()
        finally:
            writer.cancel()
            stream.cancel()


async def raw_unary(address: str, workload: Workload, meter: Meter) -> None:
    """Encoded messages by unary calls; nothing is decoded."""
    requests = [workload.request(number) for number in workload.numbers]
    numbers = itertools.cycle(workload.numbers)
    async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        rpc: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(workload.operation.path)

        async def caller() -> None:
            going = True
            while going:
                number, begin = next(numbers), perf_counter()
                reply = await rpc(requests[number])
                going = meter.replied(number, begin, reply)

        await _until_first_ends(caller, workload.in_flight)


async def async_sdk(address: str, workload: Workload, meter: Meter) -> None:
    """AsyncClient: arrays in, arrays out."""
    arrays = [workload.arrays(number) for number in workload.numbers]
    numbers = itertools.cycle(workload.numbers)
    async with AsyncClient(address) as client:

        async def caller() -> None:
            going = True
            while going:
                number, begin = next(numbers), perf_counter()
                result = await workload.submit_async(client, arrays[number])
                going = meter.replied(number, begin, result.output)

        await _until_first_ends(caller, workload.in_flight)


async def _until_first_ends(caller: Callable[[], Awaitable[None]], count: int) -> None:
    """Runs so many callers until one ends, or fails; the others are ended."""
    tasks = [asyncio.ensure_future(caller()) for _ in range(count)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


def sync_sdk(address: str, workload: Workload, meter: Meter) -> None:
    """Client: arrays in, arrays out, one thread that keeps several in flight by `submit`."""
    arrays = [workload.arrays(number) for number in workload.numbers]
    numbers = itertools.cycle(workload.numbers)
    going = True
    with Client(address) as client:
        if workload.in_flight == 1:
            while going:
                number, begin = next(numbers), perf_counter()
                going = meter.replied(number, begin, workload.ask(client, arrays[number]).output)
            return
        done: queue.SimpleQueue[tuple[int, float, Future[Any]]] = queue.SimpleQueue()

        def send() -> None:
            number, begin = next(numbers), perf_counter()
            future = workload.submit(client, arrays[number])
            future.add_done_callback(lambda future: done.put((number, begin, future)))

        for _ in range(workload.in_flight):
            send()
        while going:
            number, begin, future = done.get()
            going = meter.replied(number, begin, future.result().output)
            send()
        # What is in flight ends with the client.


LOADS: Final[dict[str, Callable[[str, Workload, Meter], Awaitable[None] | None]]] = {
    "stream": raw_stream,
    "unary": raw_unary,
    "async SDK": async_sdk,
    "sync SDK": sync_sdk,
}
"""Load generators by name: encoded messages over one stream and by unary calls, and both SDKs.

They return when the meter says stop, and raise what goes wrong.
"""
