"""The echo server, the transport's ceiling, answers all calls, however split into messages, then ends the stream."""

from __future__ import annotations

import calls
import grpc

from attnserve.v1 import attention_pb2 as pb
from benchmarks.servers import running
from benchmarks.workloads import WORKLOADS

COUNT = 300
OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


def test_a_stream_that_says_no_more_has_all_its_answers() -> None:
    """As a benchmark ends: it half-closes and waits for what is in flight."""
    workload = WORKLOADS["M"]
    request = pb.AttendRequest.FromString(workload.request(0))
    with running("benchmarks.echo", "cpu", "workloads") as echo:
        for _ in range(3):
            with grpc.insecure_channel(echo.address, OPTIONS) as channel:
                stream = calls.Stream(channel)
                stream.send(*(calls.call(number, request) for number in range(1, COUNT)))
                stream.send(calls.call(COUNT, request))
                stream.half_close()
                replies = stream.rest()
                assert [reply.id for reply in replies] == list(range(1, COUNT + 1))
                assert all(len(reply.attend.output.data) == len(request.query.data) for reply in replies)
