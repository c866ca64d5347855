"""What is kept of a stream's messages while their calls wait: about what admission counts, whatever else is in them."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from typing import Any

import calls
import messages
import pytest
from engine_bench import BESIDE, Bench, HeldDevice, hold, torch_threads
from rpcs import streams_of
from stream_context import StreamContext

from attnserve import _fields
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.access.callers import Caller, anybody
from attnserve_server.requests.work import Work
from attnserve_server.rpc.stream import CallStream

__all__ = ["torch_threads"]

pytestmark = pytest.mark.usefixtures("torch_threads")

MESSAGES = 8
JUNK = 1 << 20
"""Bytes in each message beside a call that is in order."""


def messages_with_junk() -> Iterator[bytes]:
    """Messages of two calls each: one that is in order, and a long one that is not."""
    for number in range(MESSAGES):
        sound = pb.AttendStreamRequest(calls=[calls.call(number, messages.random_attend(number))]).SerializeToString()
        junk = _fields.field_prefix(2015, JUNK) + bytes(JUNK)
        broken = pb.AttendStreamCall(id=MESSAGES + number).SerializeToString()
        broken += _fields.field_prefix(pb.AttendStreamCall.ATTEND_FIELD_NUMBER, len(junk)) + junk
        yield sound + _fields.field_prefix(pb.AttendStreamRequest.CALLS_FIELD_NUMBER, len(broken)) + broken


async def test_a_call_that_waits_keeps_nothing_of_the_others_in_its_message() -> None:
    def read(caller: Caller, buffer: bytes, at: int, end: int) -> Work:
        return messages.read_request(buffer, at, end)

    device = HeldDevice(BESIDE)
    bench, context = Bench(device), StreamContext(messages_with_junk(), 2 * MESSAGES)
    first = await hold(bench, device)
    streams = streams_of(bench.engine, bench.metrics, {"attend": read}, max_shared_bytes=JUNK // 2)
    stand_in: Any = context
    tracemalloc.start()
    try:
        serving = asyncio.create_task(CallStream(streams, anybody("here"), stand_in).serve())
        await context.read_all.wait()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bench.queue.requests == MESSAGES
    assert kept < JUNK
    device.may_run.set()
    await bench.outcome(first)
    await context.answered.wait()
    assert sorted(context.replies) == list(range(2 * MESSAGES))
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
