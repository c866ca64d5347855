"""How a client is set up, and when a call is sent again."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc.status_pb2 import Status

from attnserve import AsyncClient, Client, InvalidRequestError, UnavailableError
from attnserve._config import Settings
from attnserve._retry import RetryPolicy


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


@pytest.mark.parametrize("draw", [0.0, 0.3, 1.0])
def test_delays_double_up_to_a_bound_and_are_jittered(draw: float) -> None:
    policy = RetryPolicy(10, first_delay=0.1, longest_delay=1.0, random=lambda: draw)
    share = 0.5 + 0.5 * draw
    delays = [policy.delay(attempts, 0.0, float("inf")) for attempts in range(1, 8)]
    assert delays == pytest.approx([d * share for d in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0)])
    assert policy.delay(11, 0.0, float("inf")) is None


def test_only_the_unavailable_is_tried_again() -> None:
    policy = RetryPolicy(1)
    unavailable = Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="gone")
    assert isinstance(policy.after(unavailable, 1, 0.0, 10.0), float)
    assert isinstance(policy.after(unavailable, 2, 0.0, 10.0), UnavailableError)
    assert isinstance(policy.after(unavailable, 1, 0.0, 0.01), UnavailableError)
    invalid = policy.after(Status(code=3, message="no"), 1, 0.0, 10.0)
    assert isinstance(invalid, InvalidRequestError)
    assert not invalid.resent
    again = policy.after(Status(code=3, message="no"), 2, 0.0, 10.0)
    assert isinstance(again, InvalidRequestError)
    assert again.resent
