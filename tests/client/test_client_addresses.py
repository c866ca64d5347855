"""What an address names: one server, or several, and how they are looked up."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest
from settled import settings_of

from attnserve import TLS, AsyncClient, Client, UnavailableError
from attnserve._settings.targets import look_up, target_of


def test_what_addresses_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert target_of("host:1").fixed == ("host:1",)
    assert target_of("unix:/run/a.sock").fixed == ("unix:/run/a.sock",)
    assert target_of("ipv4:127.0.0.1:1,127.0.0.1:2").fixed == ("127.0.0.1:1", "127.0.0.1:2")
    assert target_of("ipv6:///%5B::1%5D:1,%5B::2%5D:2").fixed == ("[::1]:1", "[::2]:2")
    assert target_of("dns://8.8.8.8/name:1").fixed == ("dns://8.8.8.8/name:1",), "its own DNS server is gRPC's to ask"
    assert target_of(["a:1", "b:2"]).fixed == ("a:1", "b:2")
    assert target_of(lambda: ["a:1"]).look_up is not None
    named = target_of("dns:///attnserve.example:8001")
    assert named.fixed == ()
    assert named.authority == "attnserve.example"

    def three(host: str, port: int, **options: Any) -> list[Any]:
        assert (host, port) == ("attnserve.example", 8001)
        places = [("10.0.0.2", port), ("10.0.0.1", port), ("10.0.0.1", port), ("fd00::1", port, 0, 0)]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

    monkeypatch.setattr(socket, "getaddrinfo", three)
    assert named.look_up is not None
    assert named.look_up() == ["10.0.0.1:8001", "10.0.0.2:8001", "[fd00::1]:8001"]
    for wrong in ("", [], ["a:1", ""]):
        with pytest.raises(ValueError, match="address"):
            target_of(wrong)


def test_localhost_is_looked_up() -> None:
    assert "127.0.0.1:5" in look_up("localhost", 5)


def test_a_name_that_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*arguments: Any, **options: Any) -> list[Any]:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nothing)
    with Client("dns:///attnserve.invalid:1") as client:
        with pytest.raises(UnavailableError, match=r"attnserve\.invalid.*not known"):
            client.attend([[1.0]], [[1.0]], [[1.0]])  # type: ignore[type-var]
        with pytest.raises(UnavailableError, match="not known"):
            client.server_info()
    with Client(list) as client, pytest.raises(UnavailableError, match="no server"):
        client.server_info()


def without_a_port() -> list[str]:
    return ["localhost"]


def with_an_error() -> list[str]:
    raise KeyError("replicas")


def a_port_alone() -> Any:
    return [8001]


def nothing_at_all() -> Any:
    return None


@pytest.mark.parametrize("transport", ["stream", "unary"])
@pytest.mark.parametrize(
    ("function", "text"),
    [
        (without_a_port, "without_a_port: .*address: expected host:port"),
        (with_an_error, r"with_an_error: .* raised KeyError\('replicas'\)"),
        (a_port_alone, "a_port_alone: .*address: expected host:port"),
        (nothing_at_all, "nothing_at_all: .* raised TypeError"),
    ],
)
async def test_a_function_that_returns_no_addresses(transport: Any, function: Any, text: str) -> None:
    """Calls fail with an error that names it, whichever the client and the transport."""
    with Client(function, transport=transport, retries=1) as client:
        for ask in (lambda: client.attend(*[np.ones((1, 1), np.float32)] * 3), client.server_info):
            with pytest.raises(UnavailableError, match=text):
                ask()
    async with AsyncClient(function, transport=transport, retries=1) as in_tasks:
        with pytest.raises(UnavailableError, match=text):
            await in_tasks.attend(*[np.ones((1, 1), np.float32)] * 3)


def test_a_function_may_return_a_single_address() -> None:
    target = target_of(lambda: "host:1")
    assert target.look_up is not None
    assert target.look_up() == ("host:1",)


def test_what_was_looked_up_must_prove_to_be_who_was_meant() -> None:
    settings = settings_of("dns:///attnserve.example:8001", tls=TLS())
    assert dict(settings.channel_options("10.0.0.1:8001"))["grpc.ssl_target_name_override"] == "attnserve.example"
    assert "grpc.ssl_target_name_override" not in dict(settings.channel_options("pod-0.attnserve:8001"))
