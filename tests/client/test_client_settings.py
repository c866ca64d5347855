"""How a client is set up."""

from __future__ import annotations

from typing import Any

import pytest

from attnserve import AsyncClient, Client, UnavailableError
from attnserve._config import Settings


@pytest.mark.parametrize("client_class", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("transport", "pigeon"),
        ("timeout", -1),
        ("retries", -1),
        ("streams", 0),
        ("address", ""),
        ("address", "127.0.0.1:65536"),
        ("address", ["127.0.0.1:1", "[::1]:99999999"]),
        ("address", "dns:///localhost:65536"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(client_class: Any, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        client_class(**{field: value})


def test_a_name_that_cannot_be_looked_up_is_a_server_that_is_not_there() -> None:
    with Client("dns:///no..name:8001") as client, pytest.raises(UnavailableError, match=r"no\.\.name"):
        client.server_info(timeout=60)


def test_the_callers_channel_options_win() -> None:
    settings = Settings("host:1", "stream", None, 0, 1, (("grpc.max_send_message_length", 7), ("grpc.own", 1)))
    options = dict(settings.channel_options("host:1"))
    assert (options["grpc.max_send_message_length"], options["grpc.own"]) == (7, 1)
    assert options["grpc.max_receive_message_length"] == -1
