"""Proxies that the environment names: none is used unless the options of a client say so."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import calls
import pytest
from askers import arrays
from conftest import Server

from attnserve import TLS, AsyncClient, Client, Token, UnavailableError
from attnserve._commands.cli import main

USED = [("grpc.enable_http_proxy", 1)]


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What listens where all variables say that the proxy is."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(calls.PATIENCE_S)
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{listening.getsockname()[1]}")
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("GRPC_ADDRESS_HTTP_PROXY", f"127.0.0.1:{listening.getsockname()[1]}")
        monkeypatch.setenv("GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES", "127.0.0.0/8")
        yield listening


async def test_a_client_goes_past_it(proxy: socket.socket, server: Server) -> None:
    asked = arrays()
    for transport in ("stream", "unary"):
        with Client(server.address, transport=transport, token="secret") as client:
            client.attend(*asked)
            client.server_info()
        async with AsyncClient(server.address, transport=transport) as in_tasks:
            await in_tasks.attend(*asked)
    assert main(["info", server.address]) == main(["health", server.address]) == 0
    proxy.settimeout(0)
    with pytest.raises(BlockingIOError):
        proxy.accept()


def test_it_is_used_if_the_options_say_so(proxy: socket.socket, server: Server) -> None:
    """That of one variable; that of another for some addresses stays unused."""
    with Client(server.address, options=USED, retries=0) as client:
        future = client.submit(*arrays())
        connection, _ = proxy.accept()
        with connection:
            connection.settimeout(calls.PATIENCE_S)
            assert connection.recv(1000).startswith(f"CONNECT {server.address} HTTP/1.1\r\n".encode())
            connection.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        with pytest.raises(UnavailableError, match="403"):
            future.result(calls.PATIENCE_S)


def test_it_gets_no_token_in_plaintext(server: Server) -> None:
    with pytest.raises(ValueError, match=f"^token: {server.address} would get it unencrypted; "):
        Client(server.address, options=USED, token="secret")
    for option in (("grpc.enable_http_proxy", ""), ("grpc.address_http_proxy_enabled_addresses", "127.0.0.0/8")):
        with pytest.raises(ValueError, match="would get it unencrypted; "):
            Client(server.address, options=[option], token="secret")
    Client("unix:/run/attnserve", options=USED, token="secret").close()
    Client(server.address, options=USED, token="secret", tls=TLS()).close()
    Client(server.address, options=USED, token=Token("secret", plaintext=True)).close()
