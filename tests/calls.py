"""A caller of the real server that tests control: raw messages on a stream, and the server's metrics."""

from __future__ import annotations

import queue
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import grpc
import messages
import numpy as np
import oracle
from google.protobuf.message import Message
from google.rpc import status_pb2
from prometheus_client.parser import text_string_to_metric_families

from attnserve.v1 import attention_pb2 as pb

PATIENCE_S = 60.0
ANY_LENGTH = (("grpc.max_receive_message_length", -1),)
"""Channel options that allow it to read `large_reply`."""
SERVICE = "/attnserve.v1.AttentionService/"

M = TypeVar("M", bound=Message)


class Stream:
    """One AttendStream call. Messages are sent at once; replies are read one by one."""

    closing = False
    """Whether a response read so far asked for the stream to be closed."""

    def __init__(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method: Any = channel.stream_stream(SERVICE + "AttendStream")
        self._call = method(iter(self._messages.get, None), timeout=PATIENCE_S, metadata=metadata)
        self._replies = self._read()

    def send(self, *calls: pb.AttendStreamCall, cancel: Iterable[int] = ()) -> None:
        """Sends one message."""
        self.send_bytes(pb.AttendStreamRequest(calls=calls, cancel=cancel).SerializeToString())

    def send_bytes(self, message: bytes) -> None:
        """Sends bytes, which need not be a valid message."""
        self._messages.put(message)

    def half_close(self) -> None:
        """Says that nothing more will be sent."""
        self._messages.put(None)

    def vanish(self) -> None:
        """Cancels the call."""
        self._call.cancel()
        self._messages.put(None)

    def _read(self) -> Iterator[pb.AttendStreamReply]:
        for message in self._call:
            response = pb.AttendStreamResponse.FromString(message)
            self.closing |= response.closing
            yield from response.replies

    def replies(self, count: int) -> list[pb.AttendStreamReply]:
        """The next replies."""
        return [next(self._replies) for _ in range(count)]

    def rest(self) -> list[pb.AttendStreamReply]:
        """All replies until the server ends the stream, which must end well."""
        replies = list(self._replies)
        assert self._call.code() == grpc.StatusCode.OK
        return replies

    def error(self) -> tuple[grpc.StatusCode, status_pb2.Status]:
        """The error of the stream, which must fail before another reply."""
        try:
            reply = next(self._replies, None)
        except grpc.RpcError:
            return self._call.code(), status_of(self._call)
        raise AssertionError(f"the stream did not fail but went on with {reply}")


def call(call_id: int, attend: pb.AttendRequest | None, **fields: Any) -> pb.AttendStreamCall:
    """One call."""
    return pb.AttendStreamCall(id=call_id, attend=attend, **fields)


def unary(channel: grpc.Channel, method: str, message: bytes, **options: Any) -> bytes:
    """The reply to a unary call, raw."""
    reply: bytes = unary_future(channel, method, message, **options).result()
    return reply


def unary_future(channel: grpc.Channel, method: str, message: bytes, **options: Any) -> Any:
    """The future of the reply to a unary call."""
    callable_: Any = channel.unary_unary(SERVICE + method)
    return callable_.future(message, **{"timeout": PATIENCE_S, **options})


def status_of(error: Any) -> status_pb2.Status:
    """The google.rpc.Status attached to the error of a call; an empty one if there is none."""
    trailing = dict(error.trailing_metadata() or ())
    return status_pb2.Status.FromString(trailing.get("grpc-status-details-bin", b""))


def detail(status: status_pb2.Status, kind: type[M]) -> M:
    """The only detail of a kind in a status."""
    (found,) = (packed for packed in status.details if packed.Is(kind.DESCRIPTOR))
    message = kind()
    assert found.Unpack(message)
    return message


def assert_answers(reply: pb.AttendResponse, request: pb.AttendRequest) -> None:
    """Asserts that the reply answers this request (float32, no option but `causal`) and no other."""
    query, key, value = (messages.array(given) for given in (request.query, request.key, request.value))
    expected = oracle.attend(query, key, value, causal=request.causal)
    np.testing.assert_allclose(messages.array(reply.output), expected.output, rtol=0, atol=2e-6)


def long_running(length: int = 1024) -> pb.AttendRequest:
    """A request that keeps a CPU busy for about half a second, or four times as long at twice the length.

    No fast kernel computes float64, and with its softcap it is written out; two such requests exceed a batch.
    """
    return messages.random_attend(0, length, heads=8, width=64, dtype=np.float64, softcap=1.0)


def large_reply() -> pb.AttendRequest:
    """A request with a reply of 9 MB: it stays in flight until its caller reads, since gRPC reads little ahead."""
    return messages.random_attend(0, 1500, heads=1, width=1, return_scores=pb.SCORE_STAGE_RAW)


def get(http_address: str, path: str) -> tuple[int, str]:
    """Status and body of a page on the HTTP port."""
    try:
        with urllib.request.urlopen(f"http://{http_address}{path}", timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def metric(http_address: str, name: str, **labels: str) -> float:
    """The value of a metric now."""
    return value(get(http_address, "/metrics")[1], name, **labels)


def value(page: str, name: str, **labels: str) -> float:
    """The value of a metric on a page of them."""
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    raise AssertionError(f"no {name} with {labels}")


def rejections(http_address: str) -> float:
    """How many requests a server has refused, for whatever reason."""
    _, page = get(http_address, "/metrics")
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == "attnserve_rejected_requests_total")


def until(condition: Callable[[], bool], what: str, found: Callable[[], object] = str) -> None:
    """Polls until a condition holds. `found` gives what to report if it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"still not: {what} {found()}"
        time.sleep(0.01)


def until_nothing_is_in_flight(http_address: str) -> None:
    """Waits until no request and no byte is in flight or queued."""
    names = [f"attnserve_{name}" for name in ("in_flight_requests", "in_flight_bytes", "queue_requests", "queue_bytes")]
    until(lambda: all(metric(http_address, name) == 0 for name in names), "nothing is in flight")
