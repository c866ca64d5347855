"""A server that has said that it has no room is not asked again before it should have some."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import calls
import grpc
import numpy as np
import pytest
from askers import Transport, array, transport
from conftest import POOL, Server
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status
from multiplexed import Alone, call, full, message, replica_of
from occupied import PATIENT
from peers import good_unary, peer, replies

from attnserve import AsyncClient, AttnServeError, Client, OverloadedError
from attnserve._errors import error_from_status
from attnserve._requests.reply import Reply
from attnserve._servers.replicas import Replica
from attnserve._servers.room import LONGEST, Room
from attnserve._settings.retry import BUDGET_ALWAYS, RetryPolicy
from attnserve._transports.multiplexer import Multiplexer
from attnserve._transports.unary import UnaryCall
from attnserve.v1 import attention_pb2 as pb

__all__ = ["transport"]

UNASKED = "was not asked again"


def refusal(bound: str, delay: float | None) -> AttnServeError:
    return error_from_status(full(bound, delay))


def delay_of(error: OverloadedError | None) -> float:
    assert error is not None
    assert error.retry_delay is not None
    return error.retry_delay


def test_a_refusal_holds_for_as_long_as_it_says() -> None:
    room = Room()
    assert room.refusal(10.0, 1) is None
    room.refused(10.0, refusal("queue_time", 2.0), 100)
    assert room.until == 12.0
    error = room.refusal(11.5, 1)
    assert delay_of(error) == pytest.approx(0.5)
    assert error is not None
    assert (error.code, error.reason, error.bound) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "OVERLOADED",
        "queue_time",
    )
    assert str(error).startswith("full; it said so 1.500 s ago")
    assert len(error.details) == 2, "the delay that it was told is not among them"
    assert room.refusal(12.0, 1) is None


def test_however_long_it_says() -> None:
    room = Room()
    room.refused(0.0, refusal("requests", 1e6), 100)
    assert delay_of(room.refusal(1.0, 1)) == pytest.approx(LONGEST - 1)
    assert room.refusal(LONGEST, 1) is None


def test_a_refusal_says_nothing_of_calls_for_which_there_may_be_room() -> None:
    room = Room()
    room.refused(0.0, refusal("bytes", 1.0), 100)
    assert room.refusal(0.5, 99) is None
    assert delay_of(room.refusal(0.5, 100)) == pytest.approx(0.5)
    room.refused(0.0, refusal("requests", 0.8), 100)
    room.refused(0.1, refusal("requests", 0.2), 100)
    assert delay_of(room.refusal(0.5, 1)) == pytest.approx(0.3), "one that holds for less changes nothing"
    room = Room()
    room.refused(0.0, refusal("bytes", 1.0), None)
    assert room.refusal(0.5, 10**9) is None, "of how many bytes is unknown"
    for nothing in (refusal("flops", 1.0), refusal("caches", 1.0), refusal("requests", None), None):
        room = Room()
        room.refused(0.0, nothing, 100)
        assert room.refusal(0.0, 1000) is None


def test_the_error_that_a_caller_got_is_not_kept() -> None:
    """It would keep the frames through which it was raised, and all that they hold."""
    room, error = Room(), refusal("requests", 1.0)
    kept = weakref.ref(error)
    room.refused(0.0, error, 100)
    del error
    assert kept() is None
    assert room.refusal(0.5, 1) is not None


def refused(policy: RetryPolicy) -> Multiplexer[Any]:
    """A multiplexer without retries whose server has refused a call at 0 s, for one second."""
    multiplexer: Multiplexer[Any] = Alone(policy, replica_of("here"))
    multiplexer.add(first := call("first"), 0.0)
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream)
    ((owner, _),) = multiplexer.resolve(stream, [Reply(first.id, full("requests", 1.0))], 0.0)
    assert owner is first
    return multiplexer


def test_without_retries_it_fails_at_once() -> None:
    policy = RetryPolicy(0)
    while policy.begun.take(0.0):
        pass
    multiplexer = refused(policy)
    multiplexer.add(gone := call("gone"), 0.25)
    multiplexer.add(second := call("second"), 0.25)
    assert multiplexer.wakeup == 0.25
    assert multiplexer.cancel(gone)
    ((owner, error),) = multiplexer.tick(0.25)
    assert owner is second
    assert isinstance(error, OverloadedError)
    assert delay_of(error) == pytest.approx(0.75)
    assert (len(multiplexer), multiplexer.tick(0.25)) == (0, [])
    multiplexer.add(call("third"), 0.5)
    assert len(multiplexer.close()) == 1
    multiplexer.add(fourth := call("fourth"), 1.0)
    stream = multiplexer.opened(1.0)
    sent = message(multiplexer, stream, 1.0)
    assert sent is not None
    assert [each.id for each in sent.calls] == [fourth.id]


def test_as_many_are_sent_as_have_been_answered_and_a_few() -> None:
    policy = RetryPolicy(0)
    multiplexer = refused(policy)
    policy.answered(5, 0.0)
    for name in range(2 * BUDGET_ALWAYS):
        multiplexer.add(call(name), 0.5)
    sent = message(multiplexer, 1, 0.5)
    assert sent is not None
    assert len(sent.calls) == BUDGET_ALWAYS + 5
    assert policy.retried.take(0.5), "that for retries is another"


class Full:
    """A peer that refuses all calls for so many seconds until it is open, and counts them."""

    def __init__(self, delay: float) -> None:
        self.asked = 0
        self.open = threading.Event()
        self._error = full("queue_time", delay)

    def stream(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for data in messages:
            if self.open.is_set():
                yield from replies(data)
                continue
            for each in pb.AttendStreamRequest.FromString(data).calls:
                self.asked += 1
                reply = pb.AttendStreamReply(id=each.id, error=self._error)
                yield pb.AttendStreamResponse(replies=[reply]).SerializeToString()

    def unary(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        if self.open.is_set():
            return good_unary(data, context)
        self.asked += 1
        context.abort_with_status(rpc_status.to_status(self._error))
        raise AssertionError("aborted")


def test_to_a_server_with_room_as_many_are_sent_again_as_were_refused_elsewhere() -> None:
    """The budget is for servers that would probably refuse them again."""
    policy = RetryPolicy(3, first_delay=0.0)
    full_one, free_one = (Elsewhere(replica_of(address)) for address in ("full", "free"))

    def refused(to: Elsewhere) -> UnaryCall[None, Any]:
        call: UnaryCall[None, Any] = UnaryCall(
            None, "", [], None, policy, lambda timeout, avoid: full_one if avoid is None else to, size=1, pinned=True
        )
        call.failed(call.connect()[0], Refused(full("requests", 0.01)))
        return call

    for _ in range(2 * BUDGET_ALWAYS):
        assert refused(free_one).connect()[0] is free_one
    free_one.replica.room.refused(time.monotonic(), refusal("requests", 5.0), 1)
    for _ in range(BUDGET_ALWAYS):
        refused(free_one).connect()
    for to in (free_one, full_one):
        with pytest.raises(OverloadedError):
            refused(to).connect()


class Elsewhere:
    """A connection to a server."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica


