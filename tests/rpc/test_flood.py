"""A caller that sends more than the server can compute, or asks for more metrics, and never stops: what happens to it,
and to others.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import calls
import grpc
import messages
import numpy as np
import pytest
from conftest import Server
from google.rpc import code_pb2, error_details_pb2

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.observability import pages

OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
IN_FLIGHT = 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that bounds queue time, unlike the one that other tests share."""
    server = Server((), tmp_path_factory.mktemp("flooded") / "stderr")
    yield server
    assert server.stop() == 0, server.stderr()


class Flood:
    """Calls of a few hundredths of a second each; every answer or refusal is followed by the next call.

    They are float64, which no fast kernel computes.
    """

    def __init__(self, address: str, priority: int) -> None:
        self.codes: Counter[int] = Counter()
        self.delays: list[float] = []
        self._heavy = messages.random_attend(
            0, 1024, heads=8, kv_heads=1, width=16, dtype=np.float64, priority=priority
        )
        self._numbers = itertools.count(1)
        self._stop = threading.Event()
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self._stream = calls.Stream(self._channel)
        self._thread = threading.Thread(target=self._go_on)

    def start(self) -> None:
        for _ in range(IN_FLIGHT):
            self._send()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._stream.vanish()
        self._channel.close()

    def _send(self) -> None:
        self._stream.send(calls.call(next(self._numbers), self._heavy))

    def _go_on(self) -> None:
        while not self._stop.is_set():
            (reply,) = self._stream.replies(1)
            self.codes[reply.error.code] += 1
            if reply.error.code == code_pb2.RESOURCE_EXHAUSTED:
                delay = calls.detail(reply.error, error_details_pb2.RetryInfo).retry_delay
                self.delays.append(delay.seconds + delay.nanos * 1e-9)
                self._stop.wait(0.02)  # sooner than told, but still less than all that the machine can do
            self._send()


@contextmanager
def flooded(server: Server, priority: int = 0) -> Iterator[Flood]:
    """Floods the server while the block runs, which starts once calls are refused."""
    calls.until_nothing_is_in_flight(server.http_address)
    flood = Flood(server.address, priority)
    flood.start()
    try:
        calls.until(lambda: len(flood.delays) > 5, "calls are refused")
        yield flood
    finally:
        flood.stop()
    calls.until_nothing_is_in_flight(server.http_address)


def test_a_flood_is_refused_with_a_delay_and_another_caller_gets_through(server: Server) -> None:
    """The other's calls wait for a batch or two and are not refused; the flood gets the rest."""
    request = messages.random_attend(1)
    with flooded(server) as flood, grpc.insecure_channel(server.address, OPTIONS) as other:
        for _ in range(5):
            reply = calls.unary(other, "Attend", request.SerializeToString())
            calls.assert_answers(pb.AttendResponse.FromString(reply), request)
        assert calls.get(server.http_address, "/readyz")[0] == 200
        served = flood.codes[code_pb2.OK]
        calls.until(lambda: flood.codes[code_pb2.OK] > served, "the flood is served, too")
    assert set(flood.codes) <= {code_pb2.OK, code_pb2.RESOURCE_EXHAUSTED}
    assert all(0.005 <= delay <= 10 for delay in flood.delays)
    # Once the flood is over, there is room at once.
    with grpc.insecure_channel(server.address, OPTIONS) as other:
        calls.unary(other, "Attend", request.SerializeToString())


def test_low_priority_is_served_beside_a_flood_of_high_priority(server: Server) -> None:
    low = messages.random_attend(2, priority=-1)
    with flooded(server, priority=1), grpc.insecure_channel(server.address, OPTIONS) as other:
        reply = calls.unary(other, "Attend", low.SerializeToString())
        calls.assert_answers(pb.AttendResponse.FromString(reply), low)


def test_a_deadline_that_a_flood_makes_impossible_is_refused_at_once(server: Server) -> None:
    """Like the flood's own next call, it has to wait for that caller's earlier ones."""
    with flooded(server), grpc.insecure_channel(server.address, OPTIONS) as other:
        # From a caller that floods as well.
        heavy = messages.random_attend(0, 1024, heads=8, kv_heads=1, width=16, dtype=np.float64)
        stream = calls.Stream(other)
        stream.send(*(calls.call(number, heavy) for number in range(1, 4)))
        hurried = calls.call(4, heavy)
        hurried.timeout.FromMilliseconds(1)
        stream.send(hurried)
        replies = {reply.id: reply for reply in stream.replies(4)}
        stream.vanish()
    error = replies[4].error
    assert error.code in (code_pb2.DEADLINE_EXCEEDED, code_pb2.RESOURCE_EXHAUSTED)
    if error.code == code_pb2.DEADLINE_EXCEEDED:
        assert calls.detail(error, error_details_pb2.ErrorInfo).reason == "DEADLINE_UNREACHABLE"


SCRAPERS, PAGES = 32, 400


def test_a_flood_of_scrapes_has_few_pages_rendered(server: Server) -> None:
    """Each rendering has read how busy the loop was at another time."""

    def scrape(_: int) -> float:
        status, page = calls.get(server.http_address, "/metrics")
        assert status == 200
        return calls.value(page, "attnserve_event_loop_busy_seconds_total")

    begin = time.monotonic()
    with ThreadPoolExecutor(SCRAPERS) as threads:
        rendered = set(threads.map(scrape, range(PAGES)))
    assert len(rendered) <= pages.SAVED + (time.monotonic() - begin) / pages.EVERY_S + 1
    assert calls.get(server.http_address, "/healthz")[0] == 200
