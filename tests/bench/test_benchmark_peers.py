"""Third-party servers: what they are sent and answer, what they compute, and the connections to them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnserve import _fields
from benchmarks import raw
from benchmarks.__main__ import PEERS
from benchmarks.arrivals import ClosedLoop
from benchmarks.measure import (
    Way,
    check,
    serving,
)
from benchmarks.meters import Refused
from benchmarks.peers import compute, mosec, triton
from benchmarks.peers.peer import Peer
from benchmarks.peers.tune import variants
from benchmarks.plain import PlainAttention
from benchmarks.servers import started
from benchmarks.workloads import WORKLOADS

pytestmark = pytest.mark.timeout(600)


def test_what_peers_are_sent_is_what_the_service_gets() -> None:
    for workload in WORKLOADS.values():
        if workload.peers:
            problem = workload.plain(0)
            arrays = [each for each in problem if isinstance(each, np.ndarray)]
            bodies = sum(array.nbytes for array in arrays)
            assert bodies < len(triton.request(problem)) < bodies + 300
            assert bodies < len(mosec.request(problem)) < bodies + 150


def test_messages_of_the_peers_hold_what_was_put_in() -> None:
    problem = WORKLOADS["X"].plain(1)
    assert isinstance(problem, PlainAttention)
    assert problem.mask is not None
    message = triton.MESSAGES["ModelInferRequest"].FromString(b"".join(triton.call(77, triton.request(problem))))
    assert [each.name for each in message.inputs] == ["QUERY", "KEY", "VALUE", "OPTIONS", "MASK"]
    assert [tuple(each.shape)[1:] for each in message.inputs[:3]] == [each.shape for each in problem[:3]]
    for array, content in zip(
        (*problem[:3], problem.mask), [*message.raw_input_contents[:3], message.raw_input_contents[4]], strict=True
    ):
        assert array.tobytes() == content

    reply = (
        triton.MESSAGES["ModelInferResponse"](
            outputs=[{"name": "OUTPUT", "datatype": "FP32", "shape": [1, 2, 3]}],
            raw_output_contents=[np.arange(6, dtype=np.float32).tobytes()],
        ).SerializeToString()
        + b"\x1a\x0277"
    )
    streamed = _fields.field_prefix(triton.RESPONSE_FIELD, len(reply)) + reply
    ((call_id, content),) = triton.replies(streamed)
    assert call_id == 77
    output = triton.Triton().output((2, 3), bytes(content))
    assert output.tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(RuntimeError, match="no such model"):
        list(triton.replies(_fields.field_prefix(triton.ERROR_FIELD, 13) + b"no such model"))
    assert mosec.Mosec().output((2, 3), output.tobytes()).tolist() == output.tolist()


def test_peers_compute_what_is_asked_of_them() -> None:
    problems = [WORKLOADS["X"].plain(number) for number in range(8)] * 2
    requests = []
    for problem in problems:
        assert isinstance(problem, PlainAttention)
        query, key, value = map(torch.from_numpy, problem[:3])
        mask = None if problem.mask is None else torch.from_numpy(problem.mask)
        requests.append(compute.Attention(query, key, value, mask, problem.causal, problem.scale))
    for number, output in enumerate(compute.attend(requests)):
        assert np.abs(output.numpy() - WORKLOADS["X"].expected(number % 8)).max() < 2e-6


@pytest.mark.parametrize("name", ["S", "S1", "M", "L", "A", "B", "R", "X"])
def test_batches_that_can_be_full_are_among_the_settings_to_try(name: str) -> None:
    """Where fewer are in flight than a batch may have, Mosec waits out its time for each."""
    workload = WORKLOADS[name]
    for processes in {settings["workers"] for settings in variants(mosec.Mosec(), workload)}:
        sizes = {each["batch"] for each in variants(mosec.Mosec(), workload) if each["workers"] == processes}
        assert {1, max(1, workload.in_flight // processes)} <= sizes


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
@pytest.mark.parametrize("name", ["X", "A", "S1"])
def test_peers_that_are_installed_answer_right(peer: Peer, name: str, tmp_path: Path) -> None:
    if not peer.installed:
        pytest.skip("make bench-peers installs it")
    workload = WORKLOADS[name]
    with asyncio.Runner() as loop, serving(peer, workload, peer.settings_for(name), tmp_path) as server:
        for way, load in peer.loads.items():
            check(loop, workload, f"{peer.name}, {way}", Way(server, load, peer))
        batches, requests = server.batches()
        assert requests >= batches >= 0
        assert server.resident_bytes() > 0
        assert server.cpu() > 0


def test_a_server_of_others_is_waited_for_until_it_says_that_it_is_ready(tmp_path: Path) -> None:
    """The answers come from the test's own HTTP server; the process just waits."""
    statuses = [503, 503, 200]
    given: list[int] = []

    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given.append(statuses[len(given)])
            self.send_response(given[-1])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/ready"
            waits = [sys.executable, "-c", "import signal; signal.pause()"]
            names = ("batches", "requests")
            with started(waits, {}, tmp_path / "log", url, address="", metrics=url, batch_metrics=names) as running:
                assert given == statuses
                assert running.processes[0].is_running()
            assert not running.processes[0].is_running()
        finally:
            server.shutdown()
            thread.join()


async def test_http_connections_read_replies_however_they_come_and_are_kept() -> None:
    bodies = [b"", b"short", bytes(range(256)) * 1000]
    connections: list[asyncio.Task[Any] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                number = (await reader.readexactly(1))[0]
                if number == len(bodies):
                    writer.write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 4\r\n\r\nbusy")
                    continue
                if number == len(bodies) + 1:
                    break
                head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(bodies[number])}\r\n\r\n".encode()
                reply = head + bodies[number]
                for cut in (10, len(head) + 1, len(reply)):
                    writer.write(reply[:cut])
                    reply = reply[cut:]
                    await writer.drain()
                    await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    found: list[tuple[int, bytes | Refused]] = []

    class Collected:
        def replied(self, number: int, sent_at: float, reply: Any) -> bool:
            found.append((number, reply if isinstance(reply, Refused) else bytes(reply)))
            return len(found) < 12

    requests = [bytes([number]) for number in range(len(bodies) + 2)]
    await raw.http(f"{host}:{port}", requests, ClosedLoop(range(len(bodies)), 2), Collected())
    assert all(body == bodies[number] for number, body in found)
    assert {number for number, _ in found} == {0, 1, 2}
    assert len(connections) == 2
    found.clear()
    await raw.http(f"{host}:{port}", requests, ClosedLoop(range(len(bodies) + 2), 1), Collected())
    assert [number for number, _ in found] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    gone = Refused("the connection ended: closed by the server")
    assert [reply for number, reply in found if number > 2] == [Refused("HTTP 408"), gone] * 2
    assert all(reply == bodies[number] for number, reply in found if number <= 2)
    assert len(connections) == 5  # a refusal keeps the connection, an ended one is replaced
    await asyncio.gather(*filter(None, connections))
    server.close()
    await server.wait_closed()
