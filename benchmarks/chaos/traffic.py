"""Callers of all kinds, good and bad. Each does one thing again and again, to a server that must bear it.

Every kind is a function of a client, a source of randomness and a record, for one turn of such a caller. Answers are
checked wherever they can be.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from time import perf_counter
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import grpc
import numpy as np

from attnserve import AttnServeError, Client, DeadlineExceededError, InvalidRequestError
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.settings.units import parse_address
from benchmarks.chaos import projection
from benchmarks.chaos.callers import Tally
from benchmarks.chaos.questions import TOLERANCE, exact

STREAM: Final = "/attnserve.v1.AttentionService/AttendStream"
UNARY: Final = "/attnserve.v1.AttentionService/Attend"
TIMEOUT_S: Final = 60.0
LEASE_S: Final = 1.0
MOST_KEYS: Final = 4096
"""The most keys of a large request: 16 MiB with their values."""


class Record:
    """What happened: questions in `tally`, everything else in `counts`, by its name."""

    def __init__(self, address: str, http_address: str) -> None:
        self.address: Final = address
        self.http_address: Final = http_address
        self.tally: Final = Tally()
        self.counts: Final[Counter[str]] = Counter()


Kind: TypeAlias = Callable[[Client, np.random.Generator, Record], None]


def cancelling(client: Client, random: np.random.Generator, record: Record) -> None:
    """Asks for several things at once and cancels some of them."""
    asked = []
    for _ in range(8):
        question, begin = record.tally.question(), perf_counter()
        asked.append(
            (question, begin, client.submit(question.query, question.key, question.value, causal=question.causal))
        )
    for place in random.permutation(8)[:4]:
        record.counts["cancelled"] += asked[place][2].cancel()
    for question, begin, future in asked:
        try:
            record.tally.take(question, future.result(TIMEOUT_S).output, begin)
        except CancelledError:
            continue
        except AttnServeError as error:
            record.tally.take(question, error, begin)


def impatient(client: Client, random: np.random.Generator, record: Record) -> None:
    """Gives hardly any time."""
    question, begin = record.tally.question(), perf_counter()
    timeout = float(random.uniform(0, 0.01))
    try:
        result = client.attend(question.query, question.key, question.value, causal=question.causal, timeout=timeout)
    except DeadlineExceededError:
        record.counts["too late"] += 1
    else:
        record.tally.take(question, result.output, begin)


def newcomer(client: Client, random: np.random.Generator, record: Record) -> None:
    """Connects, asks once, and leaves."""
    question, begin = record.tally.question(), perf_counter()
    with Client(record.address, transport="stream" if random.integers(2) else "unary") as own:
        result = own.attend(question.query, question.key, question.value, causal=question.causal)
    record.tally.take(question, result.output, begin)
    record.counts["newcomers"] += 1


def vanishing(client: Client, random: np.random.Generator, record: Record) -> None:
    """Sends calls on a stream, and is gone before they are answered, with or without a word."""
    requests = [_encoded(record.tally.question()) for _ in range(5)]
    message = pb.AttendStreamRequest(
        calls=[pb.AttendStreamCall(id=number, attend=request) for number, request in enumerate(requests, 1)]
    ).SerializeToString()
    channel = grpc.insecure_channel(record.address, [("grpc.use_local_subchannel_pool", 1)])
    stream: Any = channel.stream_stream(STREAM)
    rpc = stream(iter([message] * int(random.integers(1, 4))), timeout=TIMEOUT_S)
    if random.integers(2):
        next(rpc)
    if random.integers(2):
        rpc.cancel()
    channel.close()
    record.counts["vanished"] += 1


def garbage(client: Client, random: np.random.Generator, record: Record) -> None:
    """Connects to a port, sends garbage or half of something, and goes."""
    for address, word in ((record.address, b"PRI * HTTP/2.0\r\n"), (record.http_address, b"GET /metrics HTT")):
        host, port = parse_address(address)
        with socket.create_connection((host, port), TIMEOUT_S) as connection:
            connection.sendall(word if random.integers(2) else os.urandom(200))
    record.counts["garbage"] += 1


def bad_input(client: Client, random: np.random.Generator, record: Record) -> None:
    """Sends requests that break the contract, and must be told so."""
    question = record.tally.question()
    wrong: list[Mapping[str, Any]] = [
        {"scale": float("nan")},
        {"kv_lengths": [10**9]},
        {"mask": np.ones((99, 1, 1), np.bool_)},
        {"window": (-2, 5)},
    ]
    try:
        client.attend(question.query, question.key, question.value, **wrong[random.integers(len(wrong))])
    except InvalidRequestError:
        record.counts["refused"] += 1
    else:
        record.counts["bad input that was answered"] += 1
    message = bytearray(_encoded(question).SerializeToString())
    for place in random.integers(0, len(message), 4):
        message[place] ^= 1 << int(random.integers(8))
    with grpc.insecure_channel(record.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        call: Any = channel.unary_unary(UNARY)
        try:
            call(bytes(message), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND):
                record.counts[f"mutated message: {error.code().name}"] += 1
        record.counts["mutated"] += 1


def caching(client: Client, random: np.random.Generator, record: Record) -> None:
    """Fills a cache, forks it, truncates it, attends to both and deletes them. At times it leaves another fork behind,
    whose lease ends.
    """
    with client.create_cache(2, 8) as cache:
        key, value = random.standard_normal((2, 2, int(random.integers(1, 200)), 8), dtype=np.float32)
        cache.append(key, value)
        branch = cache.fork()
        more = random.standard_normal((2, 2, 5, 8), dtype=np.float32)
        query = random.standard_normal((2, 3, 8), dtype=np.float32)
        result = branch.attend(query, key=more[0], value=more[1])
        whole = np.concatenate([key, more[0]], 1), np.concatenate([value, more[1]], 1)
        wrong = np.abs(result.output - exact(query, *whole, False)).max() > TOLERANCE
        length = int(random.integers(1, key.shape[1] + 1))
        cache.truncate(length)
        output = cache.attend(query).output
        wrong |= np.abs(output - exact(query, key[:, :length], value[:, :length], False)).max() > TOLERANCE
        if random.integers(2):
            branch.fork(ttl=LEASE_S)  # which nobody uses, so that its lease ends, whatever else takes long
        branch.delete()
    record.counts["caches"] += 2
    record.counts["wrong answers of caches"] += bool(wrong)


def large(client: Client, random: np.random.Generator, record: Record) -> None:
    """Sends megabytes of keys and values for a few queries, on a stream or not."""
    keys = int(random.integers(MOST_KEYS // 16, MOST_KEYS))
    query = random.standard_normal((8, 3, 64), dtype=np.float32)
    key, value = random.standard_normal((2, 8, keys, 64), dtype=np.float32)
    with Client(record.address, transport="stream" if random.integers(2) else "unary") as own:
        output = own.attend(query, key, value, timeout=TIMEOUT_S).output
    record.counts["large"] += 1
    record.counts["wrong answers to large ones"] += bool(
        np.abs(output - exact(query, key, value, False)).max() > TOLERANCE
    )


def applying(client: Client, random: np.random.Generator, record: Record) -> None:
    """Applies a resident layer; at times also another one, which it loads before and unloads after."""
    name = projection.NAME
    if own := record.counts["applied"] % 8 == 0:
        (loaded,) = client.layers.load(projection.SPARE_FILE)
        name = loaded.name
        record.counts["layers loaded"] += 1
    inputs = random.standard_normal((int(random.integers(1, 200)), projection.WIDTH), dtype=np.float32)
    output = client.apply(name, inputs, timeout=TIMEOUT_S).output
    if own:
        client.layers.unload(name)
    record.counts["applied"] += 1
    record.counts["wrong answers of layers"] += bool(
        np.abs(output - projection.expected(inputs)).max() > projection.TOLERANCE
    )


def _encoded(question: Any) -> pb.AttendRequest:
    """The question as a request, with one more axis."""
    request = pb.AttendRequest(causal=question.causal)
    for name in ("query", "key", "value"):
        array, tensor = getattr(question, name), getattr(request, name)
        tensor.dtype = 1
        tensor.shape.extend(array.shape)
        tensor.data = array.tobytes()
    return request


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (cancelling, impatient, newcomer, vanishing, garbage, bad_input, caching, large, applying)
    }
)
"""All kinds, by name."""
