"""Internal errors: what a caller is told of them, and what goes on unaffected.

The service is the real one on a socket; the only fault is a reader of requests, which fails.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import calls
import grpc
import messages
import pytest
import torch
from engines import OpenAdmission, batch_queue, engine_of
from google.rpc import error_details_pb2, status_pb2
from rpcs import new_metrics, rpcs_of, streams_of

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.access.callers import Caller, anybody
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.errors import Cancelled
from attnserve_server.requests.work import Work
from attnserve_server.rpc.engine_calls import EngineCalls
from attnserve_server.rpc.service import AttentionService
from attnserve_server.rpc.stream import CallStream
from attnserve_server.scheduling.batching import BatchQueue
from attnserve_server.scheduling.engine import Engine
from attnserve_server.scheduling.entry import Entry

Metadata: TypeAlias = tuple[tuple[str, str], ...]

SECRET = "/a/path/of/the/server"


def read_attention(caller: Caller, buffer: bytes, at: int, end: int) -> Work:
    return messages.read_request(buffer, at, end)


def read_badly(caller: Caller, buffer: bytes, at: int, end: int) -> Work:
    raise OSError(f"a bug, with {SECRET} in it")


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    """An open engine."""
    threads = torch.get_num_threads()
    device = CpuDevice(1, 10**15, None)
    queue: BatchQueue[Entry] = batch_queue()
    engine = engine_of(device, queue, OpenAdmission(10, 10**9, 10**12), new_metrics())
    engine.open()
    yield engine
    engine.close()
    device.close()
    torch.set_num_threads(threads)


@pytest.fixture
async def channel(engine: Engine) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server that reads Attend correctly and fails on Apply."""
    readers = {"attend": read_attention, "apply": read_badly}
    metrics = new_metrics()
    rpcs = rpcs_of(metrics)
    streams = streams_of(engine, metrics, readers)
    engine_calls = EngineCalls(engine, metrics, rpcs, streams.reading_turns)
    service = AttentionService(streams, engine_calls, rpcs, b"", 64, None)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    service.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


def check(status: status_pb2.Status, log: pytest.LogCaptureFixture, request_id: str) -> None:
    """Asserts that the caller learns that the server failed, and nothing about how; and an id of that pattern, by which
    that is found in the log.
    """
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert SECRET not in str(status)
    assert "OSError" not in str(status)
    assert calls.detail(status, error_details_pb2.ErrorInfo).reason == "COMPUTATION_FAILED"
    told = calls.detail(status, error_details_pb2.RequestInfo).request_id
    assert re.fullmatch(request_id, told)
    assert [record.request_id for record in log.records if hasattr(record, "request_id")] == [told]
    assert SECRET in log.text


own_id = pytest.mark.parametrize(
    ("metadata", "request_id"),
    [((), r"rpc-[0-9a-f]{6}-\d+"), ((("x-request-id", "mine one"),), r"mine\?one")],
    ids=["", "own"],
)
"""With the id of a caller that gives one, as far as a log may have it, and with the server's own."""


@own_id
async def test_a_bug_ends_a_unary_call_without_its_words(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture, metadata: Metadata, request_id: str
) -> None:
    method = channel.unary_unary("/attnserve.v1.AttentionService/Apply")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await method(b"", timeout=calls.PATIENCE_S, metadata=metadata)
    assert SECRET not in str(caught.value)
    check(calls.status_of(caught.value), caplog, request_id)


@own_id
async def test_a_bug_fails_one_call_of_a_stream(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture, metadata: Metadata, request_id: str
) -> None:
    method = channel.stream_stream("/attnserve.v1.AttentionService/AttendStream")
    stream = method(timeout=calls.PATIENCE_S, metadata=metadata)
    good = messages.random_attend(0)
    requests = [calls.call(1, good), pb.AttendStreamCall(id=2, apply=pb.ApplyRequest()), calls.call(3, good)]
    await stream.write(pb.AttendStreamRequest(calls=requests).SerializeToString())
    replies: dict[int, pb.AttendStreamReply] = {}
    while len(replies) < 3:
        message = pb.AttendStreamResponse.FromString(await stream.read())
        replies |= {reply.id: reply for reply in message.replies}
    calls.assert_answers(replies[1].attend, good)
    check(replies[2].error, caplog, f"{request_id}/2")
    calls.assert_answers(replies[3].attend, good)
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


class LeftContext:
    """What gRPC gives the server when a stream's caller sent a call and left. A fake, because a test over a socket
    cannot time a write to begin between the caller's leaving and the end of its stream.
    """

    def __init__(self, message: bytes) -> None:
        self._messages = [message]

    async def read(self) -> object:
        return self._messages.pop() if self._messages else grpc.aio.EOF

    def peer(self) -> str:
        return "here"

    async def send_initial_metadata(self, _: object) -> None:
        pass

    async def write(self, _: bytes) -> None:
        raise grpc.aio.InternalError("Failed 'execute_batch'")


async def test_a_caller_that_leaves_as_it_is_written_to_is_no_bug(engine: Engine) -> None:
    request = pb.AttendStreamRequest(calls=[calls.call(1, messages.random_attend(0))]).SerializeToString()
    context: Any = LeftContext(request)
    streams = streams_of(engine, new_metrics(), {"attend": read_attention})
    stream = CallStream(streams, anybody("here"), context)
    with pytest.raises(Cancelled):
        await stream.serve()
    assert await engine.drain(0), "what the caller left behind is still counted"