class Refused(grpc.RpcError):
    """The error of a call that ended with a status."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def details(self) -> str:
        return self._status.message

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return (("grpc-status-details-bin", self._status.SerializeToString()),)


def test_further_calls_are_told_without_the_server(transport: Transport) -> None:
    server = Full(delay=60.0)
    with peer(server.stream, server.unary) as address, Client(address, transport=transport, retries=0) as client:
        for number in range(BUDGET_ALWAYS + 3):
            unasked = number > BUDGET_ALWAYS
            with pytest.raises(OverloadedError) as raised:
                client.attend(array(1), array(1), array(1), timeout=calls.PATIENCE_S)
            assert (UNASKED in str(raised.value)) == unasked
            assert raised.value.bound == "queue_time"
            assert 0 < delay_of(raised.value) <= (LONGEST if unasked else 60.0)
    assert server.asked == 1 + BUDGET_ALWAYS


def test_they_are_in_tasks(transport: Transport) -> None:
    server = Full(delay=60.0)

    async def run(address: str) -> list[Any]:
        async with AsyncClient(address, transport=transport, retries=0) as client:
            first = await asyncio.gather(client.attend(array(1), array(1), array(1)), return_exceptions=True)
            more = (client.attend(array(1), array(1), array(1)) for _ in range(100))
            return first + await asyncio.gather(*more, return_exceptions=True)

    with peer(server.stream, server.unary) as address:
        errors = asyncio.run(run(address))
    assert all(isinstance(error, OverloadedError) for error in errors)
    assert sum(UNASKED in str(error) for error in errors) == 100 - BUDGET_ALWAYS
    assert server.asked == 1 + BUDGET_ALWAYS


def test_they_are_answered_when_it_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held back at first, then sent, as many as the budget allows. On a stream: `test_client_window`."""
    server, held = Full(delay=2.0), []
    refusal = Room.refusal

    def noted(self: Room, now: float, size: int) -> OverloadedError | None:
        if (found := refusal(self, now, size)) is not None:
            held.append(found)
        return found

    monkeypatch.setattr(Room, "refusal", noted)
    with peer(server.stream, server.unary) as address, Client(address, transport="unary") as client:
        while client._settings.policy.begun.take(time.monotonic()):
            pass
        first = client.submit(array(0), array(0), array(0))
        room = client._calls.servers.connection().replica.room
        calls.until(lambda: room.until > 0, "the first call is refused")
        server.open.set()
        queries = [array(number) for number in range(1, BUDGET_ALWAYS)]
        futures = [first, *(client.submit(query, query, query) for query in queries)]
        outputs = [future.result(calls.PATIENCE_S).output[0, 0] for future in futures]
    assert outputs == list(range(BUDGET_ALWAYS))
    assert held, "unless this process stood still for two seconds"
    assert server.asked == 1


