"""Options for gRPC's core on connections and messages, and the addresses it listens on."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import certificates
import grpc
import numpy as np
import pytest
from frames import HEADERS, MAX_STREAMS, Connection
from grpc import StatusCode, aio
from grpc._cython import cygrpc
from loopback import loopback
from settled import settings_of

from attnserve import TLS, Client
from attnserve_server.rpc import port
from attnserve_server.rpc.port import bind, channel_options
from attnserve_server.rpc.stream_life import StreamLife
from attnserve_server.settings.config import Config
from attnserve_server.settings.units import Address
from attnserve_server.start_errors import ListenError

if TYPE_CHECKING:
    from tests.conftest import Server

NAME = "name.test"


def test_grpc_knows_every_option() -> None:
    """GRPC ignores unknown options silently: because of one, idle callers were disconnected for their pings."""
    settings = settings_of("name:1", tls=TLS(server_name="other"))
    server = [*channel_options(Config()), *StreamLife(age=1.0, grace=1.0).channel_options]
    core = Path(cygrpc.__file__).read_bytes()
    names = {name for name, _ in (*settings.channel_options("name:1"), *server)}
    assert len(names) > 15
    assert {name for name in names if name.encode() + b"\0" not in core} == set()


async def test_handlers_end_before_a_server_has_stopped() -> None:
    """Otherwise they are cancelled with the loop, and gRPC writes a traceback after the last line of the log."""
    begun, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(*_: object) -> bytes:
        begun.set()
        while not may_end.is_set():
            with suppress(asyncio.CancelledError):
                await may_end.wait()
        ended.set()
        raise asyncio.CancelledError

    server = aio.server()
    handler = grpc.stream_unary_rpc_method_handler(handle)
    server.add_registered_method_handlers("service", {"Method": handler})
    bound = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{bound}") as channel:
        call = channel.stream_unary("/service/Method")()
        await begun.wait()
        asyncio.get_running_loop().call_later(0.3, may_end.set)  # later than `aio.Server.stop` returns
        await port.stop(server, grace=0)
        assert ended.is_set()
        assert await call.code() in (StatusCode.CANCELLED, StatusCode.UNAVAILABLE)


def test_pings_agree() -> None:
    """The server pings no more often than it lets callers ping it, and is as patient as the documents say."""
    options = dict(channel_options(Config()))
    every, patience = options["grpc.keepalive_time_ms"], options["grpc.keepalive_timeout_ms"]
    assert options["grpc.http2.min_ping_interval_without_data_ms"] <= every < 5 * 60_000
    assert (patience, options["grpc.http2.max_pings_without_data"]) == (options["grpc.http2.ping_timeout_ms"], 0)
    said = " ".join((Path(__file__).parents[2] / "docs" / "operations.md").read_text("utf-8").split())
    assert f"silent for {every // 1000} s is pinged, and its connection ends if it does not answer within" in said
    assert f"within {patience // 1000} s" in said


@pytest.mark.parametrize("tls", [True, False])
async def test_a_connection_that_does_not_begin_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    """Before gRPC itself would, which takes two minutes over TLS."""
    monkeypatch.setattr(port, "HANDSHAKE_TIMEOUT_MS", 500)
    files = certificates.Authority(tmp_path).issue_for_server("server")
    pair = files.key.read_bytes(), files.certificate.read_bytes()
    server = aio.server(options=list(channel_options(Config())))
    address = bind(server, "127.0.0.1:0", (lambda: grpc.ssl_server_credentials([pair])) if tls else None)
    await server.start()
    try:
        async with asyncio.timeout(15):  # less than `SETTINGS_TIMEOUT_MS`
            reader, writer = await asyncio.open_connection(*address.split(":"))
            if tls:
                writer.write(b"\x16\x03\x01")  # the begin of a handshake
            assert (await reader.read() == b"") is tls  # without TLS, the server's settings come first
            writer.close()
    finally:
        await server.stop(0)


@pytest.fixture
async def server() -> AsyncIterator[aio.Server]:
    """A server that has not started."""
    server = aio.server(options=list(channel_options(Config())))
    yield server
    await server.stop(0)


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that `name.test` resolves to: some of this machine, some of others."""
    hosts = ["127.0.0.1", "192.0.2.1", "127.0.0.2", "2001:db8::1", "127.0.0.1"]
    resolve = socket.getaddrinfo

    def known(host: str, *args: Any, **options: Any) -> list[Any]:
        if host == NAME and not hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [info for each in (hosts if host == NAME else [host]) for info in resolve(each, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", known)
    return hosts


def listens(host: str, port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection((host, port), timeout=10.0).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.usefixtures("resolved")
async def test_a_name_is_served_on_all_its_addresses_of_this_machine_at_one_port(server: aio.Server) -> None:
    """Addresses of other machines, and of a family that is not available, are not served."""
    name, _, port = bind(server, f"{NAME}:0", None).rpartition(":")
    await server.start()
    assert name == NAME
    assert [listens(host, int(port)) for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3")] == [True, True, False]


@pytest.mark.usefixtures("resolved")
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
async def test_a_name_of_which_one_address_is_taken_is_refused(server: aio.Server, host: str) -> None:
    with socket.create_server((host, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=rf"^listen: cannot listen on {NAME}:{port}: {host}:{port}: .*in use"):
            bind(server, f"{NAME}:{port}", None)


async def test_a_free_port_is_free_on_all_addresses_of_a_name(
    server: aio.Server, resolved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that is free on the first address but not on another is skipped."""
    resolved[:] = ["127.0.0.1", "127.0.0.2"]
    with socket.create_server(("127.0.0.2", 0)) as taken:
        numbers = [taken.getsockname()[1]]
        ask = socket.socket.bind

        def bind_there_first(probe: socket.socket, address: tuple[str, int]) -> None:
            ask(probe, (address[0], address[1] or (numbers.pop() if numbers else 0)))

        with monkeypatch.context() as patch:
            numbers *= 2  # once for the check that the address is of this machine
            patch.setattr(socket.socket, "bind", bind_there_first)
            port = int(bind(server, f"{NAME}:0", None).rpartition(":")[2])
        assert numbers == []
        assert port != taken.getsockname()[1]
    await server.start()
    assert listens("127.0.0.1", port)
    assert listens("127.0.0.2", port)


async def test_a_name_none_of_whose_ports_is_free_on_all_its_addresses_is_refused(
    server: aio.Server, resolved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved[:] = ["127.0.0.1", "127.0.0.2"]
    with socket.create_server(("127.0.0.2", 0)) as taken:
        number, ask = taken.getsockname()[1], socket.socket.bind
        monkeypatch.setattr(socket.socket, "bind", lambda probe, address: ask(probe, (address[0], number)))
        why = "no port was found that is free on all of its addresses"
        with pytest.raises(ListenError, match=f"^listen: cannot listen on {NAME}:0: {why}$"):
            bind(server, f"{NAME}:0", None)


@pytest.mark.parametrize(
    ("host", "why"), [(NAME, "Name or service not known"), ("a" * 64 + ".test", ".*"), ("192.0.2.1", ".* not ours")]
)
async def test_what_has_no_address_here_is_refused(
    server: aio.Server, resolved: list[str], host: str, why: str
) -> None:
    resolved.clear()
    with pytest.raises(ListenError, match=f"^listen: cannot listen on {host}:1: {why}$"):
        bind(server, f"{host}:1", None)


async def test_why_there_can_be_no_unix_socket(server: aio.Server, tmp_path: Path) -> None:
    """GRPC itself gives no reason; what is in the way stays."""
    (file := tmp_path / "file").write_text("precious")
    (link := tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path, why in (
        (f"/tmp/{'x' * 108}", "the path is too long for a socket"),
        (f"/{'x' * 300}/socket", "the path is too long for a socket"),
        (tmp_path / "none" / "socket", "there is no such directory"),
        (tmp_path, "there is something that is not a socket"),
        (file, "there is something that is not a socket"),
        (link, "there is something that is not a socket"),
    ):
        with pytest.raises(ListenError) as caught:
            bind(server, f"unix:{path}", None)
        assert str(caught.value) == f"listen: cannot listen on unix:{path}: {why}"
    assert file.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_unix_socket_where_the_server_may_not_write(server: aio.Server, tmp_path: Path) -> None:
    (locked := tmp_path / "locked").mkdir(0o555)
    with pytest.raises(ListenError, match=r"the server may not write to that directory$"):
        bind(server, f"unix:{locked}/socket", None)


def test_localhost_is_both_loopback_addresses(start_server: Callable[..., Server]) -> None:
    """As far as this machine has both, and at the one port that the server reports."""
    server = start_server("--listen", "localhost:0")
    name, _, port = server.address.rpartition(":")
    assert name == "localhost"
    one = np.ones((1, 1), np.float32)
    for host in loopback():
        with Client(str(Address(host, int(port)))) as client:
            assert client.attend(one, one, one).output == one


@pytest.mark.parametrize(("max_requests", "most"), [("1", port.CONNECTION_RPCS), ("5000", 5000)])
def test_a_connection_has_so_many_rpcs_at_a_time(
    start_server: Callable[..., Server], max_requests: str, most: int
) -> None:
    server = start_server("--max-requests", max_requests)
    with Connection(server.address) as connection:
        connection.begin("/grpc.health.v1.Health/Check")
        assert connection.until(HEADERS, True, 1)
        assert connection.settings[MAX_STREAMS] == most
