"""Closed loops: so many requests in flight for so many seconds, each reply followed by the next request."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter, process_time

import numpy as np
import torch
from grpc import aio

from attnserve import AsyncClient, Client
from attnserve_server.kernels import AttentionCall, attend
from benchmarks.workloads import WIDTH, Workload, call, reply_ids

CHANNEL_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
METHOD = "/attnserve.v1.AttentionService/"
WARM_UP = 0.2
"""The share of a run's time, before it, that is not counted."""
MAX_JOINED_BYTES = 1 << 20


@dataclass(slots=True)
class Measurement:
    """Latencies in seconds of the replies counted, how long that took, and the load generator's own CPU time."""

    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    client_cpu: float = 0.0

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.latencies) / self.seconds if self.seconds else 0.0

    def percentile(self, share: float) -> float:
        """A percentile of the latencies, in seconds."""
        return float(np.percentile(self.latencies, share)) if self.latencies else float("nan")


class Clock:
    """Counts replies once the warm-up is over, until the time is."""

    def __init__(self, seconds: float) -> None:
        self.measurement = Measurement()
        self._begin = perf_counter() + seconds * WARM_UP
        self._end = self._begin + seconds
        self._counting = False
        self._cpu = 0.0
        self._since = 0.0

    def replied(self, sent_at: float) -> bool:
        """Counts a reply to a request sent at some time; whether to go on."""
        now = perf_counter()
        if self._counting:
            self.measurement.latencies.append(now - sent_at)
            if now >= self._end:
                self.measurement.seconds = now - self._since
                self.measurement.client_cpu = process_time() - self._cpu
                return False
        elif now >= self._begin:
            self._counting, self._since, self._cpu = True, now, process_time()
        return True


def in_process(workload: Workload, seconds: float) -> Measurement:
    """The same call of torch: batches of all that is in flight, all cores."""
    torch.set_num_threads(os.cpu_count() or 1)
    query, key, value = (
        torch.from_numpy(array).expand(workload.in_flight, -1, -1, -1).contiguous() for array in workload.arrays()
    )
    clock = Clock(seconds)
    while True:
        begin = perf_counter()
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        for _ in range(workload.in_flight):
            if not clock.replied(begin):
                torch.set_num_threads(1)
                return clock.measurement


async def raw_stream(address: str, workload: Workload, seconds: float) -> Measurement:
    """Encoded messages over one stream; nothing is decoded but the ids of the replies."""
    request = workload.request()
    clock = Clock(seconds)
    async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stream = channel.stream_stream(METHOD + "AttendStream")()
        sent_at: dict[int, float] = {}
        due = list(range(1, workload.in_flight + 1))
        ready = asyncio.Event()
        ready.set()

        async def write() -> None:
            most = max(1, MAX_JOINED_BYTES // len(request))
            while True:
                await ready.wait()
                ready.clear()
                while due:
                    now = perf_counter()
                    batch, due[:] = due[:most], due[most:]
                    for call_id in batch:
                        sent_at[call_id] = now
                    await stream.write(b"".join(piece for call_id in batch for piece in call(call_id, request)))

        writer = asyncio.create_task(write())
        try:
            going = True
            while going:
                message = await stream.read()
                if not isinstance(message, bytes):
                    raise RuntimeError(f"the stream ended: {await stream.code()} {await stream.details()}")
                for call_id in reply_ids(message):
                    going = clock.replied(sent_at.pop(call_id)) and going
                    due.append(call_id)
                ready.set()
        finally:
            writer.cancel()
            stream.cancel()
    return clock.measurement


async def raw_unary(address: str, workload: Workload, seconds: float) -> Measurement:
    """Encoded messages by unary calls; nothing is decoded."""
    request = workload.request()
    clock = Clock(seconds)
    async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        attend_rpc = channel.unary_unary(METHOD + "Attend")

        async def caller() -> None:
            while True:
                begin = perf_counter()
                await attend_rpc(request)
                if not clock.replied(begin):
                    return

        callers = [asyncio.create_task(caller()) for _ in range(workload.in_flight)]
        await asyncio.wait(callers, return_when=asyncio.FIRST_COMPLETED)
        for task in callers:
            task.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    return clock.measurement


async def async_sdk(address: str, workload: Workload, seconds: float) -> Measurement:
    """AsyncClient: arrays in, arrays out."""
    query, key, value = workload.arrays()
    clock = Clock(seconds)
    async with AsyncClient(address) as client:

        async def caller() -> None:
            while True:
                begin = perf_counter()
                await client.attend(query, key, value, causal=True)
                if not clock.replied(begin):
                    return

        callers = [asyncio.create_task(caller()) for _ in range(workload.in_flight)]
        await asyncio.wait(callers, return_when=asyncio.FIRST_COMPLETED)
        for task in callers:
            task.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    return clock.measurement


def sync_sdk(address: str, workload: Workload, seconds: float) -> Measurement:
    """Client: arrays in, arrays out, one thread that keeps several in flight by `submit`."""
    query, key, value = workload.arrays()
    clock = Clock(seconds)
    with Client(address) as client:
        if workload.in_flight == 1:
            while True:
                begin = perf_counter()
                client.attend(query, key, value, causal=True)
                if not clock.replied(begin):
                    return clock.measurement
        futures = []
        while True:
            while len(futures) < workload.in_flight:
                futures.append((perf_counter(), client.submit(query, key, value, causal=True)))
            begin, future = futures.pop(0)
            future.result()
            if not clock.replied(begin):
                break
        for _, future in futures:
            future.result()
    return clock.measurement


def check(address: str, workload: Workload) -> None:
    """Raises if the service's answer is not that of torch in process; nothing wrong is worth timing."""
    query, key, value = workload.arrays()
    with Client(address) as client:
        output = client.attend(query, key, value, causal=True).output
    tensors = (torch.from_numpy(array)[None] for array in (query, key, value))
    expected = attend(AttentionCall(*tensors, scale=WIDTH**-0.5, causal=True)).output[0].numpy()
    if not np.allclose(output, expected, atol=2e-6):
        raise RuntimeError(f"workload {workload.name}: the service's answer is wrong")


LOADS: dict[str, Callable[[str, Workload, float], object]] = {
    "stream": raw_stream,
    "unary": raw_unary,
    "async SDK": async_sdk,
    "sync SDK": sync_sdk,
}
"""Load generators by name: encoded messages over one stream and by unary calls, and both SDKs."""
