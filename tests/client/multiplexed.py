"""Calls for a multiplexer, and the messages that it has sent for them, read as a stock server would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status

from attnserve import OverloadedError
from attnserve._errors import error_from_status
from attnserve._requests.operation import ATTEND, Operation
from attnserve._requests.reply import Response
from attnserve._servers.replicas import Replica
from attnserve._settings.retry import RetryPolicy
from attnserve._transports.connection import Others
from attnserve._transports.in_flight import Call, Outcome
from attnserve._transports.multiplexer import MESSAGE_BYTES, Multiplexer
from attnserve.v1 import attention_pb2 as pb

POLICY = RetryPolicy(retries=3, first_delay=0.1, longest_delay=5.0, random=lambda: 1.0)
DONE = Response(ATTEND, pb.AttendResponse(), [])


def replica_of(address: str) -> Replica:
    """A server of which nobody is told that it is out of reach."""
    return Replica(address, lambda: None)


class Alone(Multiplexer[Any]):
    """A multiplexer for the only server that there is, unless a test says otherwise."""

    def __init__(
        self,
        policy: RetryPolicy,
        replica: Replica | None = None,
        *,
        others: Callable[[], bool] = lambda: False,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        super().__init__(policy, replica or replica_of(""), beside(others), message_bytes=message_bytes)

    def tick(self, now: float, others: bool = False, excess: Callable[[], int] = lambda: 0) -> list[Outcome[Any]]:
        with self._beside(others, excess):
            return super().tick(now)

    def asked_to_leave(self, stream: int, now: float, others: bool = False) -> None:
        with self._beside(others):
            super().asked_to_leave(stream, now)

    @contextmanager
    def _beside(self, others: bool, excess: Callable[[], int] = lambda: 0) -> Iterator[None]:
        self._others, usual = beside(lambda: others, excess), self._others
        yield
        self._others = usual


def beside(
    exist: Callable[[], bool], excess: Callable[[], int] = lambda: 0, answer: Callable[[], bool] = lambda: False
) -> Others:
    """Other servers, to which no call is moved here."""
    return Others(exist, answer, excess, lambda call: None)


def status(code: grpc.StatusCode) -> Status:
    return Status(code=code.value[0], message="because")


def full(bound: str, delay: float | None, reason: str = "OVERLOADED") -> Status:
    """The status of a server that has no room, as far as a bound says, for some seconds."""
    found = Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="full")
    found.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, metadata={"bound": bound}))
    if delay is not None:
        again = error_details_pb2.RetryInfo()
        again.retry_delay.FromNanoseconds(round(delay * 1e9))
        found.details.add().Pack(again)
    return found


def refusal(delay: float | None) -> OverloadedError:
    """The error of a server that has no room for any call, for some seconds."""
    error = error_from_status(full("requests", delay))
    assert isinstance(error, OverloadedError)
    return error


def call(
    name: Any,
    *,
    operation: Operation = ATTEND,
    priority: int = 1,
    padding: int = 0,
    now: float = 0.0,
    timeout: float | None = None,
) -> Call[Any]:
    request: Any = operation.request_type(priority=priority)
    (request.query if operation is ATTEND else request.input).data = bytes(padding)
    data = request.SerializeToString()
    return Call(name, operation.number, [data[:1], data[1:]], len(data), now, timeout)


def asked(sent: pb.AttendStreamCall) -> pb.AttendRequest | pb.ApplyRequest:
    return sent.apply if sent.WhichOneof("operation") == "apply" else sent.attend


def message(multiplexer: Multiplexer[Any], stream: int, now: float = 0.0) -> pb.AttendStreamRequest | None:
    pieces = multiplexer.next_message(stream, now)
    return None if pieces is None else pb.AttendStreamRequest.FromString(b"".join(pieces))
