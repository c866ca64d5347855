"""The HTTP port, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import certificates
import pytest
from loopback import loopback
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from rpcs import ANYBODY, new_metrics

from attnserve_server.access.tls import ServerTls
from attnserve_server.observability import scraped
from attnserve_server.observability.health import Health
from attnserve_server.observability.http import HttpServer
from attnserve_server.observability.metrics import Metrics
from attnserve_server.observability.refusals import Refusals
from attnserve_server.settings.units import Address, parse_address
from attnserve_server.start_errors import ListenError


class Served(NamedTuple):
    port: int
    metrics: Metrics
    health: Health


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: str


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    metrics, health = Metrics("1.2.3", "2.13.0", "cpu", ""), Health()
    server = HttpServer("127.0.0.1:0", metrics.registry, health, ANYBODY, None, Refusals(), patience_s=1.5)
    address = parse_address(await server.start())
    assert address.host == "127.0.0.1"
    yield Served(address.port, metrics, health)
    await server.stop()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)


async def send(port: int, raw: bytes) -> Answer | None:
    """The answer to these bytes, read until the server closes; None if there is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    await writer.wait_closed()
    if not answer:
        return None
    head, _, body = answer.decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return Answer(int(first.split()[1]), headers, body)


async def get(port: int, path: str, method: str = "GET", headers: str = "") -> Answer:
    answer = await send(port, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())
    assert answer is not None
    assert answer.headers["connection"] == "close"
    return answer


async def test_metrics_as_text_and_as_openmetrics(served: Served) -> None:
    served.metrics.received(1234)
    answer = await get(served.port, "/metrics?from=a-browser")
    assert (answer.status, int(answer.headers["content-length"])) == (200, len(answer.body))
    assert answer.headers["content-type"].startswith("text/plain; version=")
    (family,) = [f for f in parse_text(answer.body) if f.name == "attnserve_received_bytes"]
    assert family.samples[0].value == 1234
    several = "Accept: text/html\r\nACCEPT: application/openmetrics-text; version=1.0.0\r\n"
    answer = await get(served.port, "/metrics", headers=several)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    (family,) = [f for f in parse_openmetrics(answer.body) if f.name == "attnserve_received_bytes"]
    assert family.samples[0].value == 1234


@pytest.mark.parametrize(
    "accept",
    [
        "text/plain;version=a",
        'application/openmetrics-text; version="1.0.0"',
        "application/openmetrics-text;version=1a;escaping=dots",
        "application/openmetrics-text;version=2.\nX-Injected: 1",
        f"text/plain;version={'9' * 10_000}",
    ],
    ids=["no number", "in quotes", "half a number", "a line", "a long number"],
)
async def test_a_format_of_an_odd_version_is_not_asked_for(served: Served, accept: str) -> None:
    plain = await get(served.port, "/metrics")
    answer = await get(served.port, "/metrics", headers=f"Accept: {accept}\r\n")
    assert (answer.status, answer.headers.keys()) == (200, plain.headers.keys())
    assert answer.headers["content-type"] == plain.headers["content-type"]
    both = await get(
        served.port, "/metrics", headers=f"Accept: {accept}, application/openmetrics-text;version=1.0.0\r\n"
    )
    assert both.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0;")


async def test_liveness_and_readiness_are_apart(served: Served) -> None:
    for state, live, ready in (
        ("starting", 200, 503),
        ("serving", 200, 200),
        ("draining", 200, 503),
        ("failed", 503, 503),
    ):
        served.health.set(state)  # type: ignore[arg-type]
        healthz, readyz = await get(served.port, "/healthz"), await get(served.port, "/readyz")
        assert (healthz.status, readyz.status) == (live, ready)
        assert healthz.body == readyz.body == f"{state}\n"


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz"])
async def test_head_is_get_without_the_body(served: Served, path: str) -> None:
    whole, head = await get(served.port, path), await get(served.port, path, "HEAD")
    assert head.status == whole.status
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert head.body == ""
    assert int(head.headers["content-length"]) > 0


