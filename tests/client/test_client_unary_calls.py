"""When unary calls are sent, and that nothing stays of those that have ended: both clients, to a peer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import numpy as np
import pytest
from multiplexed import refusal
from peers import SERVICE, good, good_unary, peer

from attnserve import AsyncClient, Client, ProtocolError
from attnserve._rpc import Rpc
from attnserve._settings.retry import Again
from attnserve._transports.unary import UnaryCall
from attnserve.v1 import attention_pb2 as pb

ARRAY = np.ones((1, 1), np.float32)
PAUSE_S = 0.2


class Counted:
    """The unary method of a peer that notes how many calls are in flight on a connection while it computes."""

    def __init__(self) -> None:
        self.connection: Any = None
        self.in_flight: list[int] = []

    def __call__(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        self.in_flight.append(self.connection.in_flight)
        return good_unary(message, context)


def test_a_call_is_in_flight_until_it_is_answered() -> None:
    counted = Counted()
    with peer(good, counted) as address, Client(address, transport="unary") as client:
        counted.connection = client._calls.servers.connection()
        client.attend(ARRAY, ARRAY, ARRAY)
        assert counted.in_flight == [1]
        assert counted.connection.in_flight == 0
        assert not client._calls._unary._calls


async def test_a_call_is_in_flight_until_it_is_answered_in_tasks() -> None:
    counted = Counted()
    with peer(good, counted) as address:
        async with AsyncClient(address, transport="unary") as client:
            counted.connection = client._calls.servers.connection()
            await client.attend(ARRAY, ARRAY, ARRAY)
            await asyncio.sleep(0)
            assert counted.in_flight == [1]
            assert counted.connection.in_flight == 0
            assert not client._calls._unary._tasks


def info(message: bytes, context: grpc.ServicerContext) -> bytes:
    return b""


ASK = Rpc(f"/{SERVICE}/ServerInfo", pb.ServerInfoRequest(), pb.ServerInfoResponse, lambda response: response)


async def test_an_attempt_is_made_after_its_pause_and_no_sooner() -> None:
    with peer(good, more={SERVICE: {"ServerInfo": info}}) as address:
        with Client(address) as client:
            begin = time.monotonic()
            client._calls.ask(ASK, None, None, Again(PAUSE_S))
            assert time.monotonic() - begin >= PAUSE_S
        async with AsyncClient(address) as in_tasks:
            begin = time.monotonic()
            await in_tasks._calls.ask(ASK, None, None, Again(PAUSE_S))
            assert time.monotonic() - begin >= PAUSE_S


def test_what_a_signal_handler_raises_while_a_call_is_sent_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(call: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(UnaryCall, "connect", interrupted)
    with Client("127.0.0.1:1", transport="unary") as client:
        with pytest.raises(KeyboardInterrupt):
            client.submit(ARRAY, ARRAY, ARRAY)
        assert not client._calls._unary._calls


def test_what_goes_wrong_in_a_later_attempt_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that makes it has no other way to say so."""

    def wrong(call: object) -> None:
        raise ValueError("nobody expects this")

    monkeypatch.setattr(UnaryCall, "connect", wrong)
    with Client("127.0.0.1:1") as client, pytest.raises(ProtocolError, match="nobody expects this"):
        client._calls.ask(ASK, 1.0, None, Again(0.001))


async def test_a_call_that_is_held_back_is_sent_after_its_pause_and_no_sooner() -> None:
    with peer(good, good_unary) as address:
        with Client(address, transport="unary") as client:
            begin = fill(client)
            client.attend(ARRAY, ARRAY, ARRAY)
            assert time.monotonic() - begin >= PAUSE_S
        async with AsyncClient(address, transport="unary") as in_tasks:
            begin = fill(in_tasks)
            await in_tasks.attend(ARRAY, ARRAY, ARRAY)
            assert time.monotonic() - begin >= PAUSE_S


def fill(client: Client | AsyncClient) -> float:
    """Has the server say that it has no room, and no budget left for calls to it. Returns when."""
    begin = time.monotonic()
    while client._settings.policy.begun.take(begin):
        pass
    client._calls.servers.connection().replica.room.refused(time.monotonic(), refusal(PAUSE_S), None)
    return begin
