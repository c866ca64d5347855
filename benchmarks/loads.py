"""Load generators for a workload: torch in process, encoded messages by gRPC, and both SDKs.

Every way of calling sends the requests of a workload in turn; raw messages are encoded beforehand. The generators
return when the meter says stop, and raise errors.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Any, Final, TypeAlias

import torch

from attnserve import AsyncClient, AttnServeError, Client
from attnserve_server.host.cpus import usable_cpus
from benchmarks import raw
from benchmarks.arrivals import Arrivals
from benchmarks.messages import call, replies
from benchmarks.meters import Meter, Refused, Reply
from benchmarks.workload import Batch, Workload

Load: TypeAlias = Callable[[str, Workload, Arrivals, Meter], Awaitable[None] | None]
"""Sends a workload's requests to the server at an address, when the arrivals say, and reports to the meter."""

STREAM: Final = "/attnserve.v1.AttentionService/AttendStream"
MAX_JOINED_BYTES: Final = 1 << 20
THREADS_TRIAL_S: Final = 0.1
"""How long torch in process tries each number of threads before it is timed."""


def in_process(address: str, workload: Workload, arrivals: Arrivals, meter: Meter) -> None:
    """Torch in this process: batches of all requests in flight, assembled beforehand, on one core or on all."""
    del address, arrivals
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
    """One thread, or one per core, whichever is faster: one is better for tiny batches and on busy machines."""
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


async def raw_stream(address: str, workload: Workload, arrivals: Arrivals, meter: Meter) -> None:
    """Encoded messages over one stream; only the ids of replies are decoded."""
    operation = workload.operation
    requests = [workload.request(number) for number in workload.numbers]
    await raw.stream(
        address,
        STREAM,
        lambda call_id, number: call(operation, call_id, requests[number]),
        lambda message: replies(operation, message),
        MAX_JOINED_BYTES,
        arrivals,
        meter,
    )


async def raw_unary(address: str, workload: Workload, arrivals: Arrivals, meter: Meter) -> None:
    """Encoded messages by unary calls; nothing is decoded."""
    requests = [workload.request(number) for number in workload.numbers]
    await raw.unary(address, workload.operation.path, requests, arrivals, meter)


async def async_sdk(address: str, workload: Workload, arrivals: Arrivals, meter: Meter) -> None:
    """AsyncClient: arrays in, arrays out."""
    arrays = [workload.arrays(number) for number in workload.numbers]
    async with AsyncClient(address) as client:

        async def ask(number: int) -> Reply:
            try:
                output: Reply = (await workload.submit_async(client, arrays[number])).output
            except AttnServeError as error:
                return _refused(error)
            return output

        await raw.calls(ask, arrivals, meter)


def sync_sdk(address: str, workload: Workload, arrivals: Arrivals, meter: Meter) -> None:
    """Client: arrays in, arrays out; one thread keeps several in flight with `submit`: always a closed loop."""
    del arrivals
    arrays = [workload.arrays(number) for number in workload.numbers]
    numbers = itertools.cycle(workload.numbers)
    going = True
    with Client(address) as client:
        if workload.in_flight == 1:
            while going:
                number, begin = next(numbers), perf_counter()
                try:
                    reply: Reply = workload.ask(client, arrays[number]).output
                except AttnServeError as error:
                    reply = _refused(error)
                going = meter.replied(number, begin, reply)
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
            try:
                reply = future.result().output
            except AttnServeError as error:
                reply = _refused(error)
            going = meter.replied(number, begin, reply)
            send()
        # Requests in flight end with the client.


def _refused(error: AttnServeError) -> Refused:
    return Refused(f"{error.code.name}: {error}")


LOADS: Final[dict[str, Load]] = {
    "stream": raw_stream,
    "unary": raw_unary,
    "async SDK": async_sdk,
    "sync SDK": sync_sdk,
}
"""The load generators for this service, by name."""