def test_a_real_server_is_asked_by_few(start_server: Callable[..., Server], transport: Transport) -> None:
    """Each call is answered, refused by the server, or told by the SDK; and the server is asked again in time."""
    server = start_server(*PATIENT, "--max-requests", "16", *POOL)
    long, short = np.ones((1, 4096, 8)), np.ones((1, 1, 8))  # float64: half a second, and nothing
    with ExitStack() as clients:
        others = [clients.enter_context(Client(server.address)) for _ in range(4)]  # a stream may have a quarter
        client = clients.enter_context(Client(server.address, transport=transport, retries=0))
        filling = [other.submit(long, long, long, softcap=1.0) for other in 4 * others]
        in_flight = partial(calls.metric, server.http_address, "attnserve_in_flight_requests")
        calls.until(lambda: in_flight() == 16, "the server is full")
        outcomes = []
        while not outcomes or outcomes[-1] is None:  # the server may answer one, between two of the others'
            outcomes.append(client.submit(short, short, short).exception(calls.PATIENCE_S))
        outcomes += [client.submit(short, short, short).exception(calls.PATIENCE_S) for _ in range(200)]
        errors = [error for error in outcomes if error is not None]
        assert all(isinstance(error, OverloadedError) for error in errors)
        unasked = sum(UNASKED in str(error) for error in errors)
        assert calls.rejections(server.http_address) + unasked == len(errors)
        assert unasked > 0
        for future in filling[1:]:
            future.cancel()  # rather than wait for seconds of work
        assert filling[0].result(calls.PATIENCE_S).output.shape == long.shape
        calls.until(lambda: client.submit(short, short, short).exception() is None, "it has room again")
