"""How a client is configured."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from settled import settings_of

from attnserve import AsyncClient, Client, ClientClosedError, UnavailableError


@pytest.mark.parametrize("client_class", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("transport", "pigeon"),
        ("timeout", -1),
        ("timeout", "soon"),
        ("timeout", "3"),
        ("timeout", b"3"),
        ("timeout", True),
        ("timeout", ...),
        ("timeout", math.nan),
        ("transport", None),
        ("transport", np.zeros(2)),
        ("retries", True),
        ("retries", np.True_),
        ("streams", True),
        ("refresh", True),
        ("options", {"grpc.own": 1}),
        ("options", [("grpc.own",)]),
        ("options", None),
        ("retries", -1),
        ("retries", None),
        ("retries", "3"),
        ("retries", 1.5),
        ("streams", 0),
        ("streams", "2"),
        ("streams", 1.5),
        ("refresh", 0),
        ("refresh", math.inf),
        ("refresh", None),
        ("refresh", "often"),
        ("token", 3),
        ("token", ""),
        ("token", "two words"),
        ("tls", True),
        ("tracing", "always"),
        ("tracing", None),
        ("address", ""),
        ("address", "127.0.0.1:65536"),
        ("address", ["127.0.0.1:1", "[::1]:99999999"]),
        ("address", "127.0.0.1:0"),
        ("address", "unix:"),
        ("address", "unix://"),
        ("address", "dns:///localhost:65536"),
        ("address", "ipv4:127.0.0.1:1,127.0.0.1:65536"),
        ("address", "localhost"),
        ("address", "127.0.0.1:"),
        ("address", " 127.0.0.1:8001"),
        ("address", "127.0.0.1:8001/"),
        ("address", "::1:8001"),
        ("address", "http://127.0.0.1:8001"),
        ("address", "dns:///attnserve.example"),
        ("address", "ipv4:///10.0.0.1"),
        ("address", "ipv4://10.0.0.1:1"),
        ("address", "127.0.0.1:1,127.0.0.1:2"),
        ("address", ["127.0.0.1:1", "localhost"]),
        ("address", ["127.0.0.1:1", 8001]),
        ("address", 8001),
        ("address", None),
    ],
)
def test_arguments_that_make_no_sense_are_refused(client_class: Any, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: .*expected .*, found ") as caught:
        client_class(**{field: value})
    assert type(caught.value) is ValueError, "no request has failed"


@pytest.mark.parametrize(
    "address",
    [
        "localhost:1",
        "localhost:65535",
        "[::1]:1",
        "dns:///[::1]:1",
        "dns:name:1",
        "dns:/name:1",
        "dns://10.0.0.1:53/name:1",
        "dns:///%5B::1%5D:1",
        "ipv4:10.0.0.1:1",
        "ipv4:/10.0.0.1:1",
        "ipv4:///10.0.0.1:1",
        "ipv6:[::1]:1,[::2]:1",
        "ipv6:%5B::1%5D:1",
        "unix:relative",
        "unix:///run/a.sock",
        "unix-abstract:name",
        "xds:///name",
    ],
)
def test_addresses_that_grpc_takes_are_taken(address: str) -> None:
    assert settings_of(address).target.name == address


def test_a_name_that_cannot_be_looked_up_is_a_server_that_is_not_there() -> None:
    unknown = pytest.raises(UnavailableError, match=r"'no\.\.name' is no name that can be looked up")
    with Client("dns:///no..name:8001") as client, unknown:
        client.server_info(timeout=60)


def test_the_callers_channel_options_win() -> None:
    settings = settings_of("host:1", options=(("grpc.max_send_message_length", 7), ("grpc.own", 1)))
    options = dict(settings.channel_options("host:1"))
    assert (options["grpc.max_send_message_length"], options["grpc.own"]) == (7, 1)
    assert options["grpc.max_receive_message_length"] == -1


def test_channel_options_are_those_that_were_given() -> None:
    """Whatever their list has later."""
    given = [("grpc.own", 1)]
    settings = settings_of("host:1", options=given)
    given.clear()
    assert dict(settings.channel_options("host:1"))["grpc.own"] == 1


@pytest.mark.parametrize(("address", "milliseconds"), [("host:1", 5000), ("dns:///host:1", 1000)])
def test_the_only_server_has_longer_to_connect_than_one_of_several(address: str, milliseconds: int) -> None:
    options = dict(settings_of(address).channel_options("10.0.0.1:1"))
    assert options["grpc.min_reconnect_backoff_ms"] == milliseconds


@pytest.mark.parametrize(("given", "taken"), [(np.float32(3), 3.0), (7, 7.0), (0, 0.0), (1e300, None), (None, None)])
def test_a_timeout_is_a_number_of_seconds(given: Any, taken: float | None) -> None:
    assert settings_of("host:1", timeout=given).timeout == taken


def test_servers_may_be_looked_up_several_times_a_second() -> None:
    with Client("localhost:1", refresh=0.25):
        pass


@pytest.mark.parametrize("client_class", [Client, AsyncClient])
def test_what_a_client_says_of_itself(client_class: Any) -> None:
    client = client_class("localhost:1")
    assert repr(client) == f"{client_class.__name__}('localhost:1')"
    with pytest.raises(TypeError, match="make one in each process"):
        pickle.dumps(client)


def test_a_closed_client_says_so_and_is_not_entered_again() -> None:
    with Client("localhost:1") as client:
        pass
    assert repr(client) == "Client('localhost:1', closed)"
    with pytest.raises(ClientClosedError, match=r"^the client is closed$"), client:
        pass


async def test_a_closed_client_for_asyncio_says_so_and_is_not_entered_again() -> None:
    async with AsyncClient("localhost:1") as client:
        pass
    assert repr(client) == "AsyncClient('localhost:1', closed)"
    with pytest.raises(ClientClosedError, match=r"^the client is closed$"):
        async with client:
            pass
