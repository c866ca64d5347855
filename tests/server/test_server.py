"""A server from start to end: where it listens, and how it drains."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import calls
import grpc
import messages
import numpy as np
import pytest
from conftest import POOL
from dam import Dam
from google.rpc import code_pb2
from occupied import PATIENT, Occupied

from attnserve import AsyncClient, AttnServeError, Client, UnavailableError
from attnserve._commands.cli import main
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import attention_pb2_grpc, caches_pb2_grpc, layers_pb2_grpc, tensor_pb2
from attnserve.v1.caches_pb2 import CacheServiceCreateRequest
from attnserve.v1.layers_pb2 import LayerServiceLoadRequest
from attnserve_server.errors import Draining
from attnserve_server.exit_statuses import CUT_OFF
from attnserve_server.server import Server as Stopped
from attnserve_server.server import configured_device
from attnserve_server.settings.config import Config

if TYPE_CHECKING:
    from conftest import Server


def test_sigterm_answers_what_is_in_flight(start_server: Callable[..., Server]) -> None:
    """A draining server is alive but not ready, and still accepts requests until its delay is over."""
    server = start_server("--drain-delay", "3s", "--drain-grace", "30s", *PATIENT)
    assert calls.get(server.http_address, "/readyz")[0] == 200
    requests = {number: messages.random_attend(number) for number in range(10)}
    *early, late = ([calls.call(number, request)] for number, request in requests.items())
    with grpc.insecure_channel(server.address) as channel:
        stream = calls.Stream(channel)
        with Occupied(server) as device:
            for each in early:
                stream.send(*each)
            device.until_waiting(len(early))
            server.process.send_signal(signal.SIGTERM)
            calls.until(lambda: calls.get(server.http_address, "/readyz")[0] == 503, "it is not ready")
            assert calls.get(server.http_address, "/healthz")[0] == 200
            stream.send(*late)
            device.until_waiting(len(requests))
        replies = {reply.id: reply for reply in stream.rest()}  # the server ends the stream, with status OK
    assert replies.keys() == requests.keys()
    assert all(reply.error.code == 0 for reply in replies.values())
    for number, request in requests.items():
        calls.assert_answers(replies[number].attend, request)
    assert server.process.wait(calls.PATIENCE_S) == 0
    assert "Traceback" not in server.stderr()


@contextmanager
def draining(server: Server) -> Iterator[tuple[grpc.Channel, calls.Stream]]:
    """A channel to a server that drains, and a stream on it whose call 1 has an answer that waits to be read. Ends once
    the server has ended well.
    """
    with grpc.insecure_channel(server.address, calls.ANY_LENGTH) as channel:
        stream = calls.Stream(channel)
        stream.send(calls.call(1, calls.large_reply()))
        calls.until(lambda: calls.metric(server.http_address, "attnserve_in_flight_requests") == 1, "it is there")
        server.process.send_signal(signal.SIGTERM)
        calls.until(lambda: calls.get(server.http_address, "/readyz")[0] == 503, "it is not ready")
        yield channel, stream
    assert server.process.wait(calls.PATIENCE_S) == 0


def test_a_draining_server_refuses_what_is_new(start_server: Callable[..., Server]) -> None:
    """The delay is over and a reply is still unsent: new calls, streamed or unary, are told to go elsewhere."""
    server = start_server()
    with draining(server) as (channel, stream):
        request = messages.random_attend(0)
        stream.send(calls.call(9, request))
        calls.until(
            lambda: calls.metric(server.http_address, "attnserve_rejected_requests_total", reason="draining") == 1,
            "the call is refused",
        )
        cache = CacheServiceCreateRequest(num_kv_heads=1, head_dim=8, dtype=tensor_pb2.DATA_TYPE_FLOAT32)
        layers = LayerServiceLoadRequest(definitions="layers.toml")
        for ask in (
            lambda: calls.unary(channel, "Attend", request.SerializeToString()),
            lambda: caches_pb2_grpc.CacheServiceStub(channel).Create(cache),  # it would go with the server,
            lambda: layers_pb2_grpc.LayerServiceStub(channel).Load(layers),  # as would they
        ):
            with pytest.raises(grpc.RpcError) as caught:
                ask()
            refused: Any = caught.value
            assert refused.code() == grpc.StatusCode.UNAVAILABLE
        # The error ratio (deploy/monitoring/rules.yaml) subtracts one from the other.
        assert calls.metric(server.http_address, "attnserve_rejected_requests_total", reason="draining") == 4
        for operation in ("attend_stream", "attend", "create", "load_layers"):
            labels = {"operation": operation, "code": "UNAVAILABLE"}
            assert calls.metric(server.http_address, "attnserve_requests_total", **labels) == 1
        replies = {reply.id: reply.error.code for reply in stream.rest()}
    assert replies == {1: 0, 9: code_pb2.UNAVAILABLE}


@pytest.mark.parametrize("code", [0, CUT_OFF])
def test_a_unary_reply_on_its_way_is_awaited(start_server: Callable[..., Server], code: int) -> None:
    """Within the grace: a connection that stands still for longer is cut off."""
    server = start_server("--drain-grace", "100ms" if code else "60s")
    with Dam(server.address) as dam, grpc.insecure_channel(dam.address, calls.ANY_LENGTH) as channel:
        grpc.channel_ready_future(channel).result(calls.PATIENCE_S)
        dam.shut()
        request = calls.large_reply()
        reply = calls.unary_future(channel, "Attend", request.SerializeToString())
        answered = partial(calls.metric, server.http_address, "attnserve_requests_total", operation="attend", code="OK")
        calls.until(lambda: answered() == 1, "it is answered")
        server.process.send_signal(signal.SIGTERM)
        calls.until(lambda: "draining" in server.stderr(), "it drains")
        if not code:
            with pytest.raises(subprocess.TimeoutExpired):
                server.process.wait(2.0)
            dam.open()
            calls.assert_answers(pb.AttendResponse.FromString(reply.result()), request)
        assert server.process.wait(calls.PATIENCE_S) == code


async def test_calls_that_have_arrived_as_a_server_stops_are_refused_and_not_cancelled() -> None:
    """A stock client retries UNAVAILABLE, as service configs nearly always say, and not CANCELLED, which gRPC makes of
    unary calls that wait to begin when it stops. The loop stands still until all have arrived.
    """
    config = Config(listen="127.0.0.1:0", http_listen="127.0.0.1:0", device="cpu", cache_bytes=1 << 20)
    server = Stopped(config, configured_device)
    address, _ = await server.start()
    with grpc.insecure_channel(address) as channel:
        await asyncio.to_thread(grpc.channel_ready_future(channel).result, calls.PATIENCE_S)
        attend = attention_pb2_grpc.AttentionServiceStub(channel).Attend
        asked = [attend.future(messages.random_attend(number), timeout=calls.PATIENCE_S) for number in range(8)]
        time.sleep(0.5)  # noqa: ASYNC251 (on purpose)
        await server.drain()
        await server.stop()
        codes = await asyncio.to_thread(lambda: {call.code() for call in asked})
    assert codes <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK}
    assert server.engine.refused_at > 0, "none has arrived in time"


@pytest.mark.parametrize(("quiet_s", "most_s"), [(1.0, calls.PATIENCE_S), (calls.PATIENCE_S, 0.1)])
async def test_it_refuses_what_comes_until_nothing_does_or_for_so_long(
    quiet_s: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnserve_server.server.LAST_CALLS_S", quiet_s)
    monkeypatch.setattr("attnserve_server.server.MOST_LAST_CALLS_S", most_s)
    config = Config(listen="127.0.0.1:0", http_listen="127.0.0.1:0", device="cpu", cache_bytes=1 << 20)
    server = Stopped(config, configured_device)
    await server.start()
    draining = asyncio.create_task(server.drain())
    begin = time.monotonic()
    if quiet_s < most_s:
        while time.monotonic() < begin + 1.5 * quiet_s:
            await asyncio.sleep(quiet_s / 10)
            assert not draining.done()
            with pytest.raises(Draining):
                server.engine.check_open()
    async with asyncio.timeout(calls.PATIENCE_S / 2):
        await draining
    await server.stop()


async def test_a_reply_that_is_read_right_after_the_grace_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnserve_server.server.LAST_REPLIES_S", calls.PATIENCE_S)
    addresses: dict[str, Any] = {"listen": "127.0.0.1:0", "http_listen": "127.0.0.1:0"}
    config = Config(**addresses, device="cpu", cache_bytes=1 << 20, drain_delay=0.0, drain_grace=0.0)
    server = Stopped(config, configured_device)
    address, http_address = await server.start()
    with grpc.insecure_channel(address, calls.ANY_LENGTH) as channel:
        stream = calls.Stream(channel)
        stream.send(calls.call(1, calls.large_reply()))
        admitted = partial(calls.metric, http_address, "attnserve_in_flight_requests")
        await asyncio.to_thread(calls.until, lambda: admitted() == 1, "it is there")
        await server.drain()
        assert server.cuts_off
        stopping = asyncio.create_task(server.stop())
        assert [reply.id for reply in await asyncio.to_thread(stream.rest)] == [1]
        await stopping
    assert not server.cuts_off


def test_the_command_asks_a_draining_server(
    start_server: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    """As a liveness probe it must not have a server killed that still answers; and who wonders about it can ask."""
    server = start_server()
    with draining(server) as (_, stream):
        assert main(["health", server.address]) == 1
        assert main(["health", "--live", server.address]) == 0
        assert capsys.readouterr().out == "not ready\nalive\n"
        for command in ("info", "layers", "caches"):
            assert main([command, "--json", server.address]) == 0
            json.loads(capsys.readouterr().out)
        with Client(server.address, retries=0) as client, pytest.raises(UnavailableError, match="backend unhealthy"):
            client.layers.list()  # docs/troubleshooting.md
        assert [reply.id for reply in stream.rest()] == [1]


@pytest.mark.parametrize("transport", ["stream", "unary"])
async def test_the_sdk_asks_a_draining_server_about_itself(
    start_server: Callable[..., Server], transport: Literal["stream", "unary"]
) -> None:
    """Clients that have known it before, and others."""
    server = start_server()
    clients = Client(server.address, transport=transport, retries=0), Client(server.address, retries=0)
    tasks = AsyncClient(server.address, transport=transport, retries=0), AsyncClient(server.address, retries=0)
    assert clients[0].is_ready()
    assert await tasks[0].is_ready()
    with draining(server) as (_, stream):
        for client, task in zip(clients, tasks, strict=True):
            assert (client.is_ready(), client.is_alive()) == (False, True)
            assert (await task.is_ready(), await task.is_alive()) == (False, True)
            assert client.server_info() == await task.server_info()
            with pytest.raises(UnavailableError):
                client.create_cache(2, 8)
            client.close()
            await task.close()
        assert [reply.id for reply in stream.rest()] == [1]


def test_an_interrupt_ends_the_draining(start_server: Callable[..., Server]) -> None:
    """Whoever presses Ctrl-C again does not want to wait. SIGTERM and SIGHUP, however many, are what they were."""
    server = start_server("--drain-grace", "1h", *PATIENT)
    metric = partial(calls.metric, server.http_address)
    # A tenth of a second or two of work each; and however fast it is done, the answer to the first waits to be read.
    slow = messages.random_attend(0, 2048, heads=1, width=32, dtype=np.float64, softcap=1.0)
    with grpc.insecure_channel(server.address, calls.ANY_LENGTH) as channel:
        stream = calls.Stream(channel)
        stream.send(calls.call(1, calls.large_reply()), *(calls.call(number, slow) for number in range(2, 10)))
        calls.until(lambda: metric("attnserve_in_flight_requests") >= 1, "they are there")
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            server.process.send_signal(number)
        calls.until(lambda: calls.get(server.http_address, "/readyz")[0] == 503, "it is not ready")
        stream.send(calls.call(10, messages.random_attend(0)))
        calls.until(lambda: metric("attnserve_rejected_requests_total", reason="draining") >= 1, "it takes nothing new")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(calls.PATIENCE_S) == CUT_OFF
        stream.vanish()
    assert "interrupted while draining" in server.stderr()


def test_an_interrupt_that_cuts_nothing_off_is_an_ordinary_end(start_server: Callable[..., Server]) -> None:
    server = start_server("--drain-delay", "1h")
    with grpc.insecure_channel(server.address, calls.ANY_LENGTH) as channel:
        stream = calls.Stream(channel)
        stream.send(calls.call(1, calls.large_reply()))
        calls.until(lambda: calls.metric(server.http_address, "attnserve_in_flight_requests") == 1, "it is there")
        server.process.send_signal(signal.SIGINT)
        calls.until(lambda: calls.get(server.http_address, "/readyz")[0] == 503, "it is not ready")
        assert [reply.id for reply in stream.replies(1)] == [1]
        calls.until_nothing_is_in_flight(server.http_address)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
            server.process.send_signal(number)
        stream.send(calls.call(2, messages.random_attend(0)))
        assert [(reply.id, reply.error.code) for reply in stream.replies(1)] == [(2, 0)], "it takes calls for an hour"
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(calls.PATIENCE_S) == 0
        stream.half_close()
        assert stream.rest() == []
    assert server.stderr().endswith(" ended\n")
    assert "cut off" not in server.stderr()


def test_an_idle_stream_does_not_keep_a_server_from_ending(start_server: Callable[..., Server]) -> None:
    server = start_server("--drain-grace", "60s")
    with grpc.insecure_channel(server.address) as channel:
        stream = calls.Stream(channel)
        stream.send(calls.call(1, messages.random_attend(0)))
        assert len(stream.replies(1)) == 1
        server.process.send_signal(signal.SIGTERM)
        assert stream.rest() == []
        assert server.process.wait(calls.PATIENCE_S) == 0


def test_two_servers_do_not_share_a_port(server: Server) -> None:
    flags = ["--listen", server.address, "--http-listen", "127.0.0.1:0", *POOL]
    command = [sys.executable, "-m", "attnserve_server", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=calls.PATIENCE_S, check=False)
    assert done.returncode == 1
    assert server.address in done.stderr


def test_a_unix_socket(start_server: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = start_server("--listen", f"unix:{path}", "--max-batch-requests", "3", "--threads", "1", *PATIENT)
    assert server.address == f"unix:{path}"
    assert path.is_socket()
    request = messages.random_attend(0)
    with grpc.insecure_channel(server.address) as channel:
        stream = calls.Stream(channel)
        with Occupied(server) as device:  # however long it takes to read them
            stream.send(*(calls.call(number, request) for number in range(7)))
            device.until_waiting(7)
        replies = stream.replies(7)
        assert sorted(reply.attend.batch_size for reply in replies) == [1, 3, 3, 3, 3, 3, 3]
        info = pb.ServerInfoResponse.FromString(calls.unary(channel, "ServerInfo", b""))
        assert (info.limits.max_batch_requests, info.threads) == (3, 1)
        assert server.startup["computes_on"].endswith(", 1 threads")
        stream.half_close()


def test_many_callers_at_once_get_their_own_answers(server: Server) -> None:
    """Unary calls from threads with channels of their own, all at once: answers are not mixed up."""
    answered: list[int] = []
    failures: list[BaseException] = []

    def ask(place: int) -> None:
        try:
            with grpc.insecure_channel(server.address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
                futures = []
                for number in range(25):
                    request = messages.random_attend(1000 * place + number, 1 + number % 3)
                    futures.append((request, calls.unary_future(channel, "Attend", request.SerializeToString())))
                for request, future in futures:
                    reply = pb.AttendResponse.FromString(future.result())
                    calls.assert_answers(reply, request)
                    answered.append(place)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(answered) == 100


def test_a_unix_socket_that_is_in_use_is_an_error(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """GRPC by itself would take the socket over, and remove it when it ends."""
    listen = f"unix:{tmp_path}/socket"
    start_server("--listen", listen)
    second = subprocess.run(
        [sys.executable, "-m", "attnserve_server", "--listen", listen, "--http-listen", "127.0.0.1:0", *POOL],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert second.returncode == 1
    assert "another server listens there" in second.stderr
    query = np.ones((1, 2, 4), np.float32)
    with Client(listen) as client:
        assert client.attend(query, query, query).output.shape == (1, 2, 4)


def test_a_socket_that_a_dead_server_left_is_no_hindrance(start_server: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    start_server("--listen", f"unix:{path}")


def test_what_is_still_computed_when_the_grace_is_over_is_cut_off(start_server: Callable[..., Server]) -> None:
    server = start_server("--drain-grace", "100ms", "--device", "cpu", "--max-request-flops", "1e13")
    query = np.ones((4, 16384, 64), np.float64)  # no fast kernel computes float64: this takes minutes
    with Client(server.address, retries=0) as client:
        future = client.submit(query, query, query, softcap=5.0)
        calls.until(lambda: calls.metric(server.http_address, "attnserve_in_flight_requests") == 1, "it is admitted")
        calls.until(lambda: calls.metric(server.http_address, "attnserve_queue_requests") == 0, "it is computed")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(calls.PATIENCE_S) == 3
        with pytest.raises(AttnServeError):
            future.result(calls.PATIENCE_S)


def test_one_who_does_not_read_leaves_room_for_others(start_server: Callable[..., Server]) -> None:
    server = start_server("--max-requests", "64")
    request = messages.random_attend(0, 64)
    with grpc.insecure_channel(server.address) as channel:
        stalled = calls.Stream(channel)
        for start in range(0, 4000, 8):
            stalled.send(*(calls.call(start + number, request) for number in range(8)))
        calls.until(lambda: calls.metric(server.http_address, "attnserve_in_flight_requests") >= 16, "it has its share")
        query = np.ones((1, 2, 4), np.float32)
        with Client(server.address) as client:
            for _ in range(20):
                assert client.attend(query, query, query).output.shape == (1, 2, 4)
        stalled.vanish()
