"""The workloads of the benchmark, and how they are sent: to the service, to torch in process, without computation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
from conftest import Server

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.settings.config import Config
from benchmarks import decoder
from benchmarks.attention import Attention
from benchmarks.decode import Decode
from benchmarks.loads import LOADS, in_process
from benchmarks.measure import IN_PROCESS, Way, check, closed
from benchmarks.messages import call, replies
from benchmarks.meters import Check, Refused
from benchmarks.servers import Running
from benchmarks.waiting import waiting
from benchmarks.workload import Shape, Workload
from benchmarks.workloads import CUDA_WORKLOADS, MILLION, WORKLOADS

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The decoder's; the whole ones take 16 sequences hundreds of GFLOPs."""
    monkeypatch.setattr(decoder, "PROMPT", 64)
    decoder._exact.cache_clear()
    yield
    decoder._exact.cache_clear()


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.usefixtures("short_prompts")
def test_torch_in_process_computes_every_request(workload: Workload) -> None:
    check = Check(workload, IN_PROCESS)
    missing = set(workload.numbers)
    for batch in workload.batches():
        assert len(batch.requests) == workload.in_flight
        for number, output in zip(batch.requests, batch.compute(), strict=True):
            missing.discard(number)
            assert check.replied(number, 0.0, output) == bool(missing)
    assert not missing


def test_replies_without_computation_are_as_long_as_computed_ones() -> None:
    for workload in WORKLOADS.values():
        payload = 4 * int(np.prod(workload.output_shape(0)))
        # Beside the payload, a reply has a header and an entry for each of up to 64 caches.
        assert payload < len(workload.reply(0)) < payload + (300 if workload.name == "D64" else 100)


def test_the_service_keeps_room_for_caches_only_where_there_are_some() -> None:
    """It counts as its memory."""
    assert WORKLOADS["DS"].cache_bytes == WORKLOADS["S"].cache_bytes < WORKLOADS["D"].cache_bytes


def test_requests_of_one_kind_have_messages_of_one_length() -> None:
    for workload in WORKLOADS.values():
        by_length = {(len(workload.request(number)), len(workload.reply(number))) for number in workload.numbers}
        assert len(by_length) <= len(set(map(workload.kind, workload.numbers)))


def test_streams_messages_hold_what_was_put_in() -> None:
    workload = WORKLOADS["A"]
    operation, request = workload.operation, workload.request(0)
    message = pb.AttendStreamRequest.FromString(
        b"".join([*call(operation, 7, request), *call(operation, 300, request)])
    )
    assert [each.id for each in message.calls] == [7, 300]
    assert all(each.apply == pb.ApplyRequest.FromString(request) for each in message.calls)

    reply = pb.ApplyResponse.FromString(workload.reply(3))
    response = pb.AttendStreamResponse(
        replies=[pb.AttendStreamReply(id=300, apply=reply), pb.AttendStreamReply(apply=reply)]
    )
    decoded = []
    for call_id, data in replies(operation, response.SerializeToString()):
        assert not isinstance(data, Refused)
        decoded.append((call_id, pb.ApplyResponse.FromString(bytes(data))))
    assert decoded == [(300, reply), (0, reply)]

    failed = pb.AttendStreamResponse(replies=[{"id": 1, "error": {"code": 5, "message": "no such layer"}}])
    assert list(replies(operation, failed.SerializeToString())) == [(1, Refused("no such layer"))]
    other = pb.AttendStreamResponse(replies=[pb.AttendStreamReply(id=1, attend=pb.AttendResponse())])
    with pytest.raises(RuntimeError, match="without a result"):
        list(replies(operation, other.SerializeToString()))


MODEL = Shape(heads=8, kv_heads=2, head_dim=32, dtype="bfloat16")
MODELS = [
    Attention("prefill", 2, (24, 24), shape=MODEL),
    Attention("prefill, half", 2, (24, 24), shape=replace(MODEL, dtype="float16")),
    Decode("steps", 2, (3, 3), tokens=40, shape=MODEL, distinct=2, pool_bytes=1 << 22),
    Decode("steps that append", 1, (3,), manner="append", tokens=40, shape=MODEL, distinct=2, pool_bytes=1 << 22),
]


@pytest.mark.parametrize("workload", MODELS, ids=[each.name for each in MODELS])
def test_workloads_of_models_are_served_and_computed_as_defined(workload: Workload, server: Server) -> None:
    """The CUDA workloads, small and on a CPU: the benchmark's own check of the service and of in-process torch."""
    service = Running(server.address, ())
    with asyncio.Runner() as loop:
        for way in (Way(None, in_process), *(Way(service, load, prepared=True) for load in LOADS.values())):
            check(loop, workload, "way", way)
    assert {len(workload.request(number)) for number in workload.numbers} == {len(workload.request(0))}
    assert workload.output(workload.reply(0)).shape == workload.output_shape(0)
    assert workload.output(workload.reply(0)).dtype == workload.output_dtype


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_who_waits_for_one_result_calls_what_waits_for_it(workload: Workload) -> None:
    """And not for a future, which another thread completes."""
    client = MagicMock()
    arrays = workload.arrays(0)
    workload.ask(client, arrays)
    (waits,) = client.method_calls
    workload.submit(client, arrays)
    begins = client.method_calls[-1]
    assert (waits[0], begins[0]) in [("attend", "submit"), ("apply", "submit_apply")]
    assert all(given is argument for given, argument in zip(waits.args, begins.args, strict=True))
    assert waits.kwargs.keys() == begins.kwargs.keys()


@pytest.mark.parametrize("name", ["S", "S1"])
def test_what_the_service_refuses_is_counted_whatever_calls_it(name: str, start_server: Callable[..., Server]) -> None:
    refusing = start_server("--max-request-flops", "1")
    with asyncio.Runner() as loop:
        for load in LOADS.values():
            way = Way(Running(refusing.address, ()), load)
            assert closed(loop, way, WORKLOADS[name], 0.05)["requests"] == 0.0
            assert way.refused.total() > 0


def test_memory_of_requests_that_wait_is_at_least_theirs(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    if Running(server.address, (psutil.Process(server.process.pid),)).own_bytes() is None:
        pytest.skip("the system does not tell a process' own memory")
    monkeypatch.setattr("benchmarks.waiting.RUNS", 1)
    with asyncio.Runner() as loop:
        found = waiting(loop, ["--device", "cpu"], sizes=[1 << 20], total=32 << 20)
    assert [(each.way, each.requests) for each in found] == [("attnserve, stream", 32), ("attnserve, unary", 32)]
    for each in found:
        assert 0.99 < each.payload / (1 << 20) < 1.01
        assert 0.5 < each.ratio < 3


def test_workloads_for_cuda_fit_what_a_server_takes() -> None:
    limits = Config()
    for workload in CUDA_WORKLOADS.values():
        shape = workload.shape  # type: ignore[attr-defined]
        rows = [shape.heads + 2 * shape.kv_heads, shape.head_dim, shape.numpy.itemsize]
        tokens = max(workload.lengths)
        assert tokens * int(np.prod(rows)) < limits.max_message_bytes
        if isinstance(workload, Decode):
            per_token = 2 * shape.kv_heads * shape.head_dim * shape.numpy.itemsize
            assert workload.tokens * tokens * per_token < workload.cache_bytes
            assert workload.tokens * tokens <= MILLION
