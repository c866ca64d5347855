"""Callers who stop waiting, in every way there is: their requests leave the queue and are never computed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import calls
import grpc
import messages
import numpy as np
import pytest
import soon_pinging
from conftest import POOL, Server
from dam import Dam
from occupied import Occupied

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.native import library

QUEUED = 6
"""Number of calls that wait while the device is busy."""

OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))

DEAD_CALLER = """
import sys
import calls, grpc, messages
channel = grpc.insecure_channel(sys.argv[1], options=[("grpc.use_local_subchannel_pool", 1)])
stream = calls.Stream(channel)
stream.send(*(calls.call(number, messages.random_attend(number)) for number in range(int(sys.argv[2]))))
stream.rest()
"""


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address, OPTIONS) as channel:
        yield channel


SILENT_CALLER = """
import queue, sys
import grpc
channel = grpc.insecure_channel(sys.argv[1])
list(channel.stream_stream("/attnserve.v1.AttentionService/AttendStream")(iter(queue.Queue().get, None)))
"""
"""It has a stream without a deadline, and nothing to say."""

Leave = Callable[[], object]


def on_a_stream(server: Server, channel: grpc.Channel, stack: ExitStack, how: str) -> Leave:
    stream = calls.Stream(channel)
    stream.send(*(calls.call(number, messages.random_attend(number)) for number in range(1, QUEUED + 1)))
    if how == "stream closed":
        return stream.vanish
    stack.callback(stream.vanish)
    return lambda: stream.send(cancel=range(1, QUEUED + 1))


def by_themselves(server: Server, channel: grpc.Channel, stack: ExitStack, how: str) -> Leave:
    request = messages.random_attend(0).SerializeToString()
    futures = [calls.unary_future(channel, "Attend", request, timeout=None) for _ in range(QUEUED)]
    return lambda: [future.cancel() for future in futures]


def in_a_process(server: Server, channel: grpc.Channel, stack: ExitStack, how: str) -> Leave:
    command = [sys.executable, "-c", DEAD_CALLER, server.address, str(QUEUED)]
    caller = subprocess.Popen(command, env={"PYTHONPATH": ":".join(sys.path)})

    def kill() -> None:
        caller.send_signal(signal.SIGKILL)
        caller.wait()

    stack.callback(kill)
    return kill


WAYS = {
    "calls cancelled": on_a_stream,
    "stream closed": on_a_stream,
    "unary calls cancelled": by_themselves,
    "caller killed": in_a_process,
}


@pytest.mark.parametrize("how", WAYS)
def test_what_nobody_waits_for_is_not_computed(server: Server, channel: grpc.Channel, how: str) -> None:
    """The device is busy for others while calls wait, and their callers leave: no FLOP is spent on them."""

    def metric(name: str, **labels: str) -> float:
        return calls.metric(server.http_address, f"attnserve_{name}", **labels)

    def cancelled() -> float:
        return metric("cancelled_requests_total", reason="cancelled")

    calls.until_nothing_is_in_flight(server.http_address)
    flops_before, cancelled_before = metric("flops_total"), cancelled()
    with ExitStack() as stack:
        with Occupied(server) as device:
            leave = WAYS[how](server, channel, stack, how)
            device.until_waiting(QUEUED)
            leave()
            calls.until(lambda: cancelled() == cancelled_before + QUEUED, "they have left the queue")
        calls.until_nothing_is_in_flight(server.http_address)
    assert (metric("flops_total") - flops_before) % device.FLOPS == 0, "of others than those who occupied the device"


def test_who_does_not_read_replies_holds_bounded_memory_and_stops_nobody(
    start_server: Callable[..., Server],
) -> None:
    """A caller asks for 600 MiB of replies and does not read them; the server may hold 192 MiB."""
    bound = 192 << 20
    server = start_server("--max-bytes", str(bound), "--max-message-bytes", "16MiB", "--cache-bytes", "1MiB")
    large = messages.random_attend(0, 1024, kv_length=1024, heads=1, width=1, return_scores=pb.SCORE_STAGE_WEIGHTS)

    def in_flight() -> float:
        return calls.metric(server.http_address, "attnserve_in_flight_bytes")

    with (
        grpc.insecure_channel(server.address, OPTIONS) as deaf,
        grpc.insecure_channel(server.address, OPTIONS) as other,
    ):
        stream = calls.Stream(deaf)
        for first in range(0, 150, 10):
            stream.send(*(calls.call(number, large) for number in range(first + 1, first + 11)))
        # The server reads from the stream until this much is unread.
        calls.until(lambda: in_flight() > 16 << 20, "replies are not read")
        request = messages.random_attend(1)
        for _ in range(20):
            reply = calls.unary(other, "Attend", request.SerializeToString())
            calls.assert_answers(pb.AttendResponse.FromString(reply), request)
        assert in_flight() <= bound
        stream.vanish()
        calls.until_nothing_is_in_flight(server.http_address)


def test_unary_replies_that_do_not_arrive_count_until_they_do(start_server: Callable[..., Server]) -> None:
    """A caller asks for 320 MiB of replies on a connection that stands still; the server may hold 48 MiB."""
    bound = 48 << 20
    server = start_server("--max-bytes", str(bound), "--max-message-bytes", "16MiB", "--cache-bytes", "1MiB")
    large = messages.random_attend(0, 1024, kv_length=1024, heads=2, width=1, return_scores=pb.SCORE_STAGE_WEIGHTS)

    def metric(name: str, **labels: str) -> float:
        return calls.metric(server.http_address, f"attnserve_{name}", **labels)

    with (
        Dam(server.address) as dam,
        grpc.insecure_channel(dam.address, OPTIONS) as slow,
        grpc.insecure_channel(server.address, OPTIONS) as other,
    ):
        grpc.channel_ready_future(slow).result(calls.PATIENCE_S)
        dam.shut()
        replies = [calls.unary_future(slow, "Attend", large.SerializeToString()) for _ in range(40)]
        until = partial(metric, "requests_total", operation="attend", code="RESOURCE_EXHAUSTED")
        calls.until(lambda: until() > 0, "the server is full of replies")
        calls.until(lambda: metric("queue_requests") == 0, "all are computed")
        held = metric("in_flight_requests")
        assert 0 < held <= bound / (8 << 20)
        assert metric("in_flight_bytes") <= bound
        request = messages.random_attend(1)
        reply = calls.unary(other, "Attend", request.SerializeToString())
        calls.assert_answers(pb.AttendResponse.FromString(reply), request)
        assert metric("in_flight_requests") >= held, "none has arrived"
        dam.open()
        codes = [each.code() for each in replies]
        assert codes.count(grpc.StatusCode.OK) >= held
        assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        calls.until_nothing_is_in_flight(server.http_address)


@pytest.mark.skipif(not library.available(), reason="no native kernel is here")
def test_so_do_those_that_are_answered_at_once(start_server: Callable[..., Server]) -> None:
    server = start_server()
    request = messages.attend(
        np.ones((1, 1, 200, 1), "f4"), np.ones((1, 1, 1, 1), "f4"), np.ones((1, 1, 1, 1000), "f4")
    )
    metric = partial(calls.metric, server.http_address)
    with Dam(server.address) as dam, grpc.insecure_channel(dam.address, OPTIONS) as slow:
        grpc.channel_ready_future(slow).result(calls.PATIENCE_S)
        with grpc.insecure_channel(server.address, OPTIONS) as other:
            for _ in range(3):  # from then on the server knows such requests
                calls.unary(other, "Attend", request.SerializeToString())
        dam.shut()
        replies = [calls.unary_future(slow, "Attend", request.SerializeToString()) for _ in range(20)]
        answered = partial(metric, "attnserve_requests_total", operation="attend", code="OK")
        calls.until(lambda: answered() == 3 + len(replies), "all are answered")
        assert metric("attnserve_in_flight_requests") >= len(replies) / 2, "little of them has arrived"
        dam.open()
        read = [pb.AttendResponse.FromString(reply.result()) for reply in replies]
        assert any(reply.timings.queue_ns == 0 for reply in read), "none was answered at once"
        calls.until_nothing_is_in_flight(server.http_address)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process' own memory")
def test_the_memory_of_what_waits_is_let_go_with_its_stream(server: Server, channel: grpc.Channel) -> None:
    """At once, not at the next garbage collection, which comes late when few objects hold much memory: what waits next
    reuses that memory.
    """

    def own_bytes() -> int:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    request, count = messages.random_attend(0, 1024, heads=8, width=64), 24
    found = []
    for _ in range(2):
        stream = calls.Stream(channel)
        with Occupied(server) as device:
            for number in range(1, count + 1):
                stream.send(calls.call(number, request))
            device.until_waiting(count)
            found.append(own_bytes())
            stream.vanish()
        calls.until_nothing_is_in_flight(server.http_address)
    assert found[1] - found[0] < count * request.ByteSize() * 3 / 4


def test_a_caller_that_has_vanished_is_noticed(tmp_path: Path) -> None:
    """Its connection is not closed, as when its machine is lost: it only answers nothing."""
    server = Server((*POOL, "--device", "cpu"), tmp_path / "stderr", program=(soon_pinging.__file__,))

    def streams() -> float:
        return calls.metric(server.http_address, "attnserve_streams")

    caller = subprocess.Popen([sys.executable, "-c", SILENT_CALLER, server.address])
    try:
        with grpc.insecure_channel(server.address) as channel:
            staying = calls.Stream(channel)
            calls.until(lambda: streams() == 2, "both are there")
            caller.send_signal(signal.SIGSTOP)
            calls.until(lambda: streams() == 1, "the silent one has gone")
            staying.send(calls.call(1, messages.random_attend(0)))
            (reply,) = staying.replies(1)
            assert not reply.error.code
            staying.half_close()
            staying.rest()
    finally:
        caller.kill()
        caller.wait()
        status = server.stop()
    assert status == 0, server.stderr()