async def test_anything_else_is_refused(served: Served) -> None:
    for path in ("/", "/metrics/", "/healthz/../metrics", "http://localhost/metrics"):
        assert (await get(served.port, path)).status == 404
    answer = await get(served.port, "/metrics", "POST")
    assert (answer.status, answer.headers["allow"]) == (405, "get, head")


async def test_a_body_does_not_cost_the_answer(served: Served) -> None:
    length = 1_000_000
    head = f"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()
    answer = await send(served.port, head + bytes(length))
    assert answer is not None
    assert answer.status == 405


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics SPDY/3\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00", 400),
        (b"\xff\xfe \x00 HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 40_000 + b"\r\n\r\n", 431),
        (b"x" * 40_000, 431),
        (b"", 408),
        (b"GET /metrics HTTP/1.1\r\nHost: slow", 408),
    ],
)
async def test_what_is_no_request(served: Served, raw: bytes, status: int) -> None:
    answer = await send(served.port, raw)
    assert answer is not None
    assert answer.status == status
    assert (await get(served.port, "/healthz")).status == 200


async def test_a_peer_that_resets_the_connection_leaves_no_traceback(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    peer = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", served.port))
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing sends a reset

    gone = asyncio.Event()

    def reset(writer: asyncio.StreamWriter) -> bool:
        """Called after the answer is written and before the connection is closed."""
        peer.close()
        gone.set()
        return True

    monkeypatch.setattr(asyncio.StreamWriter, "can_write_eof", reset)
    peer.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
    await asyncio.wait_for(gone.wait(), 60)
    monkeypatch.undo()
    assert (await get(served.port, "/healthz")).status == 200  # by now, anything due has been logged
    assert caplog.records == []


@pytest.mark.parametrize("raw", [b"", b"GET /healthz HTTP/1.1\r\n"])
async def test_a_peer_that_says_nothing_whole_and_leaves_gets_no_answer(served: Served, raw: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(raw)
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()
    await writer.wait_closed()
    assert (await get(served.port, "/healthz")).status == 200


async def test_a_peer_that_never_closes_is_cut_off(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200")

    async def send_on() -> None:
        while True:
            writer.write(b"more")
            await writer.drain()
            await asyncio.sleep(0.01)

    with pytest.raises((ConnectionError, RuntimeError)):  # the latter from uvloop 0.21
        await asyncio.wait_for(send_on(), 60)
    writer.close()


@pytest.mark.parametrize("turns", range(8))
async def test_stopping_ends_open_connections(turns: int) -> None:
    """However far the server has got with accepting one, which takes some turns of this event loop."""
    server = HttpServer("127.0.0.1:0", new_metrics().registry, Health(), ANYBODY, None, Refusals(), patience_s=60)
    address = parse_address(await server.start())
    with socket.create_connection(address) as connection:
        connection.setblocking(False)
        connection.send(b"GET /metrics HTTP/1.1\r\n")
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(server.stop(), 30)
        # With a reset if received bytes were not read.
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 1), 30) == b""
    await server.stop()  # stopping again does nothing


async def test_stopping_waits_for_no_handshake(tmp_path: Path) -> None:
    issued = certificates.Authority(tmp_path).issue_for_server()
    tls = ServerTls(issued.certificate, issued.key, None).http_context()
    server = HttpServer("127.0.0.1:0", new_metrics().registry, Health(), ANYBODY, tls, Refusals(), patience_s=60)
    address = parse_address(await server.start())
    with socket.create_connection(address) as silent:
        # The server completes this handshake only after it has accepted the earlier connection.
        _, writer = await asyncio.open_connection(*address, ssl=unverified())
        await asyncio.wait_for(server.stop(), 30)
        silent.shutdown(socket.SHUT_RDWR)
        writer.transport.abort()


async def test_a_handshake_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    issued = certificates.Authority(tmp_path).issue_for_server()
    tls = ServerTls(issued.certificate, issued.key, None).http_context()
    server = HttpServer("127.0.0.1:0", new_metrics().registry, Health(), ANYBODY, tls, Refusals(), patience_s=0.1)
    address = parse_address(await server.start())
    with socket.create_connection(address) as silent:
        silent.setblocking(False)
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(silent, 1), 30) == b""
    await server.stop()


