"""Many connections, each of which sends messages of tiny calls without end: everybody is answered, and others are."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import calls
import grpc
import messages
import pytest
from conftest import Server

from attnserve.v1 import attention_pb2 as pb

CONNECTIONS = 100
OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))


class Connection:
    """Sends the same message again and again, on a stream of its own."""

    def __init__(self, address: str, message: bytes) -> None:
        self._channel = grpc.insecure_channel(address, OPTIONS)
        method: Any = self._channel.stream_stream(calls.SERVICE + "AttendStream", None, None)
        self._rpc = method(itertools.repeat(message))
        self.answers = 0
        self.ended: grpc.StatusCode | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for _ in self._rpc:
                self.answers += 1
        except grpc.RpcError as error:
            self.ended = error.code()

    def close(self) -> None:
        self._rpc.cancel()
        self._thread.join()
        self._channel.close()


def message_of(count: int) -> bytes:
    """A message of so many tiny calls."""
    request = messages.random_attend(0, 1, heads=1, width=4)
    return pb.AttendStreamRequest(calls=[calls.call(number, request) for number in range(count)]).SerializeToString()


@pytest.mark.parametrize("count", [20, 500])
def test_every_stream_begins_and_goes_on(server: Server, count: int) -> None:
    """An RPC that a server has not begun for 2 s, such as one that only reads messages, is cancelled by gRPC."""
    request = messages.random_attend(1)
    connections = [Connection(server.address, message_of(count)) for _ in range(CONNECTIONS)]
    try:
        # Others' calls, each on a connection of its own, are answered meanwhile.
        for _ in range(5):
            with grpc.insecure_channel(server.address, OPTIONS) as other:
                reply = calls.unary(other, "Attend", request.SerializeToString())
                calls.assert_answers(pb.AttendResponse.FromString(reply), request)
        calls.until(lambda: all(each.answers >= 2 or each.ended for each in connections), "all are answered")
        assert {each.ended for each in connections} == {None}
    finally:
        for each in connections:
            each.close()
    calls.until_nothing_is_in_flight(server.http_address)