async def test_a_peer_that_never_ends_tls_is_cut_off(tmp_path: Path) -> None:
    issued = certificates.Authority(tmp_path).issue_for_server()
    tls = ServerTls(issued.certificate, issued.key, None).http_context()
    server = HttpServer("127.0.0.1:0", new_metrics().registry, Health(), ANYBODY, tls, Refusals(), patience_s=0.5)
    address = parse_address(await server.start())

    def ask() -> bytes:
        connection = socket.create_connection(address, timeout=20)
        with unverified().wrap_socket(connection, suppress_ragged_eofs=False) as ending:
            ending.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            answer = b"".join(iter(lambda: ending.recv(1000), b""))
            with socket.socket(fileno=ending.detach()) as silent:
                silent.settimeout(20)
                with contextlib.suppress(ConnectionResetError):
                    assert silent.recv(1) == b""
        return answer

    assert (await asyncio.to_thread(ask)).startswith(b"HTTP/1.1 200")
    await server.stop()


async def test_nothing_is_kept_of_connections_that_have_ended(served: Served) -> None:
    def tasks() -> int:
        gc.collect()
        return sum(
            issubclass(type(each), asyncio.Task) for each in gc.get_objects()
        )  # some objects warn of `isinstance`

    await get(served.port, "/healthz")
    before = tasks()
    for _ in range(20):
        await get(served.port, "/healthz")
    assert tasks() < before + 10


def unverified() -> ssl.SSLContext:
    """A client's context that accepts any server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.mark.parametrize("host", loopback())
async def test_it_says_where_it_listens(host: str) -> None:
    server = HttpServer(str(Address(host, 0)), new_metrics().registry, Health(), ANYBODY, None, Refusals())
    address = parse_address(await server.start())
    assert address.host == host
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
    assert (await asyncio.wait_for(reader.read(), 60)).endswith(b"\r\n\r\nstarting\n")
    writer.close()
    await server.stop()


async def test_a_taken_port_is_an_error() -> None:
    registry, health = new_metrics().registry, Health()
    first = HttpServer("127.0.0.1:0", registry, health, ANYBODY, None, Refusals())
    address = await first.start()
    second = HttpServer(address, registry, health, ANYBODY, None, Refusals())
    with pytest.raises(ListenError, match=f"^http_listen: cannot listen on {address}: Address already in use$"):
        await second.start()
    await second.stop()
    await first.stop()


async def test_a_name_that_is_not_known_is_an_error() -> None:
    registry, health = new_metrics().registry, Health()
    server = HttpServer("nobody.has.this.name.invalid:0", registry, health, ANYBODY, None, Refusals())
    with pytest.raises(ListenError) as caught:
        await server.start()
    assert isinstance(caught.value.__cause__, socket.gaierror)
    assert caught.value.reason == caught.value.__cause__.strerror


class Deaf:
    """What uvloop makes where it can listen on no address."""

    def __init__(self, *sockets: None) -> None:
        self.sockets = sockets
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("deaf", [Deaf(), Deaf(None)], ids=["no socket", "not listening"])
async def test_that_no_address_can_be_listened_on_is_an_error(deaf: Deaf, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_server(*_: object, **__: object) -> Deaf:
        return deaf

    monkeypatch.setattr(asyncio, "start_server", start_server)
    server = HttpServer("127.0.0.1:0", new_metrics().registry, Health(), ANYBODY, None, Refusals())
    with pytest.raises(
        ListenError, match=r"cannot listen on 127\.0\.0\.1:0: none of its addresses can be listened on$"
    ):
        await server.start()
    assert deaf.closed


async def test_a_gauge_that_cannot_be_read_is_a_500_and_no_more(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> float:
        raise RuntimeError("the device is gone")

    served.metrics.watch(scraped.Device(broken, broken, dict))
    answer = await get(served.port, "/metrics")
    assert answer.status == 500
    assert "device" not in answer.body
    assert "the metrics could not be read" in caplog.text
    assert (await get(served.port, "/healthz")).status == 200
